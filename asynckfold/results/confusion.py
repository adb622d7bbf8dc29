"""Which class was taken for which: counts over the held-out samples of all finished folds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import BINARY, MULTICLASS, Objective, predicted
from asynckfold.jobs.result import DONE, Result
from asynckfold.results.cv_results import CVResults

Counts = npt.NDArray[np.int64]


def count_classes(found: CVResults, targets: npt.NDArray[Any]) -> dict[str, Counts]:
    """Count true against said classes over all held-out samples, candidate by candidate.

    Parameters
    ----------
    found : CVResults
        Complete or not; candidates without outputs are left out.
    targets : ndarray of shape (n_samples,) or (n_samples, 1)
        The true classes, as jobs trained with them; any other shape is not counted.

    Returns
    -------
    dict of str to ndarray of shape (n, n)
        By candidate: a row per true class, a column per class that the model says. All have the
        same size: that of the classes, or of the outputs where models have more of them.
    """
    classes = len(found.plan.classes)
    is_column = targets.size == len(targets) and found.plan.objective_of("").kind == BINARY
    if not classes or not (targets.ndim == 1 or is_column):
        return {}
    valid = {fold.key: fold.valid for fold in found.folds}
    said: dict[str, list[Counts]] = {}
    for job in found.plan.jobs:
        asked = found.plan.objective_of(job.model)
        pairs = _said(found.results.get(job.id), targets[valid[(job.repeat, job.fold)]], asked)
        if pairs is not None:
            said.setdefault(job.candidate, []).append(pairs)
    joined = {name: np.concatenate(parts, axis=1) for name, parts in said.items()}
    size = max([classes, *(int(pairs.max()) + 1 for pairs in joined.values() if pairs.size)])
    return {name: _count_pairs(pairs, size) for name, pairs in joined.items()}


def _said(result: Result | None, targets: npt.NDArray[Any], asked: Objective) -> Counts | None:
    """Return (true, said) class of each held-out sample, shape (2, n).

    None without outputs, and where only the user's `output_transform` tells what they say.
    """
    if result is None or result.status != DONE or result.outputs is None:
        return None
    outputs = result.outputs
    columns = outputs[:1].size
    fits = outputs.ndim == 2 and columns > 1 if asked.kind == MULTICLASS else columns == 1
    if not fits or len(outputs) != len(targets):
        return None
    if asked.scale == TRANSFORMED or (asked.kind == BINARY and asked.scale == UNKNOWN):
        return None
    known = np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1)
    return np.stack([asked.codes(targets[known]), predicted(asked, outputs[known])])


def _count_pairs(pairs: Counts, size: int) -> Counts:
    flat = np.bincount(pairs[0] * size + pairs[1], minlength=size * size)
    return flat.reshape(size, size)


def class_accuracy(confusion: Counts, n_classes: int) -> tuple[float, ...]:
    """Return the share of each class that is recognised; NaN for a class without samples.

    Examples
    --------
    >>> class_accuracy(np.array([[3, 1], [0, 2]]), 2)
    (0.75, 1.0)
    """
    totals = confusion.sum(axis=1)[:n_classes]
    right = confusion.diagonal()[:n_classes]
    return tuple(
        float(hit / total) if total else math.nan
        for hit, total in zip(right.tolist(), totals.tolist(), strict=True)
    )
