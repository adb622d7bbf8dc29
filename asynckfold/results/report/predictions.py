"""Held-out predictions: confusion matrices, hard samples, numbers, how sure candidates are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import (
    BINARY,
    MULTICLASS,
    REGRESSION,
    Objective,
    predicted,
    probabilities,
)
from asynckfold.jobs.result import DONE
from asynckfold.results.candidates import Candidate
from asynckfold.results.cv_results import CVResults

SCATTERED, HARDEST = 400, 24
"""Predicted numbers that are drawn, and hard samples that are listed."""
BINS, CURVES, CURVE_POINTS = 10, 8, 100
"""Bins of the calibration, candidates with ROC curves, and points of each curve."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Targets = npt.NDArray[Any]
Points = tuple[tuple[float, float], ...]
"""(x, y) of each point of a line."""


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced places of a list, its ends included.

    >>> spread(3, 5), spread(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    places: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return places


@dataclass(frozen=True)
class HeldOut:
    """Predictions of a candidate for its held-out samples, where outputs are finite."""

    objective: Objective
    rows: Counts  # samples by index
    outputs: Targets
    true: Targets  # classes by index, or numbers
    guess: Targets


Held = Mapping[str, HeldOut]
"""By candidate."""


def held_out(outcome: CVResults, targets: Targets) -> Held:
    """Return the predictions of one class or number a sample; `targets` are those of training.

    Jobs without outputs are left out, and those of which only the user's `output_transform` could
    tell what they predict.
    """
    valid = {fold.key: fold.valid for fold in outcome.folds}
    of_classes = has_one_class(outcome, targets)
    kept: dict[str, list[tuple[Targets, Counts]]] = {}
    objectives, held = {}, {}
    for job in outcome.plan.jobs:
        result, objective = outcome.results.get(job.id), outcome.plan.objective_of(job.model)
        if result is None or result.status != DONE or result.outputs is None:
            continue
        outputs, rows, kind = result.outputs, valid[job.key], objective.kind
        many = outputs.ndim == 2 and outputs.shape[1] > 1
        fits = many if kind == MULTICLASS else outputs.size == len(rows)
        opaque = (TRANSFORMED,) if kind == MULTICLASS else (TRANSFORMED, UNKNOWN)
        is_one = of_classes or (kind == REGRESSION and targets.size == len(targets))
        if objective.is_of_trees or not is_one or not fits or objective.scale in opaque:
            continue
        kept.setdefault(job.candidate, []).append((outputs, rows))
        objectives[job.candidate] = objective
    for name, objective in objectives.items():
        outputs, rows = map(np.concatenate, zip(*kept[name], strict=True))
        outputs = outputs.reshape(len(rows), -1) if of_classes else outputs
        finite = np.isfinite(outputs.reshape(len(rows), -1)).all(axis=1)
        guess = predicted(objective, outputs[finite]).reshape(-1)
        true = objective.codes(targets[rows[finite]]) if of_classes else targets[rows[finite]]
        pair = np.stack([true.reshape(-1), guess])
        known = np.isfinite(pair).all(axis=0)
        true, guess = pair[:, known] if of_classes else pair[:, known].astype(np.float64)
        places = finite.nonzero()[0][known]
        held[name] = HeldOut(objective, rows[places], outputs[places], true, guess)
    return held


def has_one_class(outcome: CVResults, targets: Targets) -> bool:
    """Whether each sample has one class, in a shape that is counted."""
    is_column = targets.size == len(targets) and outcome.plan.objective_of("").kind == BINARY
    return bool(outcome.plan.classes) and (targets.ndim == 1 or is_column)


def count_classes(outcome: CVResults, targets: Targets, held: Held) -> dict[str, Counts]:
    """Return a confusion matrix for each candidate that has outputs.

    A row per true class, a column per predicted class; all of one size: the classes, or the outputs
    of models that have more. Targets are those of training; only shapes (n_samples,) and
    (n_samples, 1) are counted.
    """
    if not has_one_class(outcome, targets):
        return {}
    known = [int(max(it.true.max(), it.guess.max())) + 1 for it in held.values() if it.true.size]
    size = max(len(outcome.plan.classes), *known, 0)
    return {
        name: np.bincount(it.true * size + it.guess, minlength=size * size).reshape(size, size)
        for name, it in held.items()
    }


def class_accuracy(confusion: Counts, n_classes: int) -> tuple[float, ...]:
    """Return the recall of each class; NaN for a class without samples.

    Examples
    --------
    >>> class_accuracy(np.array([[3, 1], [0, 2]]), 2)
    (0.75, 1.0)
    """
    with np.errstate(invalid="ignore"):
        shares = confusion.diagonal() / confusion.sum(axis=1)
    return tuple(shares[:n_classes].tolist())


# Predicted numbers


@dataclass(frozen=True)
class Predictions:
    """True and predicted numbers of at most `SCATTERED` held-out samples, evenly chosen."""

    candidate: str
    true: tuple[float, ...]
    predicted: tuple[float, ...]
    total: int  # predictions of finite numbers


def predictions(outcome: CVResults, targets: Targets, held: Held) -> Predictions | None:
    """Return the predictions of the best candidate; None unless it predicts one number a sample."""
    if not outcome.has_best or has_one_class(outcome, targets):
        return None
    best = outcome.candidates[outcome.best_index_].name
    if best not in held or not (total := len(held[best].true)):
        return None
    places = spread(total, SCATTERED)
    true, guess = (tuple(each[places].tolist()) for each in (held[best].true, held[best].guess))
    return Predictions(best, true, guess, total)


# Hard samples


@dataclass(frozen=True)
class HardSample:
    """A sample, and what the candidates say of it; with repeats, each says it several times."""

    index: int  # in the dataset
    true: int | float  # class by its place, or number
    predicted: int | float  # most frequent wrong class, or the mean prediction
    wrong: int  # predictions of another class; 0 for numbers
    predictions: int
    error: float  # mean absolute error; NaN for classes


@dataclass(frozen=True)
class HardSamples:
    """At most `HARDEST` samples: wrong in most predictions, or with the largest mean error."""

    of_classes: bool
    samples: tuple[HardSample, ...]
    wrong_by_most: int  # samples that more than half of their predictions got wrong
    total: int  # samples with predictions


def hard_samples(outcome: CVResults, targets: Targets, held: Held) -> HardSamples | None:
    """Return the hardest samples; None without predictions of one class or number a sample."""
    count = outcome.n_samples
    if not held:
        return None
    rows, true, guess = (
        np.concatenate([vars(part)[name] for part in held.values()])
        for name in ("rows", "true", "guess")
    )
    seen = np.bincount(rows, minlength=count)
    total = int((seen > 0).sum())
    if not has_one_class(outcome, targets):
        with np.errstate(invalid="ignore"):
            columns = (true, guess, np.abs(true - guess))
            truth, mean, error = (np.bincount(rows, each, count) / seen for each in columns)
        hardest = np.argsort(-error, kind="stable")[:HARDEST].tolist()
        samples = [
            HardSample(at, float(truth[at]), float(mean[at]), 0, int(seen[at]), float(error[at]))
            for at in hardest
            if seen[at]
        ]
        return HardSamples(False, tuple(samples), 0, total)
    missed = true != guess
    wrong = np.bincount(rows[missed], minlength=count)
    by_most = np.flatnonzero(2 * wrong > seen)
    samples = []
    for at in by_most[np.lexsort((by_most, seen[by_most], -wrong[by_most]))][:HARDEST].tolist():
        of_sample = missed & (rows == at)
        taken_for, _ = Counter(guess[of_sample].tolist()).most_common(1)[0]
        numbers = int(wrong[at]), int(seen[at]), math.nan
        samples.append(HardSample(at, int(true[of_sample][0]), taken_for, *numbers))
    return HardSamples(True, tuple(samples), len(by_most), total)


# How sure the candidates are


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
    roc: Points  # (false, true positive rate)
    roc_area: float
    precision_recall: Points  # (recall, precision)
    average_precision: float


@dataclass(frozen=True)
class TwoClasses:
    """The curves of the first candidates; only for two classes."""

    positive: str  # name of the positive class
    share: float  # of it among the samples
    curves: tuple[BinaryCurves, ...]


def calibration(
    outcome: CVResults, targets: Targets, rows: Sequence[Candidate], held: Held
) -> Calibration | None:
    """Return the calibration of the first candidate that predicts probabilities."""
    if not has_one_class(outcome, targets):
        return None
    for name, part in ((row.name, held[row.name]) for row in rows if row.name in held):
        try:
            sure = probabilities(part.objective, part.outputs.astype(np.float64)).max(axis=1)
        except ValueError:
            # Margins are no probabilities.
            continue
        right = (part.true == part.guess).astype(float)
        if not len(sure):
            continue
        places = np.minimum((sure * BINS).astype(int), BINS - 1)
        counts = np.bincount(places, minlength=BINS)
        used = counts > 0
        confidence = np.bincount(places, sure, BINS)[used] / counts[used]
        accuracy = np.bincount(places, right, BINS)[used] / counts[used]
        return Calibration(
            name,
            tuple(confidence.tolist()),
            tuple(accuracy.tolist()),
            tuple(counts[used].tolist()),
            float(sure.mean()),
            float(right.mean()),
            float(np.abs(accuracy - confidence) @ counts[used] / counts.sum()),
        )
    return None


def two_classes(
    outcome: CVResults, targets: Targets, rows: Sequence[Candidate], held: Held
) -> TwoClasses | None:
    """Return the curves of the first candidates; None unless there are two classes."""
    classes, objective = outcome.plan.classes, outcome.plan.objective_of("")
    if len(classes) != 2 or not has_one_class(outcome, targets):
        return None
    labels = objective.all_labels(2).tolist()
    positive = labels.index(objective.pos_label) if objective.pos_label in labels else 1
    curves: list[BinaryCurves] = []
    share = math.nan
    for name in (row.name for row in rows if row.name in held):
        outputs = held[name].outputs.astype(np.float64)
        odds = outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] == 2 else 0)
        true = held[name].true == positive
        if true.any() and not true.all() and len(curves) < CURVES:
            curves.append(_curves(name, odds if positive else -odds, true))
            share = float(true.mean())
    return TwoClasses(classes[positive], share, tuple(curves)) if curves else None


def _curves(candidate: str, score: Floats, true: npt.NDArray[np.bool_]) -> BinaryCurves:
    from sklearn import metrics

    false_rate, true_rate, _ = metrics.roc_curve(true, score)
    precision, recall, _ = metrics.precision_recall_curve(true, score, drop_intermediate=True)
    return BinaryCurves(
        candidate,
        _thinned(false_rate, true_rate),
        float(metrics.roc_auc_score(true, score)),
        _thinned(recall[::-1], precision[::-1]),
        float(metrics.average_precision_score(true, score)),
    )


def _thinned(across: Floats, up: Floats) -> Points:
    places = spread(len(across), CURVE_POINTS)
    return tuple(zip(across[places].round(4).tolist(), up[places].round(4).tolist(), strict=True))
