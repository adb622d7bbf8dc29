"""Parts of the training fold, one for each process of parameter averaging, dealt out every epoch.

::

    samples of an epoch, shuffled   a b c d e f g h i j        (a ring)
    rank 0, a part of 6             a b c d e f
    rank 1, a part of 6             a       f g h i j          (a and f: in both)

The parts begin at equal distances, in proportion to their sizes where these differ, so that all
samples are in some part as soon as the sizes add up to them, and none is in two before. A process
passes over its part once an epoch, or several times, each time in another order; how often, like
the size, may differ from process to process, as where the last of them computes on a GPU.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asynckfold.jobs.folds import Indices
from asynckfold.jobs.trainer_params import TrainerParams

Cut = Callable[[int], Iterable[tuple[int, int]]]
"""Divides so many samples into batches: (low, high) of each."""


@dataclass(frozen=True)
class Deal:
    """Whose samples are whose in an epoch, and in which order they are trained on.

    Parameters
    ----------
    starts, sizes : tuple of int
        Where in the ring of shuffled samples the part of each rank begins, and how many it has.
    passes : tuple of int
        Of each rank over its part.
    bounds : tuple of (int, int)
        Of each batch in `order`: the first of each rank, the second of each, ….
    owners, turns, numbers : tuple of int
        Of each batch: the rank, the how-manieth it is of that rank, and in which pass, from 0.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    passes: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    turns: tuple[int, ...]
    numbers: tuple[int, ...]

    def order(self, shuffled: Indices, seed: int, epoch: int) -> Indices:
        """Return the samples of an epoch: pass after pass, in each those of rank 0, of rank 1, ….

        Examples
        --------
        >>> deal = dealt([6, 6], [1, 1], 10, lambda count: [(0, count)])
        >>> deal.order(np.arange(10), seed=0, epoch=0)
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
        """Return where a round of so many steps, or of the whole epoch, ends that begins here."""
        if steps is None:
            return len(self.turns)
        return bisect_left(self.turns, self.turns[first] + steps)


def deal_of(params: TrainerParams, count: int, cut: Cut) -> Deal | None:
    """Return how samples are dealt out in every epoch; None where there are no such parts.

    Parameters
    ----------
    params : TrainerParams
        How each job trains.
    count : int
        Samples that are trained on. A part has no more of them, whatever its size is to be.
    cut : callable
        Divides a part into batches.
    """
    if not params.deals_parts:
        return None
    return dealt(params.part_sizes(count), params.passes, count, cut)


def dealt(sizes: Sequence[int], passes: Sequence[int], count: int, cut: Cut) -> Deal:
    """Return how parts are dealt out of `count` samples: size and passes of that of each rank."""
    before = list(itertools.accumulate(sizes, initial=0))
    starts = tuple(count * offset // before[-1] for offset in before[:-1])
    turns = [itertools.count() for _ in sizes]
    batches, begin = [], 0
    for number, rank in _passes(passes):
        for low, high in cut(sizes[rank]):
            batches.append((next(turns[rank]), rank, begin + low, begin + high, number))
        begin += sizes[rank]
    batches.sort()
    return Deal(
        starts,
        tuple(sizes),
        tuple(passes),
        tuple((low, high) for _, _, low, high, _ in batches),
        tuple(rank for _, rank, *_ in batches),
        tuple(turn for turn, *_ in batches),
        tuple(number for *_, number in batches),
    )


def _passes(passes: Sequence[int]) -> list[tuple[int, int]]:
    """(number, rank) of all passes, in the order in which an epoch has their samples."""
    return [
        (number, rank)
        for number in range(max(passes))
        for rank, count in enumerate(passes)
        if number < count
    ]
