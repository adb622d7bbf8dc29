"""The ranking: scores fold by fold, learning curves and classes of each candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import DONE, Epoch
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.outcome import Outcome, pairs_of, times_of
from asynckfold.results.report.predictions import Points, class_accuracy
from asynckfold.results.report.sanitize import ERROR_LIMIT, clean, shown
from asynckfold.results.speedup import AgainstSerial, Speedup, accuracy_of
from asynckfold.results.statistics import Difference, train_valid_ratio


@dataclass(frozen=True)
class Curve:
    """One measure over the epochs of a candidate."""

    measure: str  # "train_loss", "valid_loss", "accuracy" or "lr"
    mean: tuple[float, ...]  # over `folds`; NaN from the epoch on that one of them lacks
    folds: tuple[tuple[float, ...], ...]  # a line per job with epochs, from epoch 1


@dataclass(frozen=True)
class CandidateRow:
    """One model × LR schedule in the ranking; see `Candidate`."""

    name: str
    model: str
    lr_schedule: str
    rank: int | None  # 1 is best; None if a fold is missing or the mean is not a number
    status: str
    folds_done: int
    folds: int
    scores: Mapping[str, tuple[float, ...]]  # by metric, one per fold
    mean: Mapping[str, float]
    std: Mapping[str, float]
    ci_low: float  # of the first metric's mean, 95 %, corrected; NaN if incomplete
    ci_high: float
    fit_seconds: float
    curves: tuple[Curve, ...]
    confusion: tuple[tuple[int, ...], ...] | None  # a row per true, a column per predicted class
    class_accuracy: tuple[float, ...] | None  # recall; NaN for a class without held-out samples
    serial_class_accuracy: tuple[float, ...] | None  # the same in the measured serial loop
    baseline: str  # this and the following: see `AgainstSerial`
    serial_seconds: float
    estimated_serial_seconds: float
    packed_seconds: float
    speedup: float
    packed_accuracy: float
    serial_accuracy: float
    device: str  # "cpu" or "cuda"
    to_first: Difference | None  # against the first candidate; None of itself

    @property
    def complete(self) -> bool:
        """Whether every fold has a score."""
        return self.folds_done == self.folds


def candidate_rows(
    outcome: Outcome, confusions: Mapping[str, npt.NDArray[np.int64]]
) -> tuple[CandidateRow, ...]:
    """Return a row for each candidate, best first, unranked ones last."""
    metric, ratio = outcome.plan.scoring[0], train_valid_ratio(outcome.folds)
    times, serial, pairs = times_of(outcome), serial_class_accuracy(outcome), _to_first(outcome)
    jobs = _with_epochs(outcome)
    rows = []
    for candidate, position in by_rank(outcome):
        name = candidate.name
        model, lr_schedule = clean(candidate.model), clean(candidate.lr_schedule)
        scores, (low, high) = candidate.scores, candidate.interval(metric, ratio)
        confusion, pair = confusions.get(name), pairs.get(name)
        by_class = confusion is not None and class_accuracy(confusion, len(outcome.plan.classes))
        rows.append(
            CandidateRow(
                name=candidate_name(model, lr_schedule),
                model=model,
                lr_schedule=lr_schedule,
                rank=position,
                status=candidate.status,
                folds_done=candidate.done,
                folds=candidate.planned,
                scores={clean(each): tuple(values.tolist()) for each, values in scores.items()},
                mean={clean(each): candidate.mean(each) for each in scores},
                std={clean(each): candidate.std(each) for each in scores},
                ci_low=low,
                ci_high=high,
                fit_seconds=candidate.total_fit_seconds,
                curves=_curves([outcome.results[job.id].epochs for job in jobs.get(name, ())]),
                confusion=None if confusion is None else tuple(map(tuple, confusion.tolist())),
                class_accuracy=by_class or None,
                serial_class_accuracy=serial.get(name),
                **{**vars(times[name]), "baseline": clean(times[name].baseline)},
                device=clean(candidate.device),
                to_first=pair and replace(pair, first=clean(pair.first), second=clean(pair.second)),
            )
        )
    return tuple(rows)


def by_rank(outcome: Outcome) -> list[tuple[Candidate, int | None]]:
    """Return the candidates with their rank, best first; unranked ones last, with None."""
    metric, listed = outcome.plan.scoring[0], outcome.candidates
    worst = len(listed) + 1
    ranked = [
        (candidate, position if candidate.ranks_by(metric) else None)
        for candidate, position in zip(listed, rank(listed, metric), strict=True)
    ]
    return sorted(ranked, key=lambda item: (item[1] or worst, -item[0].done))


def _to_first(outcome: Outcome) -> dict[str, Difference]:
    """Return how the first candidate compares with each of the others, by their name."""
    if not outcome.has_best:
        return {}
    first = outcome.candidates[outcome.best_index_].name
    pairs = [pair for pair in pairs_of(outcome) if first in (pair.first, pair.second)]
    return {pair.first if pair.second == first else pair.second: pair for pair in pairs}


def _curves(histories: Sequence[Sequence[Epoch]]) -> tuple[Curve, ...]:
    curves = []
    for measure in ("train_loss", "valid_loss", "accuracy", "lr"):
        lines = [
            np.array([getattr(item, measure) for item in history], float) for history in histories
        ]
        if not all(np.isnan(line).all() for line in lines):
            padded = np.full((len(lines), max(map(len, lines))), np.nan)
            for row, line in zip(padded, lines, strict=True):
                row[: len(line)] = line
            folds = tuple(tuple(line.tolist()) for line in lines)
            curves.append(Curve(measure, tuple(padded.mean(axis=0).tolist()), folds))
    return tuple(curves)


def _with_epochs(outcome: Outcome) -> dict[str, list[Job]]:
    """Return the jobs that recorded epochs, by candidate."""
    jobs: dict[str, list[Job]] = {}
    for job in outcome.plan.jobs:
        result = outcome.results.get(job.id)
        if result is not None and result.epochs:
            jobs.setdefault(job.candidate, []).append(job)
    return jobs


def fold_names(plan: Plan) -> tuple[str, ...]:
    """Return the name of each fold, with its repeat if there are several."""
    keys = dict.fromkeys((job.repeat, job.fold) for job in plan.jobs)
    repeated = any(repeat for repeat, _ in keys)
    return tuple(
        f"repeat {repeat} fold {fold}" if repeated else f"fold {fold}" for repeat, fold in keys
    )


def class_names(plan: Plan, confusions: Mapping[str, npt.NDArray[np.int64]]) -> tuple[str, ...]:
    """Return the names of classes, and of outputs beyond them that models predict."""
    names = tuple(clean(name) for name in plan.classes)
    size = max(map(len, confusions.values()), default=len(names))
    return names + tuple(f"output {index}" for index in range(len(names), size))


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


def timing_of(outcome: Outcome, rows: Sequence[CandidateRow]) -> TimedSpeedup | None:
    """Return serial against packed wall time; None without a baseline."""
    baseline, timing = outcome.baseline, outcome.timing
    if baseline is None:
        return None
    timing = replace(timing, kind=clean(timing.kind), why_not=clean(timing.why_not, ERROR_LIMIT))
    repeated = len({job.repeat for job in outcome.plan.jobs}) > 1
    pairs: dict[str, list[FoldPair]] = {}
    for job in outcome.plan.jobs:
        result, serial = outcome.results.get(job.id), baseline.by_job.get(job.id)
        if result is None or serial is None or result.status != DONE:
            continue
        accuracy = accuracy_of(result)
        if accuracy is not None:
            fold = f"{job.repeat}.{job.fold}" if repeated else str(job.fold)
            pair = FoldPair(fold, len(outcome.plan.group_of(job.id)), accuracy, serial)
            pairs.setdefault(shown(job).candidate, []).append(pair)
    accuracies = tuple(
        AccuracyPair(row.name, *both, tuple(pairs.get(row.name, ())))
        for row in rows
        if all(map(math.isfinite, both := (row.packed_accuracy, row.serial_accuracy)))
    )
    return TimedSpeedup(**vars(timing), accuracy=accuracies, disturbance=baseline.disturbance)


@dataclass(frozen=True)
class LossOverTime:
    """Training loss of one candidate against the seconds that its folds have cost.

    Serial: the folds one after another, until the last has finished the epoch. Packed: the
    candidate's share of the run's wall time (see `AgainstSerial`), dealt out to epochs as its jobs
    spent theirs. Evaluations included.
    """

    candidate: str
    packed: Points
    serial: Points  # empty where the serial loop was not run in full


def loss_over_time(
    outcome: Outcome, times: Mapping[str, AgainstSerial]
) -> tuple[LossOverTime, ...]:
    """Return a pair of lines for each candidate with epochs, over the jobs that both trained."""
    recorded = outcome.baseline.epochs if outcome.baseline else {}
    lines = []
    for name, jobs in _with_epochs(outcome).items():
        both = [job for job in jobs if recorded.get(job.id)] or jobs
        ours = [_line(outcome, job) for job in both]
        theirs = [recorded[job.id] for job in both if recorded.get(job.id)]
        spent = math.fsum(line[-1][0] for line in (_line(outcome, job) for job in jobs))
        scale = times[name].packed_seconds / spent if spent else math.nan
        packed = tuple((seconds * scale, loss) for seconds, loss in _together(ours))
        lines.append(LossOverTime(shown(jobs[0]).candidate, packed, _together(theirs)))
    return tuple(lines)


def _line(outcome: Outcome, job: Job) -> Points:
    epochs = outcome.results[job.id].epochs
    ends = accumulate(item.seconds for item in epochs)
    return tuple(zip(ends, (item.train_loss for item in epochs), strict=True))


def _together(lines: Sequence[Sequence[Sequence[float]]]) -> Points:
    """Return the sum of the seconds and the mean of the losses, up to the end of the shortest.

    >>> _together([[(1.0, 0.5), (2.0, 0.25)], [(3.0, 1.5)]])
    ((4.0, 1.0),)
    """
    if not lines:
        return ()
    length = min(map(len, lines))
    table = np.array([line[:length] for line in lines])
    seconds, losses = table[..., 0].sum(axis=0), table[..., 1].mean(axis=0)
    return tuple(zip(seconds.tolist(), losses.tolist(), strict=True))


def serial_class_accuracy(outcome: Outcome) -> dict[str, tuple[float, ...]]:
    """Return the recall of each class in the serial loop by candidate; NaN without samples."""
    counts = outcome.baseline.class_counts if outcome.baseline else {}
    tables: dict[str, list[Sequence[Sequence[int]]]] = {}
    for job in outcome.plan.jobs:
        if counts.get(job.id):
            tables.setdefault(job.candidate, []).append([tuple(pair) for pair in counts[job.id]])
    return {
        name: tuple(
            right / of if of else math.nan for right, of in np.array(tables).sum(axis=0).tolist()
        )
        for name, tables in tables.items()
    }
