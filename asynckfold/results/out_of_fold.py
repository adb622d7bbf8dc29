"""Out-of-fold outputs: what was said of each sample by models that had not seen it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE, Result

Outputs = npt.NDArray[np.float32]


def layers_of(folds: Sequence[Fold]) -> tuple[int, ...]:
    """Number folds such that each sample is held out once a layer at most, from 0.

    For repeated folds this is their repeat, also where a scikit-learn splitter repeats them.

    Examples
    --------
    >>> halves = np.array([0, 1]), np.array([2, 3])
    >>> folds = [Fold(0, number, halves[1 - number % 2], halves[number % 2]) for number in range(4)]
    >>> layers_of(folds)
    (0, 0, 1, 1)
    """
    held: list[set[int]] = []
    found = []
    for fold in folds:
        samples = set(fold.valid.tolist())
        layer = next((place for place, seen in enumerate(held) if not seen & samples), len(held))
        if layer == len(held):
            held.append(set())
        held[layer] |= samples
        found.append(layer)
    return tuple(found)


def out_of_fold(
    plan: Plan, folds: Sequence[Fold], results: Mapping[str, Result], n_samples: int
) -> dict[str, Outputs]:
    """Gather the outputs of finished jobs by candidate.

    Parameters
    ----------
    plan : Plan
        All jobs.
    folds : sequence of Fold
        Who was held out when.
    results : Mapping of str to Result
        By job id.
    n_samples : int
        Samples of the dataset.

    Returns
    -------
    dict of str to ndarray of float32, shape (n_samples, ...) or (n_layers, n_samples, ...)
        Candidates without a finished fold are left out. Samples that no finished fold held out are
        NaN. The layers are those of `layers_of`, where there are several: no two models are mixed.
    """
    layers = dict(zip((fold.key for fold in folds), layers_of(folds), strict=True))
    rows = {fold.key: fold.valid for fold in folds}
    count = 1 + max(layers.values(), default=0)
    found: dict[str, Outputs] = {}
    for job in plan.jobs:
        result = results.get(job.id)
        if result is None or result.outputs is None or result.status != DONE:
            continue
        if job.candidate not in found:
            shape = (count, n_samples, *result.outputs.shape[1:])
            found[job.candidate] = np.full(shape, np.nan, np.float32)
        key = (job.repeat, job.fold)
        found[job.candidate][layers[key], rows[key]] = result.outputs
    in_order = (f"{model}/{lr_schedule}" for model, lr_schedule in plan.candidates)
    return {
        name: found[name] if count > 1 else found[name][0] for name in in_order if name in found
    }


def mean_of_layers(outputs: Outputs) -> Outputs:
    """Return the mean over the first axis, of what is known; NaN where nothing is."""
    known = ~np.isnan(outputs)
    total = np.where(known, outputs, 0).sum(axis=0, dtype=np.float64)
    count = known.sum(axis=0)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    narrow: Outputs = mean.astype(np.float32)
    return narrow
