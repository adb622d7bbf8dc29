"""How sure the candidates are: calibration, and the curves of two classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.objective import Objective, probabilities
from asynckfold.jobs.plan import Plan
from asynckfold.results.candidates import Candidate
from asynckfold.results.confusion import guesses, has_one_class
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.summary.predictions import Targets

BINS, DRAWN, POINTS = 10, 8, 100

Floats = npt.NDArray[np.float64]
Line = tuple[tuple[float, float], ...]

_Measure = Callable[[Objective, Floats, npt.NDArray[np.int64]], Floats]


@dataclass(frozen=True)
class Calibration:
    """How often a candidate is right, by the probability that it gives the class it predicts.

    By `BINS` of equal width, those without samples left out.
    """

    candidate: str
    confidence: tuple[float, ...]  # mean probability of the predicted class
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]  # predictions
    sure: float  # mean of all predictions
    right: float
    error: float  # expected calibration error: mean of |accuracy - confidence| over predictions


@dataclass(frozen=True)
class BinaryCurves:
    """ROC and precision-recall curve of a candidate, over the held-out samples of all folds."""

    candidate: str
    roc: Line  # (false, true positive rate)
    roc_area: float
    precision_recall: Line  # (recall, precision)
    average_precision: float


@dataclass(frozen=True)
class TwoClasses:
    """The curves of the first candidates; only for two classes."""

    positive: str  # name of the class that is found or missed
    share: float  # of it among the samples
    curves: tuple[BinaryCurves, ...]


def calibration(found: Outcome, targets: Targets, rows: Iterable[Candidate]) -> Calibration | None:
    """Return the calibration of the first candidate that predicts probabilities."""
    for row in rows if has_one_class(found, targets) else ():
        pairs = _gathered(found, targets, row.name, _confidence)
        if pairs is not None and len(pairs):
            return _binned(_shown(row), *pairs.T)
    return None


def _binned(candidate: str, sure: Floats, right: Floats) -> Calibration:
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    counts = np.bincount(places, minlength=BINS)
    used = counts > 0
    confidence = np.bincount(places, sure, BINS)[used] / counts[used]
    accuracy = np.bincount(places, right, BINS)[used] / counts[used]
    error = float(np.abs(accuracy - confidence) @ counts[used] / counts.sum())
    return Calibration(
        candidate,
        tuple(confidence.tolist()),
        tuple(accuracy.tolist()),
        tuple(counts[used].tolist()),
        float(sure.mean()),
        float(right.mean()),
        error,
    )


def _confidence(objective: Objective, outputs: Floats, table: npt.NDArray[np.int64]) -> Floats:
    sure = probabilities(objective, outputs).max(axis=1)
    return np.stack([sure, table[1] == table[2]], axis=1)


def two_classes(found: Outcome, targets: Targets, rows: Iterable[Candidate]) -> TwoClasses | None:
    """Return the curves of the first candidates; None unless there are two classes."""
    classes = found.plan.classes
    if len(classes) != 2 or not has_one_class(found, targets):
        return None
    positive = _positive(found.plan)
    curves: list[BinaryCurves] = []
    share = float("nan")
    for row in rows:
        pairs = _gathered(found, targets, row.name, _odds)
        if pairs is None or len(curves) == DRAWN:
            continue
        odds, true = pairs[:, 0] * (1 if positive else -1), pairs[:, 1] == positive
        if true.any() and not true.all():
            curves.append(_curves(_shown(row), odds, true))
            share = float(true.mean())
    return TwoClasses(clean(classes[positive]), share, tuple(curves)) if curves else None


def _shown(row: Candidate) -> str:
    return candidate_name(clean(row.model), clean(row.lr_schedule))


def _positive(plan: Plan) -> int:
    objective = plan.objective_of("")
    labels = objective.all_labels(2).tolist()
    return labels.index(objective.pos_label) if objective.pos_label in labels else 1


def _odds(objective: Objective, outputs: Floats, table: npt.NDArray[np.int64]) -> Floats:
    columns = outputs.reshape(len(outputs), -1)
    odds = columns[:, -1] - (columns[:, 0] if columns.shape[1] == 2 else 0)
    return np.stack([odds, table[1]], axis=1)


def _curves(candidate: str, odds: Floats, true: npt.NDArray[np.bool_]) -> BinaryCurves:
    from sklearn.metrics import (
        average_precision_score,
        precision_recall_curve,
        roc_auc_score,
        roc_curve,
    )

    false_rate, true_rate, _ = roc_curve(true, odds)
    precision, recall, _ = precision_recall_curve(true, odds, drop_intermediate=True)
    return BinaryCurves(
        candidate,
        _thinned(false_rate, true_rate),
        float(roc_auc_score(true, odds)),
        _thinned(recall[::-1], precision[::-1]),
        float(average_precision_score(true, odds)),
    )


def _thinned(across: Floats, up: Floats) -> Line:
    places = np.unique(np.linspace(0, len(across) - 1, POINTS).round().astype(int))
    return tuple(zip(across[places].round(4).tolist(), up[places].round(4).tolist(), strict=True))


def _gathered(found: Outcome, targets: Targets, name: str, measure: _Measure) -> Floats | None:
    """Join what `measure` says of each finished fold of a candidate; None if it cannot tell."""
    valid = {fold.key: fold.valid for fold in found.folds}
    parts = []
    for job in found.plan.jobs:
        result = found.results.get(job.id) if job.candidate == name else None
        if result is None or result.outputs is None:
            continue
        objective = found.plan.objective_of(job.model)
        table = guesses(result, targets[valid[job.repeat, job.fold]], objective)
        if table is None:
            return None
        try:
            parts.append(measure(objective, result.outputs[table[0]].astype(np.float64), table))
        except ValueError:
            # Margins are no probabilities.
            return None
    return np.concatenate(parts) if parts else None
