"""The results of a sweep gathered by candidate, a model × LR schedule, and ranked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import CANCELLED, DIVERGED, DONE, FAILED, Result
from asynckfold.results.statistics import bounds_of, confidence_interval, tied


@dataclass(frozen=True)
class Candidate:
    """One row of the ranking: a model × LR schedule over all its folds.

    Parameters
    ----------
    model, lr_schedule : str
        Names.
    scores : Mapping of str to ndarray of shape (n_folds,)
        By metric; NaN where a fold has no score.
    fit_seconds, score_seconds : ndarray of shape (n_folds,)
        NaN where a fold did not end.
    done, planned : int
        Folds.
    status : str
        ``"done"`` when complete, else the worst that happened: ``"failed"``, ``"diverged"``,
        ``"cancelled"`` or ``"pending"``.
    """

    model: str
    lr_schedule: str
    scores: Mapping[str, npt.NDArray[np.float64]]
    fit_seconds: npt.NDArray[np.float64]
    score_seconds: npt.NDArray[np.float64]
    done: int
    planned: int
    status: str

    @property
    def name(self) -> str:
        """``"LeNet/cosine"``."""
        return f"{self.model}/{self.lr_schedule}"

    @property
    def complete(self) -> bool:
        """Whether every fold has a score; only then is the candidate ranked."""
        return self.done == self.planned

    def interval(self, metric: str, train_valid_ratio: float) -> tuple[float, float]:
        """Return the `confidence_interval` of the mean; NaN where a fold has no score of its own.

        What stands for the score of a job that failed is no sample of it.
        """
        if not self.complete:
            return math.nan, math.nan
        return confidence_interval(self.scores[metric], train_valid_ratio, bounds=bounds_of(metric))

    def ranks_by(self, metric: str) -> bool:
        """Whether it can be ranked: complete, and its mean a number."""
        return self.complete and not np.isnan(self.scores[metric]).any()


def candidates(
    plan: Plan, results: Mapping[str, Result], error_score: float = float("nan")
) -> list[Candidate]:
    """Gather results by candidate, in the caller's order."""
    rows = []
    for model, lr_schedule in plan.candidates:
        jobs = [job for job in plan.jobs if (job.model, job.lr_schedule) == (model, lr_schedule)]
        found = [results.get(job.id) for job in jobs]
        rows.append(
            Candidate(
                model,
                lr_schedule,
                {
                    metric: np.array([score_of(item, metric, error_score) for item in found])
                    for metric in plan.scoring
                },
                np.array([item.fit_seconds if item else np.nan for item in found]),
                np.array([item.score_seconds if item else np.nan for item in found]),
                sum(item is not None and item.status == DONE for item in found),
                len(jobs),
                _worst(found),
            )
        )
    return rows


def score_of(result: Result | None, metric: str, error_score: float) -> float:
    """Return a job's score; `error_score` where it failed, NaN where it has no result yet."""
    if result is None:
        return float("nan")
    if result.status != DONE:
        return error_score
    return float(result.scores.get(metric, float("nan")))


def _worst(found: Sequence[Result | None]) -> str:
    statuses = {item.status if item else "pending" for item in found}
    for status in (FAILED, DIVERGED, CANCELLED, "pending"):
        if status in statuses:
            return status
    return DONE


def rank(rows: Sequence[Candidate], metric: str) -> list[int]:
    """Rank candidates by mean score, 1 is best; incomplete ones come last.

    Ties share the best of their ranks, as in scikit-learn. Means that differ by rounding only are
    tied, see `asynckfold.results.statistics.tied`: the order in which folds are added up ranks
    nobody. Independent of the order of the rows, NaN or not.

    Examples
    --------
    >>> from types import SimpleNamespace as Row
    >>> rows = [Row(complete=True, scores={"a": np.array([value])}) for value in (0.5, 0.9, 0.5)]
    >>> rank(rows, "a")
    [2, 1, 2]
    """
    means = [_mean(row.scores[metric]) if row.complete else math.nan for row in rows]
    order = sorted(
        (place for place, mean in enumerate(means) if not math.isnan(mean)),
        key=lambda place: -means[place],
    )
    ranks = [1 + len(order)] * len(rows)
    lead = 0
    for position, place in enumerate(order):
        one, other = rows[order[lead]].scores[metric], rows[place].scores[metric]
        if not tied(means[order[lead]], means[place], max(_size(one), _size(other))):
            lead = position
        ranks[place] = 1 + lead
    return ranks


def _mean(scores: npt.NDArray[np.float64]) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.mean(scores))


def _size(scores: npt.NDArray[np.float64]) -> float:
    return float(np.abs(scores).max())


def folds_note(done: int, planned: int) -> str:
    """Return ``"5 of 5 folds"``, marked where a fold is missing.

    >>> folds_note(4, 5)
    '4 of 5 folds, incomplete'
    """
    return f"{done} of {planned} folds{'' if done == planned else ', incomplete'}"
