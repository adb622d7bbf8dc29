"""Results of a sweep gathered by candidate (model × LR schedule), their ranking and their jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError, nearest
from asynckfold.jobs.candidate_names import Value, candidate_name, params_of
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import CANCELLED, DIVERGED, DONE, FAILED, Result
from asynckfold.results.statistics import bounds_of, confidence_interval, tied

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """One model × LR schedule over all its folds."""

    model: str
    lr_schedule: str
    scores: Mapping[str, Floats]  # by metric, one per fold; NaN without a score
    fit_seconds: Floats  # one per fold; NaN if pending
    score_seconds: Floats
    done: int  # folds
    planned: int
    status: str  # "done" if complete, else the worst: failed, diverged, cancelled, pending
    device: str = "cpu"  # the kind that its jobs are planned for, or "cuda"

    @property
    def name(self) -> str:
        """``"LeNet/cosine"``."""
        if not self.lr_schedule:
            return self.model  # compared as one, see `verdict`
        return candidate_name(self.model, self.lr_schedule)

    @property
    def params(self) -> dict[str, Value]:
        """``{"model": …, "scheduler": …}``, and the values of a grid."""
        return params_of(self.model, self.lr_schedule)

    @property
    def is_left_out(self) -> bool:
        """Whether racing left it out after its done folds."""
        return self.status == CANCELLED

    @property
    def complete(self) -> bool:
        """Whether every fold has a score; only complete candidates are ranked."""
        return self.done == self.planned

    @property
    def total_fit_seconds(self) -> float:
        """Seconds of training all folds; of an incomplete candidate, mean fold × folds."""
        return _mean(_known(self.fit_seconds)) * self.planned

    def mean(self, metric: str) -> float:
        """Return the mean score over the folds that have one."""
        return _mean(_known(self.scores[metric]))

    def std(self, metric: str) -> float:
        """Return the standard deviation over the same folds, with scikit-learn's divisor n."""
        known = _known(self.scores[metric])
        return float(known.std()) if known.size else math.nan

    def interval(self, metric: str, train_valid_ratio: float) -> tuple[float, float]:
        """Return the `confidence_interval` of the mean; NaN for incomplete candidates.

        The `error_score` of a failed fold is not a sample.
        """
        if not self.complete:
            return math.nan, math.nan
        return confidence_interval(self.scores[metric], train_valid_ratio, bounds=bounds_of(metric))

    def ranks_by(self, metric: str) -> bool:
        """Whether it can be ranked: complete, and every score a number."""
        return self.complete and not np.isnan(self.scores[metric]).any()


def candidates(
    plan: Plan, results: Mapping[str, Result], error_score: float = math.nan
) -> list[Candidate]:
    """Gather results by candidate, in the caller's order."""
    by_pair: dict[tuple[str, str], list[Job]] = {}
    for job in plan.jobs:
        by_pair.setdefault((job.model, job.lr_schedule), []).append(job)
    rows = []
    for (model, lr_schedule), jobs in by_pair.items():
        outcomes = [results.get(job.id) for job in jobs]
        used = [item if item and item.status != CANCELLED else None for item in outcomes]
        rows.append(
            Candidate(
                model,
                lr_schedule,
                {
                    metric: np.array([score_of(item, metric, error_score) for item in used])
                    for metric in plan.scoring
                },
                np.array([item.fit_seconds if item else np.nan for item in used]),
                np.array([item.score_seconds if item else np.nan for item in used]),
                sum(item is not None and item.status == DONE for item in outcomes),
                len(jobs),
                _worst(outcomes),
                plan.device_of(candidate_name(model, lr_schedule)),
            )
        )
    return rows


def score_of(result: Result | None, metric: str, error_score: float) -> float:
    """Return a job's score: `error_score` if it failed, NaN if it is pending or left out."""
    if result is None or result.status == CANCELLED:
        return math.nan
    if result.status != DONE:
        return error_score
    return float(result.scores.get(metric, math.nan))


def _worst(outcomes: Sequence[Result | None]) -> str:
    statuses = {item.status if item else "pending" for item in outcomes}
    ordered = (FAILED, DIVERGED, CANCELLED, "pending")
    return next((status for status in ordered if status in statuses), DONE)


def rank(rows: Sequence[Candidate], metric: str) -> list[int]:
    """Rank candidates by mean score: 1 is best, incomplete ones come last.

    Ties share the best of their ranks, as in scikit-learn. Means that differ only by rounding are
    ties, see `statistics.tied`. The ranks do not depend on the order of the rows.

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
        pair = np.abs([rows[order[lead]].scores[metric], rows[place].scores[metric]])
        if not tied(means[order[lead]], means[place], float(pair.max())):
            lead = position
        ranks[place] = 1 + lead
    return ranks


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _mean(values: Floats) -> float:
    """Return the mean, NaN of nothing; infinities of both signs give NaN without a warning."""
    with np.errstate(invalid="ignore"):
        return float(values.mean()) if values.size else math.nan


# Jobs of candidates


def find_job(plan: Plan, candidate: str, fold: int | str = 0, repeat: int = 0) -> Job:
    """Return a planned job; raise `InputError` if there is none."""
    jobs = [job for job in plan.jobs if job.candidate == candidate]
    for job in jobs:
        if (job.repeat, job.fold) == (repeat, fold):
            return job
    if jobs:
        last = max((job.repeat, job.fold) for job in jobs)
        rule = f"the run has folds 0 to {last[1]} and repeats 0 to {last[0]}"
        received = f"fold={fold}, repeat={repeat}"
        raise InputError.one(rule, received, "Pass one of these.")
    names = plan.candidate_names
    rule = f"candidate must be one of {', '.join(names)}"
    remedy = f"Pass a model/LR schedule of the run.{nearest(candidate, names)}"
    raise InputError.one(rule, repr(candidate), remedy)


def done_jobs(
    plan: Plan,
    results: Mapping[str, Result],
    candidate: str,
    fold: int | str | None = None,
    repeat: int = 0,
) -> list[Job]:
    """Return the job of a fold, by default those of all; raise `InputError` unless all are done."""
    jobs = [find_job(plan, candidate, 0 if fold is None else fold, repeat)]
    if fold is None:
        jobs = [job for job in plan.jobs if job.candidate == candidate]
    unfinished = []
    for job in jobs:
        result = results.get(job.id)
        if result is None or result.status != DONE:
            state = f"{result.status}: {result.error}" if result else "pending"
            unfinished.append(f"{job.id}, which is {state}")
    if unfinished:
        rule = "only jobs that are done have trained weights"
        remedy = "The same call continues the run; or choose another candidate or fold."
        raise InputError.one(rule, "; ".join(unfinished), remedy)
    return jobs
