"""Which samples an epoch draws: each once, or as the user's `sampler` says.

::

    weights (n_samples,) ─────────────► weights of the training fold ─┐
    "balanced" ── 1 / size of class ──►                               ├─ WeightedRandomSampler ─┐
    factory(train_targets) ─┬─────────►                               ┘                         ├─►
                            └─ a torch Sampler, with the generator of the epoch ────────────────┘
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, WeightedRandomSampler

from asynckfold.data.batches import Batches
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import mapped
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.folds import Indices
from asynckfold.training import seeding
from asynckfold.training.batches import epoch_order

BALANCED = "balanced"


def epoch_samples(sampler: Any, data: Batches, train: Indices, seed: int, epoch: int) -> Indices:
    """Return the samples of an epoch in their order: a function of seed and epoch alone.

    Raises
    ------
    InputError
        The sampler gives no weights, or no places in the training fold.
    """
    if sampler is None:
        return epoch_order(train, seed, epoch)
    targets = data.asked_of(data.targets_of(train).cpu())
    draw_seed = sampling_seed(seed, epoch)
    with seeded(draw_seed):
        draws = _given(sampler, targets, train)
        if not isinstance(draws, Sampler):
            draws = WeightedRandomSampler(_weights(draws, len(train)), len(train))  # type: ignore[arg-type]
        if hasattr(draws, "generator"):
            draws.generator = torch.Generator().manual_seed(draw_seed)
        places = list(draws)
    return train[_checked(places, len(train))]


def samples_per_epoch(sampler: Any, data: Batches, train: Indices, seed: int) -> int:
    """Return how many samples an epoch draws."""
    return len(epoch_samples(sampler, data, train, seed, 0)) if callable(sampler) else len(train)


def length_problems(first: int, later: int) -> Iterator[Problem]:
    """Yield that an epoch draws more or fewer samples than the first: steps are planned by it."""
    if first != later:
        yield Problem(
            "a sampler must draw as many samples in each epoch",
            f"{later} after {first} in the first",
            "Draw a number that depends on the training fold alone.",
        )


def sampling_seed(seed: int, epoch: int) -> int:
    """Return the seed of the draws of an epoch."""
    return seeding.stream(seed, 3, epoch)


def _given(sampler: Any, targets: Any, train: Indices) -> Any:
    """Return weights of the training fold, or a torch Sampler."""
    if isinstance(sampler, str):
        _, codes, counts = torch.unique(targets, return_inverse=True, return_counts=True)
        return 1 / counts.double()[codes]
    if callable(sampler):
        # A factory of the user's may keep a state, which no other epoch must see.
        return copy.deepcopy(sampler)(mapped(torch.clone, targets))
    return np.asarray(sampler)[train]


def _weights(drawn_from: Any, count: int) -> torch.Tensor:
    try:
        weights = torch.as_tensor(drawn_from, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        weights = torch.empty(0)
    usable = weights.shape == (count,) and bool(weights.isfinite().all() and (weights >= 0).all())
    if not usable or not weights.sum() > 0:
        shape = type(drawn_from).__name__
        if hasattr(drawn_from, "shape"):
            shape += f" of shape {tuple(drawn_from.shape)}"
        raise InputError.one(
            "a sampler must give a finite weight of at least 0 for each training sample, some "
            "above 0, or a torch Sampler",
            f"{shape} for {count} samples" if weights.shape != (count,) else _odd(weights),
            "Write for instance: lambda train_targets: 1.0 + 4.0 * (train_targets == 1).",
        )
    return weights


def _odd(weights: torch.Tensor) -> str:
    bad = weights[~(weights.isfinite() & (weights >= 0))]
    return f"a weight of {float(bad[0]):g}" if len(bad) else "weights of 0 only"


def _checked(places: list[Any], count: int) -> Indices:
    array = np.asarray(places)
    whole = array.ndim == 1 and array.dtype.kind in "iu"
    if not whole or not len(array) or array.min() < 0 or array.max() >= count:
        size = len(places)
        inside = f"{array.min()} to {array.max()}" if whole and size else "other items"
        raise InputError.one(
            "a sampler must draw samples of the training fold, by their place in it",
            f"{size} draws of {inside} for {count} samples",
            "Yield one place from 0 to len(train_targets) - 1 at a time; pass no batch sampler.",
        )
    return array.astype(np.int64)
