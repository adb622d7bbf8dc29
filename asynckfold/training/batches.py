"""Which samples each step of an epoch sees.

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

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from asynckfold.jobs.folds import Indices
from asynckfold.jobs.plan import Plan


def epoch_order(indices: Indices, seed: int, epoch: int) -> Indices:
    """Return the samples in the order of one epoch: a function of seed and epoch alone."""
    return np.random.default_rng([seed, 0, epoch]).permutation(indices)


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

    Parameters
    ----------
    starts, sizes, passes : tuple of int
        By rank: where its part begins in the ring of shuffled samples, its size, and the passes
        over it.
    bounds : tuple of (int, int)
        By batch: where it lies in `order`. The first batches of all ranks come first, then the
        second ones, and so on.
    owners, turns, numbers : tuple of int
        By batch: its rank, its index among the rank's batches, and the pass, both from 0.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    passes: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    turns: tuple[int, ...]
    numbers: tuple[int, ...]

    def order(self, shuffled: Indices, seed: int, epoch: int) -> Indices:
        """Return the samples of an epoch, pass by pass, and within a pass rank by rank.

        Examples
        --------
        >>> parts = epoch_parts([6, 6], [1, 1], 10, lambda count: [(0, count)])
        >>> parts.order(np.arange(10), seed=0, epoch=0)
        array([0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 0])
        """
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
