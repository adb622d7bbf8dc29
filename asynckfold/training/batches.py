"""Which samples each step of an epoch sees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import nn

from asynckfold.jobs.folds import Indices
from asynckfold.jobs.plan import Plan
from asynckfold.training import partitions
from asynckfold.training.partitions import Deal


def epoch_order(indices: Indices, seed: int, epoch: int) -> Indices:
    """Return the samples in the order of one epoch: a function of seed and epoch alone."""
    return np.random.default_rng([seed, 0, epoch]).permutation(indices)


def bounds(count: int, size: int, model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of each batch.

    A last batch of one sample cannot be normalised by BatchNorm; it then joins the one before.
    """
    low = 0
    while low < count:
        high = min(low + size, count)
        if count - high == 1 and normalises_batches(model):
            high = count
        yield low, high
        low = high


def deal_of(plan: Plan, count: int, model: nn.Module) -> Deal | None:
    """Return how so many samples are dealt out to the processes of averaging, where they are."""
    return partitions.deal_of(plan.params, count, lambda part: bounds(part, plan.batch_size, model))


def normalises_batches(model: nn.Module) -> bool:
    """Whether it has BatchNorm."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
