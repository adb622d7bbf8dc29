"""The ranking: scores fold by fold, learning curves and classes of each candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import Epoch
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.confusion import class_accuracy
from asynckfold.results.outcome import Outcome, pairs_of, times_of
from asynckfold.results.report.baseline_curves import serial_class_accuracy
from asynckfold.results.report.sanitize import clean
from asynckfold.results.speedup import AgainstSerial
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
    found: Outcome, confusions: Mapping[str, npt.NDArray[np.int64]], n_classes: int
) -> tuple[CandidateRow, ...]:
    """Return a row for each candidate, best first, unranked ones last."""
    metric = found.plan.scoring[0]
    ratio = train_valid_ratio(found.folds)
    times, serial = times_of(found), serial_class_accuracy(found)
    histories: dict[str, list[Sequence[Epoch]]] = {}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if result is not None and result.epochs:
            histories.setdefault(job.candidate, []).append(result.epochs)
    differences = _to_first(found)
    return tuple(
        _row(
            candidate,
            position,
            candidate.interval(metric, ratio),
            _curves(histories.get(candidate.name, [])),
            confusions.get(candidate.name),
            n_classes,
            serial.get(candidate.name),
            times[candidate.name],
            differences.get(candidate.name),
        )
        for candidate, position in by_rank(found)
    )


def by_rank(found: Outcome) -> list[tuple[Candidate, int | None]]:
    """Return the candidates with their rank, best first; unranked ones last, with None."""
    metric, listed = found.plan.scoring[0], found.candidates
    worst = len(listed) + 1
    ranked = [
        (candidate, position if candidate.ranks_by(metric) else None)
        for candidate, position in zip(listed, rank(listed, metric), strict=True)
    ]
    return sorted(ranked, key=lambda item: (item[1] or worst, -item[0].done))


def _row(
    candidate: Candidate,
    position: int | None,
    interval: tuple[float, float],
    curves: tuple[Curve, ...],
    confusion: npt.NDArray[np.int64] | None,
    n_classes: int,
    serial: tuple[float, ...] | None,
    times: AgainstSerial,
    to_first: Difference | None,
) -> CandidateRow:
    scores = candidate.scores
    model, lr_schedule = clean(candidate.model), clean(candidate.lr_schedule)
    return CandidateRow(
        name=candidate_name(model, lr_schedule),
        model=model,
        lr_schedule=lr_schedule,
        rank=position,
        status=candidate.status,
        folds_done=candidate.done,
        folds=candidate.planned,
        scores={clean(name): tuple(values.tolist()) for name, values in scores.items()},
        mean={clean(name): candidate.mean(name) for name in scores},
        std={clean(name): candidate.std(name) for name in scores},
        ci_low=interval[0],
        ci_high=interval[1],
        fit_seconds=candidate.total_fit_seconds,
        curves=curves,
        confusion=None if confusion is None else tuple(map(tuple, confusion.tolist())),
        class_accuracy=None if confusion is None else class_accuracy(confusion, n_classes),
        serial_class_accuracy=serial,
        **{**vars(times), "baseline": clean(times.baseline)},
        device=clean(candidate.device),
        to_first=to_first
        and replace(to_first, first=clean(to_first.first), second=clean(to_first.second)),
    )


def _to_first(found: Outcome) -> dict[str, Difference]:
    """Return how the first candidate compares with each of the others, by their name."""
    if not found.has_best:
        return {}
    first = found.candidates[found.best_index_].name
    pairs = [pair for pair in pairs_of(found) if first in (pair.first, pair.second)]
    return {pair.first if pair.second == first else pair.second: pair for pair in pairs}


def _curves(histories: Sequence[Sequence[Epoch]]) -> tuple[Curve, ...]:
    measures = ("train_loss", "valid_loss", "accuracy", "lr")
    curves = (_curve(measure, histories) for measure in measures)
    return tuple(curve for curve in curves if curve is not None)


def _curve(measure: str, histories: Sequence[Sequence[Epoch]]) -> Curve | None:
    lines = [[getattr(item, measure) for item in history] for history in histories]
    if all(value is None or math.isnan(value) for line in lines for value in line):
        return None
    known = [np.array(line, float).tolist() for line in lines]
    length = max(map(len, known))
    padded = np.array([line + [math.nan] * (length - len(line)) for line in known])
    return Curve(measure, tuple(padded.mean(axis=0).tolist()), tuple(map(tuple, known)))


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
