"""From probabilities to decisions and odds: a threshold for two classes, calibration for any."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.objective import Objective
from asynckfold.results.cross_fitting import Array, Floats, HeldOutFold, Score, cross_fitted

CUTS, BINS = 200, 10
"""Thresholds that are tried at most, and bins of equal width of the calibration error."""
TINY = float(np.finfo(np.float64).eps)
"""Probabilities are at least this in a logarithm, as in scikit-learn's ``log_loss``."""

Rescale = Callable[[Floats], Floats]


def _class_problems(objective: Objective, parts: Sequence[HeldOutFold]) -> Iterator[Problem]:
    if not objective.is_classes or parts[0].values.ndim != 3:
        rule, remedy = "targets must be one class a sample", "Compute on results.oof."
        yield Problem(rule, objective.kind, remedy)


def codes_and_shares(parts: Sequence[HeldOutFold], objective: Objective) -> tuple[Array, Floats]:
    """Return classes and probabilities, (n, n_classes), of the first candidate."""
    shares = np.concatenate([part.values[0] for part in parts])
    if shares.shape[1] == 1:
        shares = np.concatenate([1 - shares, shares], axis=1)
    return objective.codes(np.concatenate([part.targets for part in parts])), shares


# Thresholds


@dataclass(frozen=True, eq=False)
class Threshold:
    """The probability from which on a sample counts as positive; see `CVResults.threshold`.

    Attributes
    ----------
    value : float
        From this probability of the `positive` class on, a sample is positive.
    positive : object
        `pos_label` of the run, or the second class.
    scores, default_scores : ndarray of shape (folds,)
        Of each fold, by the threshold that is best on the samples outside of it; and by 0.5.
    """

    value: float
    candidate: str
    metric: str
    positive: Any
    scores: Floats = field(repr=False)
    default_scores: Floats = field(repr=False)
    _labels: Array = field(repr=False)

    @property
    def score(self) -> float:
        """Mean of `scores`."""
        return float(self.scores.mean())

    def labels(self, probabilities: npt.ArrayLike) -> Array:
        """Return labels for probabilities (n, 2), such as those of ``predict_proba``."""
        place = self._labels.tolist().index(self.positive)
        is_positive = np.asarray(probabilities)[:, place] >= self.value
        return np.asarray(self._labels[np.where(is_positive, place, 1 - place)])


def _decision_score(metric: Any) -> tuple[str, Score]:
    """Return name and function of a score of decisions, 0 and 1, against the truth."""
    from sklearn.exceptions import UndefinedMetricWarning
    from sklearn.metrics import get_scorer, get_scorer_names

    known = get_scorer_names()
    if not callable(metric) and metric not in known:
        rule = "metric must name a scikit-learn scorer, or be a function (true, decided) → float"
        remedy = f"{nearest(str(metric), known)} Pass for instance 'f1'.".strip()
        raise InputError.one(rule, repr(metric), remedy)
    scorer = metric if callable(metric) else get_scorer(metric)
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "score")
    if not hasattr(scorer, "_score_func"):
        return name, scorer
    if scorer._response_method != "predict":
        rule, received = "metric must score decisions", f"{name}, of {scorer._response_method}"
        raise InputError.one(rule, received, "Pass for instance 'f1'.")
    words = {key: value for key, value in scorer._kwargs.items() if key != "pos_label"}

    def score(true: Array, decided: Array) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UndefinedMetricWarning)
            return float(scorer._sign * scorer._score_func(true, decided, **words))

    return name, score


def best_threshold(true: Array, shares: Floats, score: Score) -> float:
    """Return the best threshold midway between neighbouring probabilities, 0 and 1.

    Of several, that nearest to 0.5.

    >>> shares = np.array([0.125, 0.25, 0.5, 0.75])
    >>> best_threshold(np.array([0, 0, 1, 1]), shares, lambda a, b: (a == b).mean())
    0.375
    """
    levels = np.unique([0.0, 1.0, *shares])
    if len(levels) > CUTS + 1:
        levels = levels[np.linspace(0, len(levels) - 1, CUTS + 1).round().astype(int)]
    cuts = (levels[1:] + levels[:-1]) / 2
    each = [score(true, (shares >= cut).astype(np.int64)) for cut in cuts]
    scores = np.nan_to_num(np.array(each), nan=-np.inf)
    best = cuts[scores == scores.max()]
    return float(best[np.argmin(np.abs(best - 0.5))])


def threshold_of(
    candidate: str, metric: Any, objective: Objective, parts: Sequence[HeldOutFold]
) -> Threshold:
    """Choose a threshold on all parts, and score each by a choice on the others."""
    refuse(_class_problems(objective, parts))
    if (columns := parts[0].values.shape[2]) > 2:
        rule, remedy = "a threshold needs two classes", "Use results.calibrate."
        raise InputError.one(rule, f"{columns} classes", remedy)
    name, score = _decision_score(metric)
    labels = objective.all_labels(2)
    known = labels.tolist()
    place = known.index(objective.pos_label) if objective.pos_label in known else 1

    def pair(some: Sequence[HeldOutFold]) -> tuple[Array, Floats]:
        codes, shares = codes_and_shares(some, objective)
        return (codes == place).astype(np.int64), shares[:, place]

    def score_at(cut: float, part: HeldOutFold) -> float:
        true, shares = pair([part])
        return score(true, (shares >= cut).astype(np.int64))

    value, scores = cross_fitted(parts, lambda some: best_threshold(*pair(some), score), score_at)
    usual = np.array([score_at(0.5, part) for part in parts])
    return Threshold(value, candidate, name, known[place], np.array(scores), usual, labels)


# Calibration


@dataclass(frozen=True, eq=False)
class Calibrator:
    """Makes probabilities agree with how often they are right; see `CVResults.calibrate`.

    Call it with probabilities (n, n_classes), such as those of ``predict_proba``.

    Attributes
    ----------
    temperature : float or None
        Logits are divided by it: above 1, the candidate is too sure. None if isotonic.
    log_loss, ece : tuple of float
        Before and after, of all held-out samples; after, those of a fold are calibrated by a fit on
        the others. The expected calibration error (Naeini et al. 2015) has 10 bins of equal width.
    """

    candidate: str
    method: str
    temperature: float | None
    log_loss: tuple[float, float]
    ece: tuple[float, float]
    _rescale: Rescale = field(repr=False)

    def __call__(self, probabilities: npt.ArrayLike) -> Floats:
        """Return calibrated probabilities, of the same shape; rows sum to 1."""
        return self._rescale(np.asarray(probabilities, np.float64))


def log_loss(codes: Array, shares: Floats) -> float:
    """Return the mean negative logarithm of the probability of the true class."""
    return float(-np.log(np.maximum(shares[np.arange(len(codes)), codes], TINY)).mean())


def calibration_error(codes: Array, shares: Floats) -> float:
    """Return the mean of |accuracy - confidence| over samples, both by bins of confidence."""
    sure, right = shares.max(axis=1), shares.argmax(axis=1) == codes
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(places, right - sure, BINS)).sum() / len(codes))


def scaled(shares: Floats, temperature: float) -> Floats:
    """Return the softmax of logits divided by a temperature (Guo et al. 2017)."""
    from scipy.special import softmax

    return np.asarray(softmax(np.log(np.maximum(shares, TINY)) / temperature, axis=1))


def best_temperature(codes: Array, shares: Floats) -> float:
    """Return the temperature of the smallest log loss, from 1/50 to 50."""
    from scipy.optimize import minimize_scalar

    def loss(log: float) -> float:
        return log_loss(codes, scaled(shares, np.exp(log)))

    most, options = np.log(50), {"xatol": 1e-6}
    best = minimize_scalar(loss, bounds=(-most, most), method="bounded", options=options)
    return float(np.exp(best.x))


def isotonic(codes: Array, shares: Floats) -> Rescale:
    """Fit a rising function to each class against all others (Zadrozny and Elkan 2002).

    Rows are then divided by their sums; of two classes, the second gets a function.
    """
    from sklearn.isotonic import IsotonicRegression

    count = shares.shape[1]
    fits = {
        place: IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(
            shares[:, place], codes == place
        )
        for place in ([1] if count == 2 else range(count))
    }

    def rescale(probabilities: Floats) -> Floats:
        columns = [fit.predict(probabilities[:, place]) for place, fit in fits.items()]
        rows = np.stack([1 - columns[0], *columns] if count == 2 else columns, axis=1)
        total = rows.sum(axis=1, keepdims=True)
        uniform = np.full_like(rows, 1 / count)
        return np.asarray(np.divide(rows, total, out=uniform, where=total > 0))

    return rescale


def calibrator_of(
    candidate: str, method: str, objective: Objective, parts: Sequence[HeldOutFold]
) -> Calibrator:
    """Fit a calibration on all parts, and judge it on each by one fitted on the others."""
    refuse(_class_problems(objective, parts))
    if method not in ("temperature", "isotonic"):
        rule, remedy = "method must be 'temperature' or 'isotonic'", "Leave it out."
        raise InputError.one(rule, repr(method), remedy)

    def fit(some: Sequence[HeldOutFold]) -> tuple[float | None, Rescale]:
        codes, shares = codes_and_shares(some, objective)
        if method == "isotonic":
            return None, isotonic(codes, shares)
        chosen = best_temperature(codes, shares)
        return chosen, lambda each: scaled(each, chosen)

    (temperature, rescale), parted = cross_fitted(
        parts, fit, lambda fitted, part: fitted[1](codes_and_shares([part], objective)[1])
    )
    codes, before = codes_and_shares(parts, objective)
    after = np.concatenate(parted)
    losses = log_loss(codes, before), log_loss(codes, after)
    errors = calibration_error(codes, before), calibration_error(codes, after)
    return Calibrator(candidate, method, temperature, losses, errors, rescale)
