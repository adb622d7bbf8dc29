"""A table of measurements with the machine, the command and notes."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckfold.results.report.charts import Chart, Drawing


@dataclass(frozen=True)
class BenchTable:
    """The result of one benchmark; `header` has the columns, with units, separated by " | ".

    ``more`` are further tables of the same subject, and ``figures`` are drawings of the rows, by
    the last part of their file names.
    """

    title: str
    header: str
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[BenchTable, ...] = ()
    figures: Mapping[str, Drawing] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.header.split(" | "))

    def cells(self) -> list[list[str]]:
        """Return the rows as text."""
        return [[shown(value) for value in row] for row in self.rows]

    def to_json(self) -> dict[str, Any]:
        """Return the table as one object, with a mapping per row."""
        more = {"more": [table.to_json() for table in self.more]} if self.more else {}
        return {
            "title": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "notes": list(self.notes),
            "machine": dict(self.machine),
            **more,
        }

    def to_markdown(self, command: str, charts: Sequence[Chart] = ()) -> str:
        """Return the table as a page, with the command that made it and its pictures.

        Examples
        --------
        >>> print(BenchTable("Pi", "name | value", (("pi", 3.14159),)).to_markdown("bench pi"))
        # Pi
        <BLANKLINE>
        Made by `bench pi`.
        <BLANKLINE>
        | name | value |
        |---|---|
        | pi | 3.14 |
        <BLANKLINE>
        """
        lines = [f"# {self.title}", "", f"Made by `{command}`.", ""]
        if self.machine:
            lines += [", ".join(f"{key}: {value}" for key, value in self.machine.items()), ""]
        lines += self._rows()
        for chart in charts:
            lines += ["", f"![{chart.alt}]({chart.name}.png)", "", f"[As SVG]({chart.name}.svg)"]
        lines += self._notes()
        for table in self.more:
            lines += ["", f"## {table.title}", "", *table._rows(), *table._notes()]
        return "\n".join([*lines, ""])

    def _rows(self) -> list[str]:
        rule = _row(["---"] * len(self.columns)).replace(" ", "")
        return [_row(self.columns), rule, *map(_row, self.cells())]

    def _notes(self) -> list[str]:
        return ["", *(f"- {note}" for note in self.notes)] if self.notes else []


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: Any) -> str:
    """Return a value as text, numbers with three significant digits.

    Examples
    --------
    >>> [shown(value) for value in (0.012345, 12.345, 1234.5, 7, "MLP", None)]
    ['0.0123', '12.3', '1234', '7', 'MLP', '–']
    """
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def in_words(header: str, row: Sequence[Any]) -> str:
    """Return a row as one line: its first cell, then each column with its value.

    Examples
    --------
    >>> in_words("work | loader s | peer s", ("MLP", 2.5, None))
    'MLP: loader s 2.5, peer s –'
    """
    cells = zip(header.split(" | ")[1:], row[1:], strict=True)
    return f"{row[0]}: {', '.join(f'{name} {shown(value)}' for name, value in cells)}"


def silent(line: str) -> None:
    """Discard progress."""


def machine_facts() -> dict[str, Any]:
    """Return processor, cores and versions."""
    from asynckfold.system.machine import Machine

    cpu = Machine("cpu").describe()["cpu"]
    return {
        "processor": cpu["model"],
        "cores": cpu["allowed"],
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "asynckfold": metadata.version("asynckfold"),
    }
