"""Statistics over folds: confidence intervals, and paired differences between candidates.

All candidates are scored on the same folds, so two of them are compared fold by fold. Folds share
training samples; the variance is corrected for it as in Nadeau and Bengio (2003), "Inference for
the Generalization Error", Machine Learning 52, which was derived for random divisions and is a
heuristic for the folds of one cross-validation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.folds import Fold

SIGNIFICANT = 0.05
"""Largest p of a clear difference."""

TIE = 1e-9
"""Largest difference of tied means, relative to the largest score: the order of summation alone
changes a mean by as much."""

_ROUNDING = 1e-12

_SHARES = (
    *("accuracy", "average_precision", "balanced_accuracy", "f1", "jaccard", "precision"),
    *("recall", "roc_auc", "top_k_accuracy"),
)
_BOUNDS = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    "matthews_corrcoef": (-1.0, 1.0),
    **dict.fromkeys(("explained_variance", "r2"), (-math.inf, 1.0)),
    "neg": (-math.inf, 0.0),
}
"""Bounds of scikit-learn's scores, by the beginning of their names."""

Verdict = Literal["tie", "untestable", "real", "chance"]


@dataclass(frozen=True)
class Difference:
    """Paired comparison of two candidates over the same folds; see `paired_difference`."""

    mean: float
    ci_low: float
    ci_high: float
    t: float
    p: float
    folds: int

    @property
    def verdict(self) -> Verdict:
        """What the difference means, the same in every table, page and file."""
        if self.mean == 0:
            return "tie"
        if math.isnan(self.p):
            return "untestable"
        return "real" if self.p < SIGNIFICANT else "chance"


@dataclass(frozen=True)
class Lead:
    """Lead of the best candidate over the runner-up."""

    best: str
    runner_up: str
    difference: Difference


def tied(one: float, other: float, size: float) -> bool:
    """Whether two means differ only by rounding; `size` is the largest absolute score.

    >>> tied((0.1 + 0.2 + 0.3) / 3, (0.3 + 0.2 + 0.1) / 3, 0.3), tied(0.5, 0.500001, 0.6)
    (True, False)
    """
    return one == other or abs(one - other) <= TIE * size < math.inf


def train_valid_ratio(folds: Sequence[Fold]) -> float:
    """Return the mean of ``n_valid / n_train`` over the folds."""
    return float(np.mean([len(fold.valid) / len(fold.train) for fold in folds]))


def bounds_of(name: str) -> tuple[float, float]:
    """Return the bounds of a score with one of scikit-learn's names; infinite if unknown.

    >>> bounds_of("f1_macro"), bounds_of("neg_log_loss"), bounds_of("profit")
    ((0.0, 1.0), (-inf, 0.0), (-inf, inf))
    """
    for begin, bounds in _BOUNDS.items():
        if name == begin or name.startswith(f"{begin}_"):
            return bounds
    return -math.inf, math.inf


def confidence_interval(
    scores: npt.NDArray[np.float64],
    train_valid_ratio: float,
    level: float = 0.95,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float]:
    """Return the corrected resampled t interval of a mean over folds.

    The naive interval is too narrow; the correction adds ``n_valid / n_train`` to ``1 / k``.

    The interval is clipped to `bounds`, unless a score lies outside; NaN for fewer than two folds.
    """
    from scipy.special import stdtrit

    count = len(scores)
    if count < 2 or np.isnan(scores).any():
        return math.nan, math.nan
    error = np.sqrt((1 / count + train_valid_ratio) * scores.var(ddof=1))
    half = float(stdtrit(count - 1, (1 + level) / 2) * error)
    mean, (least, most) = float(scores.mean()), bounds
    if scores.min() < least or scores.max() > most:
        return mean - half, mean + half
    return max(least, mean - half), min(most, mean + half)


def paired_difference(
    first: npt.ArrayLike, second: npt.ArrayLike, train_valid_ratio: float
) -> Difference:
    """Compare two candidates over the same folds by the corrected resampled t test.

    ``t = mean / sqrt((1 / k + n_valid / n_train) * variance)`` with ``k - 1`` degrees of freedom.

    The mean difference is 0 if the two are `tied`. `t` and `p` are NaN if there are fewer than two
    differences or all are equal.

    >>> found = paired_difference([0.9, 0.8, 0.9], [0.8, 0.75, 0.75], 0.5)
    >>> round(found.mean, 3), round(found.t, 3), round(found.p, 3)
    (0.1, 2.191, 0.16)
    """
    # Importing scipy.stats alone takes more than a second.
    from scipy.special import stdtr

    one, other = np.asarray(first, float), np.asarray(second, float)
    differences = one - other
    count, size = len(differences), float(max(np.abs(one).max(), np.abs(other).max()))
    equal = tied(float(one.mean()), float(other.mean()), size)
    mean = 0.0 if equal else float(differences.mean())
    spread = float(differences.std(ddof=1)) if count > 1 else math.nan
    if not spread > _ROUNDING * size:
        return Difference(mean, math.nan, math.nan, math.nan, math.nan, count)
    low, high = confidence_interval(differences, train_valid_ratio)
    t = mean / (math.sqrt(1 / count + train_valid_ratio) * spread)
    return Difference(mean, low, high, t, float(2 * stdtr(count - 1, -abs(t))), count)
