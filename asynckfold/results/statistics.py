"""Statistics over folds: confidence intervals, and paired differences between candidates.

All candidates are scored on the same folds, so two of them are compared fold by fold. Folds share
training samples; the variance is corrected for it as in Nadeau and Bengio (2003), "Inference for
the Generalization Error", Machine Learning 52, which was derived for random divisions and is a
heuristic for the folds of one cross-validation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.folds import Fold

Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]
"""Many differences, by the fields of `Difference`."""

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

Conclusion = Literal["beats", "undecided", "equal", "untestable"]


@dataclass(frozen=True)
class Difference:
    """Two models, LR schedules or candidates, compared over the folds that both have.

    See `paired_differences`.
    """

    first: str  # has the higher mean
    second: str
    mean: float  # of first - second; 0 if they are tied, NaN without a common fold
    ci_low: float  # 95 %, of this difference alone; NaN without a test
    ci_high: float
    p: float  # over all pairs, see `holm`; NaN without a test
    won: int  # folds in which the first has the higher score
    folds: int  # that both have

    @property
    def conclusion(self) -> Conclusion:
        """What the difference means, the same in every sentence, table and file."""
        if self.folds and self.mean == 0 and math.isnan(self.ci_low):
            return "equal"
        if math.isnan(self.p):
            return "untestable"
        return "beats" if self.p < SIGNIFICANT else "undecided"


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


def largest_difference(name: str, scores: Floats) -> float:
    """Return the largest possible difference of two scores: 1 of shares, infinity if unknown.

    A score out of its bounds is not what its name says.

    >>> largest_difference("accuracy", np.array([0.9, np.nan, 0.5]))
    1.0
    >>> largest_difference("accuracy", np.array([90.0])), largest_difference("r2", np.array([0.5]))
    (inf, inf)
    """
    low, high = bounds_of(name)
    return high - low if not ((scores < low) | (scores > high)).any() else math.inf


def confidence_interval(
    scores: npt.NDArray[np.float64],
    train_valid_ratio: float,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float]:
    """Return the corrected resampled t interval, of 95 %, of a mean over folds.

    The naive interval is too narrow; the correction adds ``n_valid / n_train`` to ``1 / k``.

    The interval is clipped to `bounds`, unless a score lies outside; NaN for fewer than two folds.
    """
    from scipy.special import stdtrit

    count = len(scores)
    if count < 2 or np.isnan(scores).any():
        return math.nan, math.nan
    error = np.sqrt((1 / count + train_valid_ratio) * scores.var(ddof=1))
    half = float(stdtrit(count - 1, 0.975) * error)
    mean, (least, most) = float(scores.mean()), bounds
    if scores.min() < least or scores.max() > most:
        return mean - half, mean + half
    return max(least, mean - half), min(most, mean + half)


def paired_differences(
    names: Sequence[str], scores: Floats, folds: Sequence[Fold], largest: float = math.inf
) -> Columns:
    """Compare all pairs over the folds that both have, by the corrected resampled t test.

    ``t = mean / sqrt((1 / n + n_valid / n_train) * variance)`` with ``n - 1`` degrees of freedom,
    where n counts folds × repeats. The test was derived for random divisions (Nadeau and Bengio
    2003); for k-fold it is a heuristic.

    Differences that are the same on every fold have no variance to test with: p is 1 if they are 0,
    else NaN, as with fewer than two folds. The p values are not corrected, see `Pairs`.

    Parameters
    ----------
    names : sequence of str
        What is compared.
    scores : ndarray of shape (n_names, n_folds)
        NaN without a score.
    folds : sequence of Fold
        As the columns of `scores`.
    largest : float
        Largest possible difference, which limits the intervals.

    Examples
    --------
    >>> fold = Fold(0, 0, np.arange(8), np.arange(8, 12))
    >>> scores = np.array([[0.8, 0.75, 0.75], [0.9, 0.8, 0.9]])
    >>> (pair,) = Pairs(paired_differences(["A", "B"], scores, [fold] * 3))
    >>> pair.first, round(pair.mean, 3), pair.won, round(pair.p, 3)
    ('B', 0.1, 3, 0.16)
    """
    # Importing scipy.stats alone takes more than a second.
    from scipy.special import stdtr, stdtrit

    one, other = np.triu_indices(len(names), 1)
    ours, theirs = scores[one], scores[other]
    shared = ~np.isnan(ours) & ~np.isnan(theirs)
    count = shared.sum(axis=1)
    sizes = np.where(shared, np.maximum(np.abs(ours), np.abs(theirs)), 0)
    # Column by column: NumPy takes ten times as long along short rows.
    size = functools.reduce(np.maximum, sizes.T)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_fold = np.where(shared, ours - theirs, 0.0)
        mean = by_fold.sum(axis=1) / count
        mean[np.abs(mean) <= np.where(np.isinf(size), 0, TIE * size)] = 0
        # Of infinite scores NaN; so are the spread, t and p then.
        spread = _spread(by_fold, mean, shared)
        error = np.sqrt(1 / count + train_valid_ratio(folds)) * spread
        # One sample more in every fold has no spread either, though a fold may be a sample larger.
        valid = np.array([len(fold.valid) for fold in folds])
        in_samples = by_fold * valid
        samples = _spread(in_samples, in_samples.sum(axis=1) / count, shared)
        tested = (spread > _ROUNDING * size) & (samples > _ROUNDING * size * valid.max())
        p = np.where(tested, 2 * stdtr(count - 1.0, -np.abs(mean / error)), np.nan)
        p[~tested & (mean == 0) & (count > 1)] = 1
        half = np.where(tested, stdtrit(count - 1.0, 0.975) * error, np.nan)
    sign = np.where(mean < 0, -1, 1)
    low, high = (np.clip(sign * mean + side * half, -largest, largest) for side in (-1, 1))
    won = (sign[:, None] * by_fold > 0).sum(axis=1)
    named = np.array(names, dtype=object)
    return {
        "first": named[np.where(sign > 0, one, other)],
        "second": named[np.where(sign > 0, other, one)],
        "mean": np.abs(mean),
        "ci_low": low,
        "ci_high": high,
        "p": p,
        "won": won,
        "folds": count,
    }


def _spread(by_fold: Floats, mean: Floats, shared: npt.NDArray[np.bool_]) -> Floats:
    """Return the standard deviation of each row over its shared folds, with divisor n - 1."""
    squares = np.where(shared, (by_fold - mean[:, None]) ** 2, 0.0)
    return np.asarray(np.sqrt(squares.sum(axis=1) / (shared.sum(axis=1) - 1)))


MOST_REPEATS = 100
"""The most that anybody is advised to train."""


def repeats_to_decide(pair: Difference, folds: Sequence[Fold]) -> int | None:
    """Return how many repeats would decide an undecided difference if it stays as it is.

    By the corrected test of `paired_differences`, whose error does not fall below
    ``sqrt(n_valid / n_train)`` standard deviations, however many folds there are. None if no number
    decides it up to `MOST_REPEATS`, and without a test.
    """
    from scipy.special import stdtr, stdtrit

    ratio, planned = train_valid_ratio(folds), len({fold.index for fold in folds})
    error = (pair.mean - pair.ci_low) / stdtrit(pair.folds - 1.0, 0.975)
    p = 2 * stdtr(pair.folds - 1.0, -pair.mean / error)
    if not (math.isfinite(error) and error > 0 and pair.p < 1 and p > 0):
        return None
    spread = error / math.sqrt(1 / pair.folds + ratio)
    repeats = np.arange(len(folds) // planned + 1, MOST_REPEATS + 1)
    count = repeats * float(planned)
    expected = 2 * stdtr(count - 1, -pair.mean / (spread * np.sqrt(1 / count + ratio)))
    enough = repeats[expected * (pair.p / p) < SIGNIFICANT]
    return int(enough[0]) if enough.size else None


def holm(p_values: Floats, others: int = 0) -> Floats:
    """Correct p values for the number of comparisons (Holm 1979); NaN stays and does not count.

    The probability that any of them wrongly falls below `SIGNIFICANT` is at most that. `others` are
    further comparisons of the same kind that are not yet decided.

    >>> holm(np.array([0.03, 0.01])).tolist(), holm(np.array([0.03, 0.01]), others=1).tolist()
    ([0.03, 0.02], [0.06, 0.03])
    """
    order = np.argsort(p_values)[: int((~np.isnan(p_values)).sum())]  # NaN comes last
    left = np.arange(len(order), 0, -1) + others
    corrected: Floats = p_values.copy()
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, left * p_values[order]))
    return corrected


class Pairs(Sequence[Difference]):
    """Differences with p values corrected by `holm`; each is made when it is read.

    A thousand models have half a million pairs, of which few are read.
    """

    def __init__(self, columns: Columns, others: int = 0) -> None:
        self.columns = {**columns, "p": holm(columns["p"], others)}

    def __len__(self) -> int:
        return len(self.columns["p"])

    @overload
    def __getitem__(self, place: int) -> Difference: ...
    @overload
    def __getitem__(self, place: slice | npt.NDArray[np.bool_]) -> tuple[Difference, ...]: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            return self[place : place + 1 or None][0]
        return tuple(map(Difference, *(column[place].tolist() for column in self.columns.values())))

    def __iter__(self) -> Iterator[Difference]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])

    def of(self, name: str) -> tuple[Difference, ...]:
        """Return those with one side of this name."""
        first, second = self.columns["first"], self.columns["second"]
        pairs: tuple[Difference, ...] = self[np.logical_or(first == name, second == name)]
        return pairs

    @property
    def conclusions(self) -> npt.NDArray[np.str_]:
        """The `Difference.conclusion` of each."""
        mean, low, p, folds = (self.columns[name] for name in ("mean", "ci_low", "p", "folds"))
        is_equal = (folds > 0) & (mean == 0) & np.isnan(low)
        rules = [is_equal, np.isnan(p), p < SIGNIFICANT]
        return np.select(rules, ["equal", "untestable", "beats"], "undecided")


@dataclass(frozen=True)
class Factor:
    """The models that have a score, or the LR schedules; see `compare_levels`."""

    names: tuple[str, ...]
    over: tuple[str, ...]  # levels of the other factor, over which each has its mean
    leader: str  # highest mean, if any is complete of the complete ones; "" if none has a score
    pairs: Pairs
    unbeaten: tuple[str, ...]

    @property
    def beaten(self) -> tuple[str, ...]:
        """Those that another beats."""
        return tuple(name for name in self.names if name not in self.unbeaten)

    @property
    def duels(self) -> list[Difference]:
        """The leader's comparisons, the closest first."""
        pairs = self.pairs.of(self.leader)
        return sorted(pairs, key=lambda pair: math.inf if math.isnan(pair.mean) else pair.mean)


def compare_levels(
    names: Sequence[str],
    others: Sequence[str],
    scores: Floats,
    folds: Sequence[Fold],
    largest: float,
    undecided: int,
) -> Factor:
    """Compare models by their mean over LR schedules, or the other way round.

    Parameters
    ----------
    names, others : sequence of str
        Of the levels, and of those of the other factor.
    scores : ndarray of shape (n_names, n_others, n_folds)
        NaN without a score.
    folds : sequence of Fold
        The last axis of `scores`.
    largest : float
        Largest possible difference.
    undecided : int
        Comparisons of the other factor that `holm` has to count.
    """
    scored = np.asarray((~np.isnan(scores)).any(axis=2))
    known = np.asarray(scored.any(axis=1))
    # Only what all have is averaged: a mean over other levels would compare these as well.
    common = np.asarray(scored[known].all(axis=0))
    if not common.any():
        common = np.asarray(scored.any(axis=0))
    with np.errstate(invalid="ignore"):
        means = scores[known][:, common].mean(axis=1) if known.any() else np.empty((0, len(folds)))
    present = [name for name, is_known in zip(names, known.tolist(), strict=True) if is_known]
    pairs = Pairs(paired_differences(present, means, folds, largest), undecided)
    beaten = set(pairs.columns["second"][pairs.conclusions == "beats"])
    return Factor(
        tuple(present),
        tuple(name for name, is_common in zip(others, common.tolist(), strict=True) if is_common),
        _leader(present, means),
        pairs,
        tuple(name for name in present if name not in beaten),
    )


def _leader(names: Sequence[str], means: Floats) -> str:
    def order(place: int) -> tuple[bool, float]:
        known = means[place][~np.isnan(means[place])]
        mean = float(known.mean()) if known.size else -math.inf
        return known.size == means.shape[1], mean

    return names[max(range(len(names)), key=order)] if names else ""
