"""Held-out predictions of the best candidate against the true numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import REGRESSION, Objective, predicted, probabilities
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE, Result
from asynckfold.results.candidates import Candidate
from asynckfold.results.confusion import guesses, has_one_class
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.candidate_rows import Points
from asynckfold.results.report.sanitize import clean

POINTS = 400

Targets = npt.NDArray[Any]


@dataclass(frozen=True)
class Predictions:
    """True and predicted numbers of at most `POINTS` held-out samples, evenly chosen."""

    candidate: str
    true: tuple[float, ...]
    predicted: tuple[float, ...]
    total: int  # predictions of finite numbers


def predictions(found: Outcome, targets: Targets) -> Predictions | None:
    """Return the predictions of the best candidate; None unless it predicts one number a sample."""
    if not found.has_best or targets.size != len(targets):
        return None
    best = found.candidates[found.best_index_]
    valid = {fold.key: fold.valid for fold in found.folds}
    pairs = []
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if job.candidate != best.name or result is None or result.status != DONE:
            continue
        truth = targets[valid[job.repeat, job.fold]]
        pair = predicted_numbers(found.plan.objective_of(best.model), result, truth)
        if pair is None:
            return None
        pairs.append(pair)
    table = np.concatenate(pairs, axis=1)
    table = table[:, np.isfinite(table).all(axis=0)]
    count = table.shape[1]
    places = np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))
    true, guess = table[:, places].tolist()
    return Predictions(clean(best.name), tuple(true), tuple(guess), count) if count else None


def predicted_numbers(
    objective: Objective, result: Result, truth: Targets
) -> npt.NDArray[np.float64] | None:
    """Return true and predicted numbers of a job, shape (2, n).

    None unless it predicts one number a sample, and without the user's `output_transform`.
    """
    if objective.kind != REGRESSION or objective.scale in (TRANSFORMED, UNKNOWN):
        return None
    if objective.is_of_trees:
        return None
    if result.outputs is None or result.outputs.size != truth.size:
        return None
    guess = predicted(objective, result.outputs)
    return np.stack([truth.reshape(-1), guess.reshape(-1)]).astype(np.float64)


SHOWN = 24


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
    """At most `SHOWN` samples: those wrong in most predictions, or with the largest mean error."""

    of_classes: bool
    samples: tuple[HardSample, ...]
    wrong_by_most: int  # samples that more than half of their predictions got wrong
    total: int  # samples with predictions


Guesses = tuple[npt.NDArray[np.int64], Targets, Targets]
"""Samples by index, their truth, and what one job predicts."""


def hard_samples(found: Outcome, targets: Targets) -> HardSamples | None:
    """Return the hardest samples; None without predictions of one class or number a sample."""
    if has_one_class(found, targets):
        return _of_classes(list(_classes(found, targets)), found.n_samples)
    if targets.size != len(targets):
        return None
    return _of_numbers(list(_numbers(found, targets)), found.n_samples)


def _classes(found: Outcome, targets: Targets) -> Iterator[Guesses]:
    valid = {fold.key: fold.valid for fold in found.folds}
    for job in found.plan.jobs:
        rows = valid[job.repeat, job.fold]
        table = guesses(
            found.results.get(job.id), targets[rows], found.plan.objective_of(job.model)
        )
        if table is not None:
            places, true, guess = table
            yield rows[places], true, guess


def _of_classes(parts: Sequence[Guesses], count: int) -> HardSamples | None:
    seen, wrong = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for rows, true, guess in parts:
        np.add.at(seen, rows, 1)
        np.add.at(wrong, rows, true != guess)
    if not seen.any():
        return None
    by_most = np.flatnonzero(2 * wrong > seen)
    hardest = by_most[np.lexsort((by_most, seen[by_most], -wrong[by_most]))][:SHOWN]
    said: dict[int, Counter[int]] = {int(index): Counter() for index in hardest}
    truth: dict[int, int] = {}
    for rows, true, guess in parts:
        for place in np.flatnonzero(np.isin(rows, hardest)):
            index, truth[int(rows[place])] = int(rows[place]), int(true[place])
            if guess[place] != true[place]:
                said[index][int(guess[place])] += 1
    samples = tuple(
        HardSample(
            index,
            truth[index],
            guessed.most_common(1)[0][0],
            int(wrong[index]),
            int(seen[index]),
            float("nan"),
        )
        for index, guessed in said.items()
    )
    return HardSamples(True, samples, len(by_most), int((seen > 0).sum()))


def _numbers(found: Outcome, targets: Targets) -> Iterator[Guesses]:
    valid = {fold.key: fold.valid for fold in found.folds}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        rows = valid[job.repeat, job.fold]
        if result is None or result.status != DONE:
            continue
        table = predicted_numbers(found.plan.objective_of(job.model), result, targets[rows])
        if table is not None:
            known = np.isfinite(table).all(axis=0)
            yield rows[known], table[0, known], table[1, known]


def _of_numbers(parts: Sequence[Guesses], count: int) -> HardSamples | None:
    seen = np.zeros(count, np.int64)
    truth, guessed, missed = np.zeros((3, count))
    for rows, true, guess in parts:
        np.add.at(seen, rows, 1)
        truth[rows] = true
        np.add.at(guessed, rows, guess)
        np.add.at(missed, rows, np.abs(true - guess))
    known = np.flatnonzero(seen)
    if not len(known):
        return None
    error, mean = missed[known] / seen[known], guessed[known] / seen[known]
    samples = tuple(
        HardSample(
            int(known[place]),
            float(truth[known[place]]),
            float(mean[place]),
            0,
            int(seen[known[place]]),
            float(error[place]),
        )
        for place in np.argsort(-error, kind="stable")[:SHOWN]
    )
    return HardSamples(False, samples, 0, len(known))


BINS, CURVES, CURVE_POINTS = 10, 8, 100

Floats = npt.NDArray[np.float64]

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
    roc: Points  # (false, true positive rate)
    roc_area: float
    precision_recall: Points  # (recall, precision)
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
        if pairs is None or len(curves) == CURVES:
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


def _thinned(across: Floats, up: Floats) -> Points:
    places = np.unique(np.linspace(0, len(across) - 1, CURVE_POINTS).round().astype(int))
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
