"""Where the command prints: results to standard output, errors to standard error."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asynckfold.system import terminal
from asynckfold.system.plain_text import one_line

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 240
"""Width of tables that are printed to a file or a pipe."""

ROOM = 120
"""Columns of a terminal from which on tables have all of theirs."""


class Output:
    """Prints results to standard output and errors to standard error.

    A reader that goes away (``asynckfold run | head -1``) silences the output and stops nothing.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.json = bool(getattr(parsed, "json", False))
        self.verbose = int(getattr(parsed, "verbose", 0))

    def say(self, what: Any = "", *, wraps: bool = True) -> None:
        """Print a line or a table of rich; nothing with ``--json``.

        A terminal gets lines that break between words, unless not `wraps`, and tables of its width.
        """
        if self.json:
            return
        is_terminal = terminal.is_terminal()
        if isinstance(what, str) and not (is_terminal and wraps):
            terminal.write(f"{one_line(what)}\n")
            return
        from asynckfold.system.console import console, hung

        # A file or a pipe has no width: names stay whole there.
        width = None if is_terminal else WIDE
        place = console(width=width, soft_wrap=not (is_terminal and wraps))
        place.print(hung(one_line(what), place) if isinstance(what, str) else what)

    @property
    def is_wide(self) -> bool:
        """Whether there is room for all columns of a table."""
        return not terminal.is_terminal() or shutil.get_terminal_size().columns >= ROOM

    def data(self, what: Mapping[str, Any]) -> None:
        """Print one JSON object; nothing without ``--json``."""
        if self.json:
            from asynckfold.results.report.sanitize import plain_data

            terminal.write(f"{json.dumps(plain_data(what), default=str)}\n")

    def error(self, text: str) -> None:
        """Print to standard error."""
        terminal.complain(text)


def table_of(
    columns: Collection[str],
    rows: Iterable[Sequence[str]],
    left: Collection[str] = (),
    styles: Sequence[str] = (),
    gap: int = 2,
) -> Table:
    """Return a table without lines: numbers to the right, the columns `left` to the left.

    Only names in columns to the left are folded where there is no room. ``styles`` are those of the
    first rows, ``gap`` is the space between columns.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
    for name in columns:
        is_name = name in left
        justify: Any = "left" if is_name else "right"
        table.add_column(Text(name), justify=justify, no_wrap=not is_name, overflow="fold")
    for place, row in enumerate(rows):
        style = styles[place] if place < len(styles) else ""
        table.add_row(*(Text(one_line(cell)) for cell in row), style=style)
    return table
