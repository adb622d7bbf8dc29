"""Prediction intervals and prediction sets from the models of the folds.

::

    residuals on held-out samples, by fold ─┐
    what the fold's model says of a sample ─┴─► ranks ─► lower and upper, or a set of classes

Numbers by CV+ (Barber, Candès, Ramdas and Tibshirani 2021, section 3), classes by cross-conformal
prediction (Vovk 2015) with the score 1 - probability. Both compare a new sample with each held-out
sample by the model that saw neither. Folds of one partition only: the proof needs each sample once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.objective import REGRESSION, Objective
from asynckfold.results.cross_fitting import Floats, HeldOutFold
from asynckfold.results.decisions import codes_and_shares

ROOM = 2**22
"""Numbers that are ranked at once: 32 MiB."""


def alpha_problems(alpha: Any) -> Iterator[Problem]:
    """Yield that `alpha` is no share."""
    if not isinstance(alpha, float | np.floating) or not 0 < alpha < 1:
        rule, remedy = "alpha must be a number above 0 and below 1", "Leave it out for 0.1."
        yield Problem(rule, repr(alpha), remedy)


def rank_of(alpha: float, count: int) -> int:
    """Return ⌊alpha (count + 1)⌋, in which decimal places of `alpha` are exact.

    >>> [rank_of(0.29, 99), rank_of(0.1, 8)]
    [29, 0]
    """
    return min(count, math.floor(round(alpha * (count + 1), 9)))


def bounds(residuals: Sequence[Floats], predictions: Floats, alpha: float) -> tuple[Floats, Floats]:
    """Return lower and upper bounds, (n,), by CV+.

    Parameters
    ----------
    residuals : sequence of ndarray
        |target - prediction| of the samples that each fold holds out.
    predictions : ndarray of shape (folds, n)
        By the models of these folds.

    Examples
    --------
    >>> bounds([np.array([1.0, 3.0]), np.array([2.0])], np.array([[10.0], [20.0]]), 0.25)
    (array([7.]), array([22.]))
    """
    every = np.concatenate(residuals)[:, None]
    owner = np.repeat(np.arange(len(residuals)), [len(each) for each in residuals])
    rank, columns = rank_of(alpha, len(every)), predictions.shape[1]
    low, high = np.full(columns, -np.inf), np.full(columns, np.inf)
    if not rank:
        return low, high
    for first in range(0, columns, step := max(1, ROOM // len(every))):
        some = slice(first, first + step)
        centers = predictions[owner, some]
        low[some] = np.partition(centers - every, rank - 1, axis=0)[rank - 1]
        high[some] = np.partition(centers + every, -rank, axis=0)[-rank]
    return low, high


def sets(scores: Sequence[Floats], shares: Floats, alpha: float) -> npt.NDArray[np.bool_]:
    """Return which classes are in the prediction sets, (n, n_classes).

    Parameters
    ----------
    scores : sequence of ndarray
        1 - probability of the true class, of the samples that each fold holds out.
    shares : ndarray of shape (folds, n, n_classes)
        Probabilities by the models of these folds.
    """
    counts = np.zeros(shares.shape[1:], np.int64)
    for each, share in zip(scores, shares, strict=True):
        counts += len(each) - np.searchsorted(np.sort(each), 1 - share)
    return counts >= rank_of(alpha, sum(map(len, scores)))


def intervals_of(
    objective: Objective, parts: Sequence[HeldOutFold], values: Iterable[Any], alpha: float
) -> Any:
    """Return bounds or sets for batches of what the models of the parts say, (folds, n, ...)."""
    if objective.kind == REGRESSION and parts[0].values[0][:1].size == 1:
        residuals = [np.abs(part.targets.reshape(-1) - part.values.reshape(-1)) for part in parts]
        rows = (np.asarray(each, np.float64).reshape(len(parts), -1) for each in values)
        pairs = [bounds(residuals, each, alpha) for each in rows]
        return tuple(np.concatenate(column) for column in zip(*pairs, strict=True))
    if not objective.is_classes:
        rule, remedy = "targets must be one number or class a sample", "Compute on results.oof."
        refuse([Problem(rule, f"{objective.kind}, shape {parts[0].targets.shape}", remedy)])
    scores = []
    for part in parts:
        codes, shares = codes_and_shares([part], objective)
        scores.append(1 - shares[np.arange(len(codes)), codes])
    return np.concatenate([sets(scores, each, alpha) for each in values])
