"""Synchronous gradients: each rank differentiates its part of every batch, the sum is one step.

::

    rank 0   part 0 ─ backward ┐      ┌ sum in order of rank ─ one optimizer step ─ next batch
    rank 1   part 1 ─ backward ┼──────┤
    rank 2   part 2 ─ backward ┘      └ (wait)

Each part's loss is weighted by its samples, so that the sum is the gradient of the whole batch, to
rounding, for criteria that take the mean or the sum over samples, and models that treat samples
independently; see `losses`. BatchNorm normalises each part separately, as torch's
DistributedDataParallel does; running statistics are averaged after each step. Parts are summed in
the order of the ranks: the same plan gives the same bits each time. One process is the plain
trainer. With all samples in one batch this is the map-reduce form of multi-threaded RPROP.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce

import torch

from asynckfold.training import batches, gradients, lr_schedules
from asynckfold.training.losses import portions
from asynckfold.training.multiprocess.base import MultiprocessTraining, average
from asynckfold.training.process_group.shared_tensors import place, shared


@dataclass(eq=False)
class AllReduceTraining(MultiprocessTraining):
    """A job in progress whose gradients several processes compute.

    ``gradients``, ``buffers`` and ``part_losses`` are by rank, in shared memory.
    """

    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    buffers: list[list[torch.Tensor]] = field(default_factory=list)
    part_losses: list[torch.Tensor] = field(default_factory=list)

    def share(self) -> None:
        """Share the parameters; what a rank computes is by rank."""
        tensors, ranks = self.parameters, range(self.params.processes)
        place(tensors, shared(tensors))
        self.gradients = [shared(tensors if rank else []) for rank in ranks]
        self.buffers = [shared(self.statistics) for _ in ranks]
        self.part_losses = shared([torch.zeros((), dtype=torch.float64) for _ in ranks])
        place(self.statistics, self.buffers[0])

    def enter(self) -> None:
        """Take the rank's running statistics."""
        place(self.statistics, self.buffers[self.rank])

    def differentiate(self, epoch: int, batch: int) -> frozenset[int]:
        """On ranks > 0: differentiate a part; return which parameters have no gradient."""
        self.begin(epoch, batch)
        edges, weights = self._divided(batch)
        self._differentiate(edges, weights)
        computed = [parameter.grad for parameter in self.parameters]
        for slot, gradient in zip(self.gradients[self.rank], computed, strict=True):
            if gradient is not None:
                slot.copy_(gradient)
        return frozenset(index for index, gradient in enumerate(computed) if gradient is None)

    def step(self) -> None:
        """Take one step with the gradient of all ranks."""
        if not self.assemble():
            super().step()
            return
        self.others.order(("differentiate", self.epoch, self.batch))
        edges, weights = self._divided(self.batch)
        self._differentiate(edges, weights)
        self._add_up(self.others.gather())
        sizes = [high - low for low, high in itertools.pairwise(edges)]
        average(self.buffers, [size / sum(sizes) for size in sizes])
        gradients.clip(self)
        self.optimizer.step()
        losses = (loss * weight for loss, weight in zip(self.part_losses, weights, strict=True))
        self.record_step(reduce(torch.add, losses))
        if lr_schedules.steps_each_batch(self.lr_schedule, self.params):
            self.lr_schedule.step()

    def _differentiate(self, edges: Sequence[int], weights: Sequence[float]) -> None:
        """Compute loss and gradient of the rank's part; the loss is 0 if it is empty."""
        self.optimizer.zero_grad()
        low, high = edges[self.rank : self.rank + 2]
        weight = weights[self.rank]
        # The mean over samples of weight 0 is NaN.
        if low == high or not weight:
            self.part_losses[self.rank].zero_()
            return
        loss = gradients.add_gradient(self, *self.ordered.batch(low, high), weight)
        self.part_losses[self.rank].copy_(loss)

    def _add_up(self, without: Sequence[frozenset[int]]) -> None:
        """Add the gradients of the other ranks to that of rank 0, in order."""
        for index, parameter in enumerate(self.parameters):
            for slots, missing in zip(self.gradients[1:], without, strict=True):
                if index in missing:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(slots[index])

    def _divided(self, batch: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return where the part of each rank begins and the last ends, and factors of their losses.

        BatchNorm cannot normalise a part of one sample: then fewer ranks have a part.
        """
        low, high = self.bounds[batch]
        ranks = max(1, min(self.params.processes, (high - low) // self._least))
        numbers = range(self.params.processes + 1)
        edges = [low + (high - low) * min(rank, ranks) // ranks for rank in numbers]
        sizes = [high - low for low, high in itertools.pairwise(edges)]
        rows, plan = self.order[low:high], self.bundle.plan
        targets = partial(gradients.weighted_targets, self, rows)
        return edges, portions(self.criterion, plan, sizes, targets)

    @cached_property
    def _least(self) -> int:
        return 2 if batches.normalises_batches(self.model) else 1

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the optimizer steps."""
        return [item for group in self.optimizer.param_groups for item in group["params"]]

    @property
    def statistics(self) -> list[torch.Tensor]:
        """The running statistics of the model."""
        return [item for item in self.model.buffers() if item.is_floating_point()]
