"""Nested cross-validation: inner folds choose a candidate, and their outer fold scores it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import Result
from asynckfold.results.candidates import candidates, rank, score_of
from asynckfold.system.plain_text import one_line

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class NestedFold:
    """A fold, and the candidate that its inner folds chose.

    Parameters
    ----------
    repeat, fold : int
        The fold, which none of its inner folds has seen.
    candidate : str
        The one with the highest mean over the inner folds; empty if none has a score on each.
    inner_score, outer_score : float
        That mean, which chose it, and its score on the fold; NaN where there is none.
    """

    repeat: int
    fold: int
    candidate: str
    inner_score: float
    outer_score: float


@dataclass(frozen=True, eq=False)
class NestedScores:
    """How well choosing the best candidate does: print it for a table.

    Parameters
    ----------
    metric : str
        The first score: it chooses, and greater is better.
    folds : tuple of NestedFold
        Those whose jobs have ended.
    planned : int
        Folds of the run.
    best_score : float
        Ordinary mean of the best candidate, over the folds that also chose it; NaN without one.
    """

    metric: str
    folds: tuple[NestedFold, ...]
    planned: int
    best_score: float
    _rows: tuple[Mapping[str, Any], ...] = ()

    @property
    def mean(self) -> float:
        """Mean of the outer scores: what the choice of a candidate may expect on new samples."""
        return float(np.mean(self._outer)) if self.folds else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of the outer scores, with scikit-learn's divisor n."""
        return float(np.std(self._outer)) if self.folds else math.nan

    @property
    def bias(self) -> float:
        """`best_score` − `mean`: by how much choosing flatters; NaN before all folds are there."""
        return self.best_score - self.mean if len(self.folds) == self.planned else math.nan

    @property
    def _outer(self) -> list[float]:
        return [fold.outer_score for fold in self.folds]

    @property
    def inner_scores(self) -> pd.DataFrame:
        """A pandas table of all inner jobs: candidate, fold, inner fold, status, and scores."""
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame([*self._rows])
        return frame

    @property
    def sentence(self) -> str:
        """Score, bias and choices in words; empty before all folds have a score."""
        if math.isnan(self.bias):
            return ""
        counts = Counter(fold.candidate for fold in self.folds)
        chosen = ", ".join(f"{one_line(name)} on {count}" for name, count in counts.most_common())
        return (
            f"Nested: {one_line(self.metric)} {self.mean:.4f} ± {self.std:.4f} where inner folds "
            f"choose the candidate; the highest mean, {self.best_score:.4f}, has a bias of "
            f"{self.bias:+.4f}. Of {self.planned} folds, they choose {chosen}."
        )

    def __str__(self) -> str:
        table = [
            f"{row.repeat:6}  {row.fold:4}  {row.inner_score:7.4f}  {row.outer_score:7.4f}  "
            f"{one_line(row.candidate) or 'none'}"
            for row in self.folds
        ]
        state = f"{len(self.folds)} of {self.planned} folds have ended"
        head = "repeat  fold    inner    outer  candidate"
        return "\n".join([head, *table, self.sentence or state])


def nested_scores(
    plan: Plan, results: Mapping[str, Result], error_score: float, best_score: float
) -> NestedScores:
    """Choose a candidate on the inner folds of each fold; `plan` has all jobs."""
    metric, inner = plan.scoring[0], dict[tuple[int, ...], list[Job]]()
    outer = {(job.candidate, *job.key): job for job in plan.outer.jobs}
    for job in plan.jobs:
        if job.inner is not None:
            inner.setdefault(job.key[:2], []).append(job)
    folds = []
    for (repeat, fold), jobs in inner.items():
        if any(job.id not in results for job in jobs):
            continue
        rows = candidates(replace(plan, jobs=tuple(jobs)), results)
        chosen = rows[int(np.argmin(rank(rows, metric)))]
        if not chosen.ranks_by(metric):
            folds.append(NestedFold(repeat, fold, "", math.nan, math.nan))
            continue
        result = results.get(outer[chosen.name, repeat, fold].id)
        if result is not None:
            score = score_of(result, metric, error_score)
            folds.append(NestedFold(repeat, fold, chosen.name, chosen.mean(metric), score))
    rows_of_jobs = tuple(
        {"candidate": job.candidate, "repeat": job.repeat, "fold": job.fold, "inner": job.inner}
        | {"status": result.status if (result := results.get(job.id)) else "pending"}
        | {name: score_of(result, name, math.nan) for name in plan.scoring}
        for jobs in inner.values()
        for job in jobs
    )
    return NestedScores(metric, tuple(folds), len(inner), best_score, rows_of_jobs)
