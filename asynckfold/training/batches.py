"""Which samples an epoch draws, and which of them each step sees.

An epoch draws each training sample once, or as the user's `sampler` says::

    weights (n_samples,) ─────────────► weights of the training fold ─┐
    "balanced" ── 1 / size of class ──►                               ├─ WeightedRandomSampler ─┐
    factory(train_targets) ─┬─────────►                               ┘                         ├─►
                            └─ a torch Sampler, with the generator of the epoch ────────────────┘

One process sees all training samples in the epoch's order. In parameter averaging with partitions,
each process sees a part, drawn again every epoch::

    samples of an epoch, shuffled   a b c d e f g h i j        (a ring)
    rank 0, a part of 6             a b c d e f
    rank 1, a part of 6             a       f g h i j          (a and f: in both)

Parts start at equal distances (in proportion to their sizes where these differ): they overlap only
if their sizes add up to more than all samples, and leave samples out only if to fewer. A process
passes over its part once or several times an epoch, each time in another order.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler, WeightedRandomSampler

from asynckfold.data.batches import Batches
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import mapped
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.plan import Plan
from asynckfold.training import seeding

BALANCED = "balanced"


def epoch_order(indices: Indices, seed: int, epoch: int) -> Indices:
    """Return the samples in the order of one epoch: a function of seed and epoch alone."""
    return np.random.default_rng([seed, 0, epoch]).permutation(indices)


def epoch_samples(sampler: Any, data: Batches, train: Indices, seed: int, epoch: int) -> Indices:
    """Return the samples of an epoch in their order: a function of seed and epoch alone."""
    if sampler is None:
        return epoch_order(train, seed, epoch)
    targets = data.asked_of(data.targets_of(train).cpu())
    draw_seed = seeding.stream(seed, 3, epoch)
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
    weights = torch.as_tensor(drawn_from, dtype=torch.float64)
    good = weights.shape == (count,) and bool(weights.isfinite().all() and (weights >= 0).all())
    if not good or not weights.sum() > 0:
        raise InputError.one(
            "a sampler must give a finite weight of at least 0 for each training sample, some "
            "above 0, or a torch Sampler",
            f"weights of shape {tuple(weights.shape)} from {float(weights.min()):g} to "
            f"{float(weights.max()):g} for {count} samples",
            "Write for instance: lambda train_targets: 1.0 + 4.0 * (train_targets == 1).",
        )
    return weights


def _checked(places: list[Any], count: int) -> Indices:
    array = np.asarray(places)
    whole = array.ndim == 1 and array.dtype.kind in "iu"
    if not whole or not 0 <= array.min() <= array.max() < count:
        raise InputError.one(
            "a sampler must draw samples of the training fold, by their place in it",
            f"{len(places)} draws of {array.min()} to {array.max()} for {count} samples",
            "Yield one place from 0 to len(train_targets) - 1 at a time; pass no batch sampler.",
        )
    return array.astype(np.int64)


def bounds(count: int, size: int, model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of each batch.

    BatchNorm cannot normalise a last batch of one sample: it joins the batch before.
    """
    low = 0
    while low < count:
        high = min(low + size, count)
        if count - high == 1 and normalises_batches(model):
            high = count
        yield low, high
        low = high


def normalises_batches(model: nn.Module) -> bool:
    """Whether the model has BatchNorm layers."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


@dataclass(frozen=True)
class EpochParts:
    """The parts of an epoch: which rank trains on which samples, and in which order.

    By rank: where its part begins in the ring of shuffled samples, its size, and passes over it. By
    batch: where it lies in `order`, its rank, its index among the rank's batches, and the pass. The
    first batches of all ranks come first, then the second ones, and so on.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    passes: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    turns: tuple[int, ...]
    numbers: tuple[int, ...]

    def order(self, shuffled: Indices, seed: int, epoch: int) -> Indices:
        """Return the samples of an epoch, pass by pass, and within a pass rank by rank."""
        places = zip(self.starts, self.sizes, strict=True)
        parts = [shuffled.take(np.arange(low, low + size), mode="wrap") for low, size in places]
        again = [
            np.random.default_rng([seed, 2, epoch, number, rank]).permutation(parts[rank])
            for number, rank in _passes(self.passes)
            if number
        ]
        return np.concatenate([*parts, *again])

    def end_of_round(self, first: int, steps: int | None) -> int:
        """Return where the round that begins at batch `first` ends; without `steps`, the epoch."""
        if steps is None:
            return len(self.turns)
        return bisect_left(self.turns, self.turns[first] + steps)


def parts_of_epoch(plan: Plan, count: int, model: nn.Module) -> EpochParts | None:
    """Return the parts of `count` training samples; None unless averaging uses partitions."""
    params = plan.params
    if not params.has_partitions:
        return None
    return epoch_parts(
        params.part_sizes(count),
        params.passes,
        count,
        lambda part: bounds(part, plan.batch_size, model),
    )


def epoch_parts(
    sizes: Sequence[int],
    passes: Sequence[int],
    count: int,
    cut: Callable[[int], Iterable[tuple[int, int]]],
) -> EpochParts:
    """Return the parts of `count` samples, by size and passes of each rank.

    `cut` divides a number of samples into batches: (low, high) of each.
    """
    before = list(itertools.accumulate(sizes, initial=0))
    starts = tuple(count * offset // before[-1] for offset in before[:-1])
    turns = [itertools.count() for _ in sizes]
    batches, begin = [], 0
    for number, rank in _passes(passes):
        for low, high in cut(sizes[rank]):
            batches.append((next(turns[rank]), rank, begin + low, begin + high, number))
        begin += sizes[rank]
    batches.sort()
    return EpochParts(
        starts,
        tuple(sizes),
        tuple(passes),
        tuple((low, high) for _, _, low, high, _ in batches),
        tuple(rank for _, rank, *_ in batches),
        tuple(turn for turn, *_ in batches),
        tuple(number for *_, number in batches),
    )


def _passes(passes: Sequence[int]) -> list[tuple[int, int]]:
    """(number, rank) of all passes of an epoch, in order."""
    return [
        (number, rank)
        for number in range(max(passes))
        for rank, count in enumerate(passes)
        if number < count
    ]
