"""Out-of-fold outputs: each sample's output by models that were not trained on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE, Result

Outputs = npt.NDArray[np.float32]


def layers_of(folds: Sequence[Fold]) -> tuple[int, ...]:
    """Number folds from 0 such that each layer holds out a sample at most once.

    For repeated folds the layer is the repeat, also if a scikit-learn splitter repeats them.

    Examples
    --------
    >>> halves = np.array([0, 1]), np.array([2, 3])
    >>> folds = [Fold(0, number, halves[1 - number % 2], halves[number % 2]) for number in range(4)]
    >>> layers_of(folds)
    (0, 0, 1, 1)
    """
    held: list[set[int]] = []
    layers = []
    for fold in folds:
        samples = set(fold.valid.tolist())
        layer = next((place for place, seen in enumerate(held) if not seen & samples), len(held))
        if layer == len(held):
            held.append(set())
        held[layer] |= samples
        layers.append(layer)
    return tuple(layers)


def without_outputs(results: Mapping[str, Result]) -> list[str]:
    """Return the finished jobs of which no outputs were kept."""
    return [name for name, item in results.items() if item.status == DONE and item.outputs is None]


def kept_problems(results: Mapping[str, Result]) -> Iterator[Problem]:
    """Yield that outputs of held-out samples are needed, and were not kept."""
    if dropped := without_outputs(results):
        yield Problem(
            "out-of-fold outputs must have been kept by the run",
            f"those of {len(dropped)} finished jobs were not, such as {dropped[0]}",
            "Make the run in another folder with a larger keep_outputs_gib.",
        )


def out_of_fold(
    plan: Plan, folds: Sequence[Fold], results: Mapping[str, Result], n_samples: int
) -> dict[str, Outputs]:
    """Gather the outputs of finished jobs by candidate; see `CVResults.oof`.

    Candidates without a finished fold are left out. With several `layers_of` folds these are the
    first axis, so that no two models are mixed.
    """
    layers = dict(zip((fold.key for fold in folds), layers_of(folds), strict=True))
    rows = {fold.key: fold.valid for fold in folds}
    count = 1 + max(layers.values(), default=0)
    gathered: dict[str, Outputs] = {}
    for job in plan.jobs:
        result = results.get(job.id)
        if result is None or result.outputs is None or result.status != DONE:
            continue
        outputs, key = result.outputs, job.key
        if job.candidate not in gathered:
            shape = (count, n_samples, *outputs.shape[1:])
            gathered[job.candidate] = np.full(shape, np.nan, np.float32)
        columns = plan.objective_of(job.model).columns
        if columns is not None and columns.ragged:
            gathered[job.candidate], outputs = wide(gathered[job.candidate], outputs)
        gathered[job.candidate][layers[key], rows[key]] = outputs
    return {
        name: gathered[name] if count > 1 else gathered[name][0]
        for name in plan.candidate_names
        if name in gathered
    }


def of_one_width(parts: Sequence[Outputs]) -> Outputs:
    """Return ragged rows of several batches as one array, with zeros behind the shorter ones."""
    return np.concatenate(wide(*parts))


def ragged_problems(models: int) -> Iterator[Problem]:
    """Yield that several models' outputs of varying number cannot be averaged."""
    if models > 1:
        yield Problem(
            "there is no mean of outputs whose number differs, such as boxes",
            f"those of {models} models",
            "Take those of one: results.model(candidate, fold), or results.oof.",
        )


def wide(*parts: Outputs) -> list[Outputs]:
    """Return arrays with zeros behind the last axis of the narrower ones."""
    width = max(part.shape[-1] for part in parts)
    return [
        np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])]) for part in parts
    ]


def mean_of_layers(outputs: Outputs) -> Outputs:
    """Return the mean over the first axis, ignoring NaN; NaN if all are."""
    known = ~np.isnan(outputs)
    total = np.where(known, outputs, 0).sum(axis=0, dtype=np.float64)
    count = known.sum(axis=0)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    narrow: Outputs = mean.astype(np.float32)
    return narrow
