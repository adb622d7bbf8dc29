"""Held-out predictions: confusion matrices, hard samples, numbers, how sure candidates are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import (
    BINARY,
    MULTICLASS,
    REGRESSION,
    Objective,
    predicted,
    probabilities,
)
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import DONE
from asynckfold.results.candidates import Candidate
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.sanitize import clean

SCATTERED, HARDEST = 400, 24
"""Predicted numbers that are drawn, and hard samples that are listed."""
BINS, CURVES, CURVE_POINTS = 10, 8, 100
"""Bins of the calibration, candidates with ROC curves, and points of each curve."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Targets = npt.NDArray[Any]
Points = tuple[tuple[float, float], ...]
"""(x, y) of each point of a line."""
Guesses = tuple[Job, Counts, Targets, Targets]
"""A job, its held-out samples by index, their truth, and what the job predicts."""


def finished(outcome: Outcome) -> Iterator[tuple[Job, Targets, Counts]]:
    """Yield the jobs that kept outputs: job, outputs, and the held-out samples by index."""
    valid = {fold.key: fold.valid for fold in outcome.folds}
    for job in outcome.plan.jobs:
        result = outcome.results.get(job.id)
        if result is not None and result.status == DONE and result.outputs is not None:
            yield job, result.outputs, valid[job.repeat, job.fold]


def count_classes(outcome: Outcome, targets: Targets) -> dict[str, Counts]:
    """Return a confusion matrix for each candidate that has outputs.

    A row per true class, a column per predicted class; all of one size: the classes, or the outputs
    of models that have more. Targets are those of training; only shapes (n_samples,) and
    (n_samples, 1) are counted.
    """
    if not has_one_class(outcome, targets):
        return {}
    parts: dict[str, list[Counts]] = {}
    for job, _, true, guess in _predicted_classes(outcome, targets):
        parts.setdefault(job.candidate, []).append(np.stack([true, guess]))
    joined = {name: np.concatenate(pairs, axis=1) for name, pairs in parts.items()}
    known = [int(pairs.max()) + 1 for pairs in joined.values() if pairs.size]
    size = max(len(outcome.plan.classes), *known, 0)
    return {
        name: np.bincount(true * size + guess, minlength=size * size).reshape(size, size)
        for name, (true, guess) in joined.items()
    }


def has_one_class(outcome: Outcome, targets: Targets) -> bool:
    """Whether each sample has one class, in a shape that is counted."""
    is_column = targets.size == len(targets) and outcome.plan.objective_of("").kind == BINARY
    return bool(outcome.plan.classes) and (targets.ndim == 1 or is_column)


def guesses(objective: Objective, outputs: Targets, truth: Targets) -> Counts | None:
    """Return place in `truth`, true and predicted class of each held-out sample, shape (3, n).

    None if the outputs do not fit, and if only the user's `output_transform` could tell the class.
    """
    if objective.is_of_trees:
        return None
    columns = outputs[:1].size
    fits = outputs.ndim == 2 and columns > 1 if objective.kind == MULTICLASS else columns == 1
    if not fits or len(outputs) != len(truth):
        return None
    if objective.scale == TRANSFORMED or (objective.kind, objective.scale) == (BINARY, UNKNOWN):
        return None
    known = np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1)
    places = known.nonzero()[0]
    return np.stack([places, objective.codes(truth[known]), predicted(objective, outputs[known])])


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


# What each job predicts


def _predicted_numbers(outcome: Outcome, targets: Targets) -> Iterator[Guesses]:
    """Yield finite predictions of jobs with one number a sample, without `output_transform`."""
    for job, outputs, rows in finished(outcome):
        objective = outcome.plan.objective_of(job.model)
        is_number = objective.kind == REGRESSION and not objective.is_of_trees
        if not is_number or objective.scale in (TRANSFORMED, UNKNOWN) or outputs.size != len(rows):
            continue
        pair = np.stack([targets[rows].reshape(-1), predicted(objective, outputs).reshape(-1)])
        known = np.isfinite(pair).all(axis=0)
        true, guess = pair[:, known].astype(np.float64)
        yield job, rows[known], true, guess


def _predicted_classes(outcome: Outcome, targets: Targets) -> Iterator[Guesses]:
    for job, outputs, rows in finished(outcome):
        table = guesses(outcome.plan.objective_of(job.model), outputs, targets[rows])
        if table is not None:
            places, true, guess = table
            yield job, rows[places], true, guess


# Predicted numbers


@dataclass(frozen=True)
class Predictions:
    """True and predicted numbers of at most `SCATTERED` held-out samples, evenly chosen."""

    candidate: str
    true: tuple[float, ...]
    predicted: tuple[float, ...]
    total: int  # predictions of finite numbers


def predictions(outcome: Outcome, targets: Targets) -> Predictions | None:
    """Return the predictions of the best candidate; None unless it predicts one number a sample."""
    if not outcome.has_best or targets.size != len(targets):
        return None
    best = outcome.candidates[outcome.best_index_].name
    parts = [part for part in _predicted_numbers(outcome, targets) if part[0].candidate == best]
    true, guess = (np.concatenate([[], *(part[place] for part in parts)]) for place in (2, 3))
    count = len(true)
    places = np.unique(np.linspace(0, count - 1, min(count, SCATTERED)).round().astype(int))
    pair = tuple(true[places].tolist()), tuple(guess[places].tolist())
    return Predictions(clean(best), *pair, count) if count else None


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


def hard_samples(outcome: Outcome, targets: Targets) -> HardSamples | None:
    """Return the hardest samples; None without predictions of one class or number a sample."""
    if has_one_class(outcome, targets):
        return _hard_classes(list(_predicted_classes(outcome, targets)), outcome.n_samples)
    if targets.size != len(targets):
        return None
    return _hard_numbers(list(_predicted_numbers(outcome, targets)), outcome.n_samples)


def _hard_classes(parts: list[Guesses], count: int) -> HardSamples | None:
    seen, wrong = np.zeros((2, count), np.int64)
    for _, rows, true, guess in parts:
        np.add.at(seen, rows, 1)
        np.add.at(wrong, rows, true != guess)
    if not seen.any():
        return None
    by_most = np.flatnonzero(2 * wrong > seen)
    hardest = by_most[np.lexsort((by_most, seen[by_most], -wrong[by_most]))][:HARDEST]
    mistakes: dict[int, Counter[int]] = {index: Counter() for index in hardest.tolist()}
    truth: dict[int, int] = {}
    for _, rows, true, guess in parts:
        for place in np.flatnonzero(np.isin(rows, hardest) & (guess != true)):
            truth[int(rows[place])] = int(true[place])
            mistakes[int(rows[place])][int(guess[place])] += 1
    samples = tuple(
        HardSample(
            index,
            truth[index],
            taken_for.most_common(1)[0][0],
            int(wrong[index]),
            int(seen[index]),
            math.nan,
        )
        for index, taken_for in mistakes.items()
    )
    return HardSamples(True, samples, len(by_most), int((seen > 0).sum()))


def _hard_numbers(parts: list[Guesses], count: int) -> HardSamples | None:
    seen, truth, total, missed = np.zeros((4, count))
    for _, rows, true, guess in parts:
        np.add.at(seen, rows, 1)
        truth[rows] = true
        np.add.at(total, rows, guess)
        np.add.at(missed, rows, np.abs(true - guess))
    known = np.flatnonzero(seen)
    if not len(known):
        return None
    error, mean = missed[known] / seen[known], total[known] / seen[known]
    samples = tuple(
        HardSample(index, float(truth[index]), mean, 0, int(seen[index]), error)
        for index, mean, error in (
            (int(known[place]), float(mean[place]), float(error[place]))
            for place in np.argsort(-error, kind="stable")[:HARDEST]
        )
    )
    return HardSamples(False, samples, 0, len(known))


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
    outcome: Outcome, targets: Targets, rows: Iterable[Candidate]
) -> Calibration | None:
    """Return the calibration of the first candidate that predicts probabilities."""

    def confidence(objective: Objective, outputs: Floats, table: Counts) -> Floats:
        sure = probabilities(objective, outputs).max(axis=1)
        return np.stack([sure, table[1] == table[2]], axis=1)

    for row in rows if has_one_class(outcome, targets) else ():
        pairs = _measured(outcome, targets, row.name, confidence)
        if pairs is not None and len(pairs):
            return _binned(_shown(row), *pairs.T)
    return None


def _binned(candidate: str, sure: Floats, right: Floats) -> Calibration:
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    counts = np.bincount(places, minlength=BINS)
    used = counts > 0
    confidence = np.bincount(places, sure, BINS)[used] / counts[used]
    accuracy = np.bincount(places, right, BINS)[used] / counts[used]
    return Calibration(
        candidate,
        tuple(confidence.tolist()),
        tuple(accuracy.tolist()),
        tuple(counts[used].tolist()),
        float(sure.mean()),
        float(right.mean()),
        float(np.abs(accuracy - confidence) @ counts[used] / counts.sum()),
    )


def two_classes(outcome: Outcome, targets: Targets, rows: Iterable[Candidate]) -> TwoClasses | None:
    """Return the curves of the first candidates; None unless there are two classes."""
    classes, objective = outcome.plan.classes, outcome.plan.objective_of("")
    if len(classes) != 2 or not has_one_class(outcome, targets):
        return None

    def odds(objective: Objective, outputs: Floats, table: Counts) -> Floats:
        columns = outputs.reshape(len(outputs), -1)
        of_last = columns[:, -1] - (columns[:, 0] if columns.shape[1] == 2 else 0)
        return np.stack([of_last, table[1]], axis=1)

    labels = objective.all_labels(2).tolist()
    positive = labels.index(objective.pos_label) if objective.pos_label in labels else 1
    curves: list[BinaryCurves] = []
    share = math.nan
    for row in rows:
        pairs = _measured(outcome, targets, row.name, odds)
        if pairs is None or len(curves) == CURVES:
            continue
        score, true = pairs[:, 0] * (1 if positive else -1), pairs[:, 1] == positive
        if true.any() and not true.all():
            curves.append(_curves(_shown(row), score, true))
            share = float(true.mean())
    return TwoClasses(clean(classes[positive]), share, tuple(curves)) if curves else None


def _shown(row: Candidate) -> str:
    return candidate_name(clean(row.model), clean(row.lr_schedule))


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
    places = np.unique(np.linspace(0, len(across) - 1, CURVE_POINTS).round().astype(int))
    return tuple(zip(across[places].round(4).tolist(), up[places].round(4).tolist(), strict=True))


def _measured(
    outcome: Outcome,
    targets: Targets,
    name: str,
    measure: Callable[[Objective, Floats, Counts], Floats],
) -> Floats | None:
    """Join what `measure` returns for each finished fold of a candidate; None if it cannot."""
    parts = []
    for job, outputs, rows in finished(outcome):
        if job.candidate != name:
            continue
        objective = outcome.plan.objective_of(job.model)
        table = guesses(objective, outputs, targets[rows])
        if table is None:
            return None
        try:
            parts.append(measure(objective, outputs[table[0]].astype(np.float64), table))
        except ValueError:
            # Margins are no probabilities.
            return None
    return np.concatenate(parts) if parts else None
