"""The results of a sweep gathered by candidate, a model × LR schedule, and ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asynckfold.plan import Plan
from asynckfold.result import CANCELLED, DIVERGED, DONE, FAILED, Result


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
    """Rank candidates by mean score, 1 is best; ties share a rank; incomplete ones come last.

    Independent of the order of the rows, NaN or not.

    Examples
    --------
    >>> from types import SimpleNamespace as Row
    >>> rows = [Row(complete=True, scores={"a": np.array([value])}) for value in (0.5, 0.9, 0.5)]
    >>> rank(rows, "a")
    [2, 1, 2]
    """
    means = [float(np.mean(row.scores[metric])) if row.complete else float("nan") for row in rows]
    finite = [value for value in means if not np.isnan(value)]
    return [
        1 + (len(finite) if np.isnan(value) else sum(other > value for other in finite))
        for value in means
    ]


def folds_note(done: int, planned: int) -> str:
    """Return ``"5 of 5 folds"``, marked where a fold is missing.

    >>> folds_note(4, 5)
    '4 of 5 folds, incomplete'
    """
    return f"{done} of {planned} folds{'' if done == planned else ', incomplete'}"
