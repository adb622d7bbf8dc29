"""Candidates: the ranking, their scores fold by fold, learning curves and classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import Epoch, Result
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.confusion import class_accuracy
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sanitize import clean
from asynckfold.results.statistics import Lead, train_valid_ratio


@dataclass(frozen=True)
class Curve:
    """One measure over the epochs of a candidate.

    Parameters
    ----------
    measure : {"train_loss", "valid_loss", "accuracy"}
        What is measured.
    mean : tuple of float, length n_epochs
        Mean over `folds`; NaN from the epoch on that one of them does not have.
    folds : tuple of tuple of float
        One line per job that got that far, in the plan's order; epoch 1 first.
    """

    measure: str
    mean: tuple[float, ...]
    folds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CandidateRow:
    """One model × LR schedule in the ranking.

    Parameters
    ----------
    rank : int or None
        1 is best; None where a fold is missing or the mean is not a number.
    scores : Mapping of str to tuple of float
        By metric, one score per fold.
    mean, std : Mapping of str to float
        Over the folds that have a score; `std` divides by their number, as scikit-learn does.
    ci_low, ci_high : float
        Corrected 95 % interval of the first metric's mean; NaN for incomplete candidates.
    fit_seconds : float
        Seconds of training all folds; for an incomplete candidate the mean fold times the folds.
    confusion : tuple of tuple of int, or None
        Out-of-fold counts, a row per true class, a column per class that the model says.
    class_accuracy : tuple of float, or None
        Share of each class that is recognised; NaN for a class without held-out samples.
    """

    name: str
    model: str
    lr_schedule: str
    rank: int | None
    status: str
    folds_done: int
    folds: int
    scores: Mapping[str, tuple[float, ...]]
    mean: Mapping[str, float]
    std: Mapping[str, float]
    ci_low: float
    ci_high: float
    fit_seconds: float
    curves: tuple[Curve, ...]
    confusion: tuple[tuple[int, ...], ...] | None
    class_accuracy: tuple[float, ...] | None

    @property
    def complete(self) -> bool:
        """Whether every fold has a score."""
        return self.folds_done == self.folds


def candidate_rows(
    found: CVResults, confusions: Mapping[str, npt.NDArray[np.int64]], n_classes: int
) -> tuple[CandidateRow, ...]:
    """Return a row for each candidate, best first, unranked ones last."""
    metric = found.plan.scoring[0]
    listed = found.candidates
    ratio = train_valid_ratio(found.folds)
    jobs = _jobs_by_candidate(found.plan)
    rows = [
        _row(
            candidate,
            position,
            metric,
            ratio,
            [found.results[job.id] for job in jobs[candidate.name] if job.id in found.results],
            confusions.get(candidate.name),
            n_classes,
        )
        for candidate, position in zip(listed, rank(listed, metric), strict=True)
    ]
    worst = len(rows) + 1
    return tuple(sorted(rows, key=lambda row: (row.rank or worst, -row.folds_done)))


def _jobs_by_candidate(plan: Plan) -> dict[str, list[Job]]:
    jobs: dict[str, list[Job]] = {}
    for job in plan.jobs:
        jobs.setdefault(job.candidate, []).append(job)
    return jobs


def _row(
    candidate: Candidate,
    position: int,
    metric: str,
    ratio: float,
    results: Sequence[Result],
    confusion: npt.NDArray[np.int64] | None,
    n_classes: int,
) -> CandidateRow:
    scores = candidate.scores
    low, high = candidate.interval(metric, ratio)
    return CandidateRow(
        name=f"{clean(candidate.model)}/{clean(candidate.lr_schedule)}",
        model=clean(candidate.model),
        lr_schedule=clean(candidate.lr_schedule),
        rank=position if candidate.ranks_by(metric) else None,
        status=candidate.status,
        folds_done=candidate.done,
        folds=candidate.planned,
        scores={clean(name): tuple(values.tolist()) for name, values in scores.items()},
        mean={clean(name): candidate.mean(name) for name in scores},
        std={clean(name): candidate.std(name) for name in scores},
        ci_low=low,
        ci_high=high,
        fit_seconds=candidate.total_fit_seconds,
        curves=_curves(results),
        confusion=None if confusion is None else tuple(map(tuple, confusion.tolist())),
        class_accuracy=None if confusion is None else class_accuracy(confusion, n_classes),
    )


def _curves(results: Sequence[Result]) -> tuple[Curve, ...]:
    histories = [result.epochs for result in results if result.epochs]
    measures = ("train_loss", "valid_loss", "accuracy")
    curves = (_curve(measure, histories) for measure in measures)
    return tuple(curve for curve in curves if curve is not None)


def _curve(measure: str, histories: Sequence[Sequence[Epoch]]) -> Curve | None:
    lines = [[getattr(item, measure) for item in history] for history in histories]
    known = [[math.nan if value is None else float(value) for value in line] for line in lines]
    if not any(value is not None for line in lines for value in line):
        return None
    length = max(map(len, known))
    padded = np.array([line + [math.nan] * (length - len(line)) for line in known])
    return Curve(measure, tuple(padded.mean(axis=0).tolist()), tuple(map(tuple, known)))


def fold_names(plan: Plan) -> tuple[str, ...]:
    """Return what each fold is called; its repeat is named where there are several."""
    keys = dict.fromkeys((job.repeat, job.fold) for job in plan.jobs)
    repeated = any(repeat for repeat, _ in keys)
    return tuple(
        f"repeat {repeat} fold {fold}" if repeated else f"fold {fold}" for repeat, fold in keys
    )


def shown_lead(found: CVResults) -> Lead | None:
    """Return the lead under names that are safe to show."""
    lead = found.lead
    names = {row.name: f"{clean(row.model)}/{clean(row.lr_schedule)}" for row in found.candidates}
    return lead and replace(lead, best=names[lead.best], runner_up=names[lead.runner_up])


def class_names(plan: Plan, confusions: Mapping[str, npt.NDArray[np.int64]]) -> tuple[str, ...]:
    """The classes, and the outputs beyond them that models say."""
    names = tuple(clean(name) for name in plan.classes)
    size = max(map(len, confusions.values()), default=len(names))
    return names + tuple(f"output {index}" for index in range(len(names), size))
