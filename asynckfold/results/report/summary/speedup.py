"""The speedup: serial against packed seconds, and accuracy of both, fold by fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asynckfold.jobs.result import Baseline
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.summary.candidates import CandidateRow
from asynckfold.results.speedup import Speedup


@dataclass(frozen=True)
class AccuracyPair:
    """Accuracy of one candidate in the packed run and in the serial baseline.

    Parameters
    ----------
    candidate : str
        Model / LR schedule.
    packed, serial : float
        Means over the folds.
    folds : tuple of FoldPair
        Each fold that both have.
    """

    candidate: str
    packed: float
    serial: float
    folds: tuple[FoldPair, ...] = ()


@dataclass(frozen=True)
class FoldPair:
    """Accuracy of one job in the packed run and in the serial baseline.

    Parameters
    ----------
    fold : str
        Its number, behind that of the repeat where there are several.
    together : int
        How many jobs were trained as one with it, itself included: 1 for a job by itself.
    packed, serial : float
        Of all samples of the fold.
    """

    fold: str
    together: int
    packed: float
    serial: float


@dataclass(frozen=True)
class Timing(Speedup):
    """Serial against packed wall time, and the accuracy of both.

    Parameters
    ----------
    accuracy : tuple of AccuracyPair
        Empty for an estimate, and where accuracy is not among the run's scores.
    disturbance : str
        Who else used the machine while times were taken; empty where nobody did.
    """

    accuracy: tuple[AccuracyPair, ...] = ()
    disturbance: str = ""


def timing_of(found: CVResults, rows: Sequence[CandidateRow]) -> Timing | None:
    """Return serial against packed wall time; None without a baseline."""
    baseline = found.baseline
    if baseline is None:
        return None
    serial = {
        f"{clean(model)}/{clean(lr_schedule)}": baseline.accuracy[f"{model}/{lr_schedule}"]
        for model, lr_schedule in found.plan.candidates
        if f"{model}/{lr_schedule}" in baseline.accuracy
    }
    pairs = _fold_pairs(found, baseline)
    decided = found.timing
    return Timing(
        kind=clean(decided.kind),
        ratio=decided.ratio,
        estimate=decided.estimate,
        why_not=clean(decided.why_not, 4096),
        serial_seconds=decided.serial_seconds,
        packed_seconds=decided.packed_seconds,
        serial_threads=decided.serial_threads,
        accuracy=tuple(
            AccuracyPair(row.name, row.mean["accuracy"], serial[row.name], pairs.get(row.name, ()))
            for row in rows
            if row.name in serial and "accuracy" in row.mean
        ),
        disturbance=baseline.disturbance,
    )


def _fold_pairs(found: CVResults, baseline: Baseline) -> dict[str, tuple[FoldPair, ...]]:
    """Return the scores of each fold that both have, by candidate."""
    repeats = len({job.repeat for job in found.plan.jobs})
    pairs: dict[str, tuple[FoldPair, ...]] = {}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if result is None or job.id not in baseline.by_job or "accuracy" not in result.scores:
            continue
        fold = f"{job.repeat}.{job.fold}" if repeats > 1 else str(job.fold)
        together = len(found.plan.group_of(job.id))
        pair = FoldPair(fold, together, result.scores["accuracy"], baseline.by_job[job.id])
        name = f"{clean(job.model)}/{clean(job.lr_schedule)}"
        pairs[name] = (*pairs.get(name, ()), pair)
    return pairs
