"""Detect columns that only number the samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

CHANCE = 1e-3
"""Probability below which values count. One column in a thousand is left out wrongly."""

_EXACT = 2**53
# Of the first values, so many at least differ where numbers count, a few rows being there twice.
_FIRST, _LEAST = 1000, 0.5
# More rows that are there twice than these are no accident, and their order is no evidence.
_FEW = 0.1
# Evenly spaced up to rounding, in steps.
_UNEVEN = 1e-3


def counts(values: npt.NDArray[Any]) -> bool:
    """Return whether numbers only count rows: nearly all different, in a narrow range or in order.

    d values drawn from s whole numbers are all different with probability p = (1 - 1/s) (1 - 2/s) …
    (1 - (d-1)/s), the birthday problem; the number of repeats is nearly Poisson with mean -log p.
    With d different values and k repeats (duplicated rows), the probability is that of at most k
    repeats, times 1/d! if the values never fall. Below `CHANCE` the column counts: a range in any
    order, offset and step, or any rising part of one. Numbers with a fraction count where they are
    evenly spaced.

    >>> rows = np.random.default_rng(0).permutation(300)
    >>> counts(rows), counts(rows[:100] + 7000), counts(np.sort(rows[:20]))
    (True, True, True)
    >>> counts(np.append(rows, rows[:9]))
    True
    >>> counts(np.array([41, 23, 35, 67, 52, 19, 28, 74, 33, 60])), counts(rows % 100)
    (False, False)
    """
    if values.dtype.kind not in "iuf" or len(values) < 2 or not np.isfinite(values).all():
        return False
    first = values[:_FIRST]
    if len(np.unique(first)) < _LEAST * len(first):
        return False
    found = np.unique(values)
    if len(found) < 2:
        return False
    offsets = _whole_steps(found)
    if offsets is None:
        return False
    from scipy.special import gammaln, pdtr

    different, repeats = len(found), len(values) - len(found)
    span = int(offsets[-1]) // int(np.gcd.reduce(np.diff(offsets))) + 1
    mean = -float(np.log1p(-np.arange(1, different) / span).sum())
    chance = float(pdtr(repeats, mean))
    if repeats <= _FEW * len(values) and (values[1:] >= values[:-1]).all():
        chance *= math.exp(-float(gammaln(different + 1)))
    return chance < CHANCE


def _whole_steps(found: npt.NDArray[Any]) -> npt.NDArray[np.uint64] | None:
    """Return sorted distinct values as whole steps from the first; None if there is no step."""
    low, high = found[0], found[-1]
    if found.dtype.kind in "iu":
        # Differences of int64 may need 64 bits without a sign; these wrap around as they should.
        offsets: npt.NDArray[np.uint64] = found.astype(np.uint64) - low.astype(np.uint64)
        return offsets
    if (found == np.rint(found)).all():
        return (found - low).astype(np.uint64) if high - low < _EXACT else None
    with np.errstate(over="ignore", invalid="ignore"):
        steps = (found - low) / ((high - low) / (len(found) - 1))
        even = bool(np.abs(steps - np.rint(steps)).max() < _UNEVEN)
    return np.arange(len(found), dtype=np.uint64) if even else None
