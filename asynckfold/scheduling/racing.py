"""Which candidates can no longer win: a pure function of the scores so far.

After each complete fold, the leader is tested against each of the others that are left, by the
corrected resampled t test (Nadeau and Bengio 2003), one-sided. Its level is ``alpha / (looks ×
(candidates - 1))``: by Bonferroni, the best candidate is left out with a probability of at most
`alpha`, over all looks and whichever candidate leads. That the test keeps its level is, for the
folds of one cross-validation, a heuristic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_FOLDS = 3
"""A test needs two folds, and only a fold after it can be saved."""

ALPHA = 0.05
"""Bound on the chance that the best candidate is left out, by default."""

_ROUNDING = 1e-12


def left_out(
    scores: npt.NDArray[np.float64], sizes: Sequence[tuple[int, int]], alpha: float
) -> dict[int, int]:
    """Return the candidates that are left out, each with the number of folds that decided it.

    Only complete folds count, in their order: a score of a later fold changes nothing.

    Parameters
    ----------
    scores : ndarray of shape (n_candidates, n_folds)
        Greater is better. NaN where a job has no result, -infinity where it has no score: such a
        candidate is left out, since it will not be ranked.
    sizes : sequence of (int, int)
        Training and held-out samples of each fold.
    alpha : float
        Bound on the chance that the best candidate is left out.

    Examples
    --------
    >>> scores = np.array([[0.95, 0.94, 0.96], [0.12, 0.1, np.nan], [0.93, 0.95, np.nan]])
    >>> left_out(scores, [(200, 100)] * 3, alpha=0.05)
    {1: 2}
    """
    from scipy.special import stdtr

    count, folds = scores.shape
    level = alpha / (max(1, folds - 2) * max(1, count - 1))
    train, valid = np.array(sizes, float).T
    ratio = float(np.mean(valid / train))
    alive, out = np.arange(count), dict[int, int]()
    for look in range(1, folds):
        seen = scores[alive, :look]
        if np.isnan(seen).any():
            break
        lost = np.isneginf(seen).any(axis=1)
        if look > 1 and not lost.all():
            # The first of equal ones leads.
            means = np.where(lost, -np.inf, seen.mean(axis=1))
            leader = seen[means.argmax()]
            with np.errstate(invalid="ignore", divide="ignore"):
                ahead = leader - seen
                spread = ahead.std(axis=1, ddof=1)
                t = ahead.mean(axis=1) / (np.sqrt(1 / look + ratio) * spread)
                # One sample more in every fold has no spread, though a fold may be larger.
                samples = (ahead * valid[:look]).std(axis=1, ddof=1)
            size = np.maximum(np.abs(leader), np.abs(seen)).max(axis=1)
            most = valid[:look].max()
            varies = (spread > _ROUNDING * size) & (samples > _ROUNDING * size * most)
            lost |= varies & (stdtr(look - 1.0, -t) <= level)
        out |= dict.fromkeys(alive[lost].tolist(), look)
        alive = alive[~lost]
        if len(alive) < 2:
            break
    return out
