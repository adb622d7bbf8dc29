"""The speedup: serial against packed seconds, and the accuracy of both fold by fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asynckfold.jobs.result import DONE, Baseline
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.sanitize import ERROR_LIMIT, clean, shown
from asynckfold.results.report.summary.candidates import CandidateRow
from asynckfold.results.speedup import Speedup, accuracy_of


@dataclass(frozen=True)
class AccuracyPair:
    """Mean accuracy of a candidate in the packed run and in the serial baseline."""

    candidate: str
    packed: float
    serial: float
    folds: tuple[FoldPair, ...] = ()  # each fold that both have


@dataclass(frozen=True)
class FoldPair:
    """Accuracy of one job in the packed run and in the serial baseline."""

    fold: str  # "3", or "repeat.fold"
    together: int  # size of its fusion group, 1 without one
    packed: float
    serial: float


@dataclass(frozen=True)
class TimedSpeedup(Speedup):
    """Serial against packed wall time, and the accuracy of both."""

    accuracy: tuple[AccuracyPair, ...] = ()  # empty for an estimate, and if it is not scored
    disturbance: str = ""  # use by other programs during the timing; empty if there was none


def timing_of(found: Outcome, rows: Sequence[CandidateRow]) -> TimedSpeedup | None:
    """Return serial against packed wall time; None without a baseline."""
    baseline = found.baseline
    if baseline is None:
        return None
    pairs = _fold_pairs(found, baseline)
    timing = found.timing
    timing = replace(timing, kind=clean(timing.kind), why_not=clean(timing.why_not, ERROR_LIMIT))
    accuracy = (
        AccuracyPair(row.name, row.packed_accuracy, row.serial_accuracy, pairs.get(row.name, ()))
        for row in rows
        if math.isfinite(row.packed_accuracy) and math.isfinite(row.serial_accuracy)
    )
    return TimedSpeedup(**vars(timing), accuracy=tuple(accuracy), disturbance=baseline.disturbance)


def _fold_pairs(found: Outcome, baseline: Baseline) -> dict[str, tuple[FoldPair, ...]]:
    """Return the accuracy of each fold that both have, by candidate."""
    repeated = len({job.repeat for job in found.plan.jobs}) > 1
    pairs: dict[str, tuple[FoldPair, ...]] = {}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if result is None or job.id not in baseline.by_job or result.status != DONE:
            continue
        accuracy = accuracy_of(result)
        if accuracy is None:
            continue
        fold = f"{job.repeat}.{job.fold}" if repeated else str(job.fold)
        together = len(found.plan.group_of(job.id))
        pair = FoldPair(fold, together, accuracy, baseline.by_job[job.id])
        name = shown(job).candidate
        pairs[name] = (*pairs.get(name, ()), pair)
    return pairs
