"""What varies in a grid, short names of its candidates, and which parameter matters."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.candidate_names import base_of, params_of, values_of
from asynckfold.results.report.candidate_rows import CandidateRow
from asynckfold.results.statistics import Floats, bounds_of, confidence_interval

Places = npt.NDArray[np.int64]

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


# Which parameter matters

LEVELS, ENOUGH = 8, 8
"""Values of a number that stand alone, more are grouped; and candidates that a forest needs."""
TREES, SHUFFLES, GROUPS = 100, 20, 5


@dataclass(frozen=True)
class Effect:
    """The mean over the candidates with a value, or with numbers of a range, fold by fold."""

    name: str
    candidates: int
    scores: Mapping[str, tuple[float, ...]]  # by metric, one per fold
    mean: Mapping[str, float]
    ci_low: float  # 95 %, corrected as that of a candidate
    ci_high: float


@dataclass(frozen=True)
class Effects:
    """Which parameter matters, over the candidates with a score on every fold.

    Importance is how much of the variance of the candidates' means a random forest explains no more
    once the values of a parameter are shuffled (Breiman 2001).
    """

    effects: Mapping[str, tuple[Effect, ...]]  # by title of the parameter, in its order
    explained: float  # R² of the forest on candidates that its trees did not see; NaN without one
    importance: Mapping[str, float]  # largest first; empty unless `explained` is above 0
    pair: tuple[str, str] | None  # of the two numeric parameters that matter most
    means: tuple[tuple[float, ...], ...]  # a row for each value of the first; NaN without candidate


def effects_of(
    grid: Grid, rows: Sequence[CandidateRow], metric: str, train_valid_ratio: float
) -> Effects | None:
    """Return the effects of all parameters; None with fewer than two complete candidates."""
    kept = [row for row in rows if row.rank is not None and np.isfinite(row.scores[metric]).all()]
    if len(kept) < 2:
        return None
    scores = np.array([row.scores[metric] for row in kept])
    columns = [*zip(grid.parameters, zip(*map(grid.values, kept), strict=True), strict=True)]
    levels = {item.title: _levels(item, column) for item, column in columns}
    # Of a race, or where some failed, a value may have no complete candidate.
    present = {
        title: [(name, places == level) for level, name in enumerate(names) if level in places]
        for title, (names, places) in levels.items()
    }
    effects = {
        title: tuple(_effect(name, scores[has], metric, train_valid_ratio) for name, has in listed)
        for title, listed in present.items()
    }
    codes = {
        item.title: np.array([item.values.index(text) for text in column])
        for item, column in columns
    }
    nominal = {item.title for item in grid.parameters if not item.is_numeric}
    explained, importance = forest_importance(codes, nominal, scores.mean(axis=1))
    order = [*importance] or [*effects]
    numeric = {item.title for item in grid.parameters if item.is_numeric}
    pair = [title for title in order if title in numeric and len(present[title]) > 1][:2]
    means: list[tuple[float, ...]] = []
    if len(pair) == 2:
        for _, in_row in present[pair[0]]:
            cells = [scores[in_row & in_column] for _, in_column in present[pair[1]]]
            means.append(tuple(float(cell.mean()) if cell.size else math.nan for cell in cells))
    both = (pair[0], pair[1]) if len(pair) == 2 else None
    return Effects(effects, explained, importance, both, tuple(means))


def _levels(item: Parameter, column: Sequence[str]) -> tuple[list[str], Places]:
    """Return names of values, or of groups of many numbers, and which of them each has."""
    places = np.array([item.values.index(text) for text in column])
    if not item.is_numeric or len(item.values) <= LEVELS:
        return [*item.values], places
    count = len(item.values) - (ABSENT in item.values)
    bounds = np.linspace(0, count, GROUPS + 1).round().astype(int)
    names = [
        f"{item.values[low]} to {item.values[high - 1]}" for low, high in pairwise(bounds.tolist())
    ]
    grouped = np.searchsorted(bounds, places, side="right") - 1
    return [*names, *([ABSENT] if ABSENT in item.values else [])], grouped


def _effect(name: str, scores: Floats, metric: str, train_valid_ratio: float) -> Effect:
    folds = scores.mean(axis=0)
    low, high = confidence_interval(folds, train_valid_ratio, bounds_of(metric))
    means = {metric: float(folds.mean())}
    return Effect(name, len(scores), {metric: tuple(folds.tolist())}, means, low, high)


def forest_importance(
    codes: Mapping[str, Places], nominal: Collection[str], means: Floats
) -> tuple[float, dict[str, float]]:
    """Return the R² of a forest on what its trees did not see, and the importance of each column.

    Importance is the mean loss of R² when a column is shuffled. It is empty if R² is not above 0,
    R² NaN for few or equal means.

    Parameters
    ----------
    codes : Mapping of str to ndarray of shape (candidates,)
        The place of each candidate's value, by parameter.
    nominal : collection of str
        Parameters whose values have no order: each value gets its column.
    means : ndarray of shape (candidates,)
        Mean scores.
    """
    if len(means) < ENOUGH or not means.std() > 0:
        return math.nan, {}
    from sklearn.ensemble import RandomForestRegressor

    parts = [
        np.eye(places.max() + 1)[places] if title in nominal else places[:, None]
        for title, places in codes.items()
    ]
    table = np.concatenate(parts, axis=1).astype(np.float32)
    forest = RandomForestRegressor(TREES, oob_score=True, random_state=0, n_jobs=1)
    with warnings.catch_warnings():
        # Some candidate may be in the sample of every tree.
        warnings.simplefilter("ignore", UserWarning)
        forest.fit(table, means)
    explained = float(forest.oob_score_)
    if not explained > 0:
        return explained, {}
    rng, ends = np.random.default_rng(0), np.cumsum([part.shape[1] for part in parts])
    tables = []
    for end, part in zip(ends, parts, strict=True):
        for _ in range(SHUFFLES):
            shuffled = table.copy()
            shuffled[:, end - part.shape[1] : end] = part[rng.permutation(len(table))]
            tables.append(shuffled)
    guesses = forest.predict(np.concatenate([table, *tables])).reshape(-1, len(table))
    errors = ((guesses - means) ** 2).mean(axis=1) / means.var()
    losses = (errors[1:].reshape(len(parts), SHUFFLES) - errors[0]).mean(axis=1)
    pairs = zip(codes, np.maximum(losses, 0.0).tolist(), strict=True)
    return explained, dict(sorted(pairs, key=lambda pair: -pair[1]))
