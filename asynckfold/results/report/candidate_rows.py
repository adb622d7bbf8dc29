"""The ranking: scores fold by fold, learning curves and classes of each candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import Epoch
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.predictions import Points, class_accuracy
from asynckfold.results.run_scores import pairs_of, times_of
from asynckfold.results.speedup import AgainstSerial
from asynckfold.results.statistics import Difference, train_valid_ratio

MEASURES = ("train_loss", "valid_loss", "accuracy", "lr")
_measured = attrgetter(*MEASURES)


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
    outcome: CVResults,
    confusions: Mapping[str, npt.NDArray[np.int64]],
    running: Mapping[str, Sequence[Epoch]],
) -> tuple[CandidateRow, ...]:
    """Return a row for each candidate, best first, unranked ones last.

    `running` are the epochs so far of jobs that run, by job id.
    """
    metric, ratio = outcome.plan.scoring[0], train_valid_ratio(outcome.folds)
    times, serial, pairs = times_of(outcome), serial_class_accuracy(outcome), _to_first(outcome)
    histories = _histories(outcome, running)
    rows = []
    for candidate, position in by_rank(outcome):
        name, scores, confusion = candidate.name, candidate.scores, confusions.get(candidate.name)
        low, high = candidate.interval(metric, ratio)
        by_class = confusion is not None and class_accuracy(confusion, len(outcome.plan.classes))
        rows.append(
            CandidateRow(
                name=name,
                model=candidate.model,
                lr_schedule=candidate.lr_schedule,
                rank=position,
                status=candidate.status,
                folds_done=candidate.done,
                folds=candidate.planned,
                scores={each: tuple(values.tolist()) for each, values in scores.items()},
                mean={each: candidate.mean(each) for each in scores},
                std={each: candidate.std(each) for each in scores},
                ci_low=low,
                ci_high=high,
                fit_seconds=candidate.total_fit_seconds,
                curves=_curves(histories.get(name, ())),
                confusion=None if confusion is None else tuple(map(tuple, confusion.tolist())),
                class_accuracy=by_class or None,
                serial_class_accuracy=serial.get(name),
                **vars(times[name]),
                device=candidate.device,
                to_first=pairs.get(name),
            )
        )
    return tuple(rows)


def by_rank(outcome: CVResults) -> list[tuple[Candidate, int | None]]:
    """Return the candidates with their rank, best first; unranked ones last, with None."""
    metric, listed = outcome.plan.scoring[0], outcome.candidates
    worst = len(listed) + 1
    ranked = [
        (candidate, position if candidate.ranks_by(metric) else None)
        for candidate, position in zip(listed, rank(listed, metric), strict=True)
    ]
    return sorted(ranked, key=lambda item: (item[1] or worst, -item[0].done))


def _to_first(outcome: CVResults) -> dict[str, Difference]:
    """Return how the first candidate compares with each of the others, by their name."""
    if not outcome.has_best:
        return {}
    first = outcome.candidates[outcome.best_index_].name
    pairs = pairs_of(outcome).of(first)
    return {pair.first if pair.second == first else pair.second: pair for pair in pairs}


def _curves(histories: Sequence[Sequence[Epoch]]) -> tuple[Curve, ...]:
    lengths = [len(history) for history in histories]
    padded = np.full((len(MEASURES), len(histories), max(lengths, default=0)), np.nan)
    for place, history in enumerate(histories):
        padded[:, place, : len(history)] = np.array([*map(_measured, history)], float).T
    curves = []
    for measure, lines in zip(MEASURES, padded, strict=True):
        if not np.isnan(lines).all():
            rows = zip(lines.tolist(), lengths, strict=True)
            folds = tuple(tuple(line[:length]) for line, length in rows)
            curves.append(Curve(measure, tuple(lines.mean(axis=0).tolist()), folds))
    return tuple(curves)


def _histories(
    outcome: CVResults, running: Mapping[str, Sequence[Epoch]]
) -> dict[str, list[Sequence[Epoch]]]:
    """Return the epochs of each job that has some, by candidate."""
    histories: dict[str, list[Sequence[Epoch]]] = {}
    for job in outcome.plan.jobs:
        result = outcome.results.get(job.id)
        epochs = running.get(job.id, ()) if result is None else result.epochs
        # A job that was continued from a checkpoint has reported its later epochs only.
        if epochs and (result is not None or epochs[0].number == 1):
            histories.setdefault(job.candidate, []).append(epochs)
    return histories


def _with_epochs(outcome: CVResults) -> dict[str, list[Job]]:
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
    names = plan.classes
    size = max(map(len, confusions.values()), default=len(names))
    return names + tuple(f"output {index}" for index in range(len(names), size))


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
    outcome: CVResults, times: Mapping[str, AgainstSerial]
) -> tuple[LossOverTime, ...]:
    """Return a pair of lines for each candidate with epochs, over the jobs that both trained."""
    recorded = outcome.baseline.epochs if outcome.baseline else {}
    lines, (plan, results) = [], outcome.whole
    inner: dict[str, list[float]] = {}
    for job in plan.jobs:
        if job.inner is not None and (result := results.get(job.id)) is not None:
            inner.setdefault(job.candidate, []).extend(item.seconds for item in result.epochs)
    for name, jobs in _with_epochs(outcome).items():
        packed = [_line(outcome, job) for job in jobs]
        serial = [recorded.get(job.id, ()) for job in jobs]
        spent = math.fsum([*(line[-1][0] for line in packed), *inner.get(name, ())])
        theirs = list(filter(None, serial))
        ours = [line for line, other in zip(packed, serial, strict=True) if other] or packed
        scale = times[name].packed_seconds / spent if spent else math.nan
        points = tuple((seconds * scale, loss) for seconds, loss in _together(ours))
        lines.append(LossOverTime(name, points, _together(theirs)))
    return tuple(lines)


def _line(outcome: CVResults, job: Job) -> Points:
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


def serial_class_accuracy(outcome: CVResults) -> dict[str, tuple[float, ...]]:
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
