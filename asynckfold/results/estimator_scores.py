"""Estimators of scikit-learn beside the candidates of a run, on the same folds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.folds import Fold
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.statistics import (
    Difference,
    bounds_of,
    confidence_interval,
    holm,
    largest_difference,
    paired_differences,
    train_valid_ratio,
)

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]


@dataclass
class EstimatorScores:
    """Scores of one estimator by fold; NaN where it failed."""

    name: str
    metrics: tuple[str, ...]
    planned: int
    scores: dict[str, Floats] = field(init=False)
    fit_seconds: Floats = field(init=False)
    errors: dict[int, str] = field(default_factory=dict)  # by fold

    def __post_init__(self) -> None:
        self.scores = {name: np.full(self.planned, np.nan) for name in self.metrics}
        self.fit_seconds = np.full(self.planned, np.nan)


@dataclass(frozen=True, eq=False)
class EstimatorComparison:
    """Candidates of a run and estimators of scikit-learn, fitted and scored on the same folds.

    ``print`` shows the table and, for each estimator, the difference to the best candidate.

    Attributes
    ----------
    metric : str
        The score that ranks: the run's first.
    differences : tuple of Difference
        Each candidate against each estimator, fold by fold, by the test of `CVResults.compare`;
        p is corrected by Holm's method over all of them, so that it stays valid for the best
        candidate, which is chosen by its scores on these folds.
    errors : dict of str to str
        What failed, by estimator: its first failed fold and why.
    """

    metric: str
    candidates: Sequence[Candidate] = field(repr=False)
    estimators: Sequence[EstimatorScores] = field(repr=False)
    folds: Sequence[Fold] = field(repr=False)

    @property
    def errors(self) -> dict[str, str]:
        """What failed, by estimator."""
        return {
            item.name: f"{len(item.errors)} of {item.planned} folds failed, first fold {number}: "
            f"{item.errors[number]}"
            for item in self.estimators
            for number in list(item.errors)[:1]
        }

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Each candidate against each estimator."""
        rows: list[Any] = [*self.candidates, *self.estimators]
        scores = np.array([row.scores[self.metric] for row in rows])
        largest = largest_difference(self.metric, scores)
        # Unique, also where an estimator has the name of a candidate.
        places = [str(place) for place in range(len(rows))]
        count = len(self.candidates)
        mixed = [
            item
            for item in paired_differences(places, scores, self.folds, largest)
            if (int(item.first) < count) != (int(item.second) < count)
        ]
        return tuple(
            replace(item, first=rows[int(item.first)].name, second=rows[int(item.second)].name)
            for item in holm(mixed)
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas table: candidates and estimators, best first.

        Returns
        -------
        pandas.DataFrame
            ``kind`` is "candidate" or "estimator"; mean and standard deviation of each score over
            the folds, ``ci_low`` and ``ci_high`` of the first, seconds of fitting all folds, and
            ``folds_done`` of ``folds``.
        """
        import pandas as pd

        ratio = train_valid_ratio(self.folds)
        kinds = ["candidate"] * len(self.candidates) + ["estimator"] * len(self.estimators)
        rows = [
            {"kind": kind, **_row(item, self.metric, ratio)}
            for kind, item in zip(kinds, [*self.candidates, *self.estimators], strict=True)
        ]
        frame: pd.DataFrame = pd.DataFrame(rows)
        column = f"mean_{self.metric}"
        return frame.sort_values(column, ascending=False, kind="stable", ignore_index=True)

    def compare(self) -> pd.DataFrame:
        """Return `differences` as a pandas table, with the columns of `CVResults.compare`."""
        import pandas as pd

        columns = [item.name for item in fields(Difference)]
        frame: pd.DataFrame = pd.DataFrame(map(vars, self.differences), columns=columns)
        return frame

    def __str__(self) -> str:
        shown = self.to_frame()[["kind", "name", f"mean_{self.metric}", f"std_{self.metric}"]]
        lines = [shown.to_string(index=False, float_format="{:.4f}".format)]
        ready = [row for row in self.candidates if row.ranks_by(self.metric)]
        if ready:
            best = ready[int(np.argmin(rank(ready, self.metric)))].name
            pairs = [item for item in self.differences if best in (item.first, item.second)]
            lines += map(_sentence, pairs)
        lines += [f"{name}: {text}" for name, text in self.errors.items()]
        return "\n".join(lines)


def _row(item: Any, metric: str, ratio: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": item.name}
    for name, scores in item.scores.items():
        known = scores[~np.isnan(scores)]
        row[f"mean_{name}"] = float(known.mean()) if known.size else math.nan
        row[f"std_{name}"] = float(known.std()) if known.size else math.nan
    scores = item.scores[metric]
    low, high = confidence_interval(scores, ratio, bounds=bounds_of(metric))
    row |= {"ci_low": low, "ci_high": high, "fit_seconds": float(np.nansum(item.fit_seconds))}
    return row | {"folds_done": int((~np.isnan(scores)).sum()), "folds": len(scores)}


def _sentence(item: Difference) -> str:
    if item.conclusion == "equal":
        return f"{item.first} and {item.second}: equal on every fold"
    if item.conclusion == "untestable":
        if not item.folds:
            return f"{item.first} and {item.second}: no fold in common"
        return f"{item.first} ahead of {item.second} by {item.mean:.4f}; no test possible"
    word = "beats" if item.conclusion == "beats" else "ahead of, no clear difference from,"
    return (
        f"{item.first} {word} {item.second} by {item.mean:.4f} "
        f"[{item.ci_low:.4f}, {item.ci_high:.4f}], p = {item.p:.2g}"
    )
