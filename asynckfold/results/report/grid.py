"""What varies in a grid: its parameters, and names of candidates without what they share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asynckfold.jobs.candidate_names import base_of, params_of, values_of
from asynckfold.results.report.candidate_rows import CandidateRow

ABSENT = "–"
"""Stands for the value of a parameter that a candidate does not take."""
BASES = {"model": "model", "scheduler": "LR schedule"}
"""Titles of what each candidate has, with a grid or without."""


@dataclass(frozen=True)
class Parameter:
    """A parameter with several values, the model or the LR schedule."""

    name: str
    title: str
    values: tuple[str, ...]  # numbers rise, others are in order of appearance
    is_numeric: bool


@dataclass(frozen=True)
class Grid:
    """What varies between the candidates of a grid."""

    parameters: tuple[Parameter, ...]
    shared: Mapping[str, str]  # values that all candidates have

    def values(self, row: CandidateRow) -> tuple[str, ...]:
        """Return the value of each parameter of a candidate, as text."""
        given = params_of(row.model, row.lr_schedule)
        return tuple(str(given.get(item.name, ABSENT)) for item in self.parameters)

    def labels(self, rows: Sequence[CandidateRow]) -> dict[str, str]:
        """Return short names of candidates, and of their models and LR schedules with values."""
        labels = {row.name: self._label(row.model, row.lr_schedule) for row in rows}
        for name in {name for row in rows for name in (row.model, row.lr_schedule)}:
            if values_of(name):
                labels[name] = self._label(name) or base_of(name)
        return labels

    def _label(self, *names: str) -> str:
        varied, given = {item.name for item in self.parameters}, values_of(*names)
        bases = dict(zip(BASES, names, strict=False))
        named = [base_of(name) for kind, name in bases.items() if kind in varied]
        pairs = [f"{name}={value}" for name, value in given.items() if name in varied]
        return ", ".join([*(["/".join(named)] if named else []), *pairs])


def grid_of(rows: Sequence[CandidateRow]) -> Grid | None:
    """Return what varies; None of a run without a grid, or whose grid has one point."""
    listed = [params_of(row.model, row.lr_schedule) for row in rows]
    values: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for given in listed for name in given):
        values[name] = {str(given.get(name, ABSENT)): given.get(name, ABSENT) for given in listed}
    varied = tuple(_parameter(name, kinds) for name, kinds in values.items() if len(kinds) > 1)
    if all(item.name in BASES for item in varied):
        return None
    shared = {name: next(iter(kinds)) for name, kinds in values.items() if len(kinds) == 1}
    return Grid(varied, {BASES.get(name, name): value for name, value in shared.items()})


def _parameter(name: str, values: Mapping[str, Any]) -> Parameter:
    numbers = {text: value for text, value in values.items() if text != ABSENT}
    is_numeric = len(numbers) > 1 and {*map(type, numbers.values())} <= {int, float}
    order = sorted(numbers, key=lambda text: numbers[text]) if is_numeric else [*numbers]
    if ABSENT in values:
        order.append(ABSENT)
    return Parameter(name, BASES.get(name, name), tuple(order), is_numeric)


def renamed(labels: Mapping[str, str], text: str) -> str:
    """Put labels in place of the names in a text.

    >>> renamed({"net/width=1": "width=1", "net/width=16": "width=16"}, "net/width=16 is best")
    'width=16 is best'
    """
    pattern = _pattern(tuple(sorted(labels, key=len, reverse=True)))
    return pattern.sub(lambda match: labels[match[0]], text)


@lru_cache(maxsize=8)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))
