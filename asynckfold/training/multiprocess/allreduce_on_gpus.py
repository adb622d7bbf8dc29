"""All-reduce with a GPU for each rank: `allreduce`, where tensors travel by collectives.

::

    rank 0   build ─ fork ─ GPU 0 ─ batch 0 ─ join ─ spread ─ part 0 ┐      ┌ sum, step ─ spread …
    rank 1           └───────────────── GPU 1 ─ join ─ spread ─ part 1 ┴──────┘

The steps, and the order of every sum, are those of all-reduce on cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asynckfold.errors import WorkerDiedError
from asynckfold.training.multiprocess.allreduce import AllReduceTraining, BatchOrder
from asynckfold.training.multiprocess.base import frozen, thawed
from asynckfold.training.process_group.collectives import Collectives, Packed
from asynckfold.training.process_group.ranks import ProcessGroup
from asynckfold.training.process_group.shared_tensors import copy_each, tensors_of


@dataclass(frozen=True)
class _TakeGpu:
    """Order: take your GPU, and load this state of the criterion."""

    criterion: Any


@dataclass(frozen=True)
class _Join:
    """Order: meet the other ranks, and receive the model."""


@dataclass(eq=False)
class AllReduceOnGpus(AllReduceTraining):
    """A job in progress whose gradients several GPUs compute.

    ``packed`` holds what a rank computes, by rank: gradients, running statistics, loss.
    """

    collectives: Collectives | None = None
    packed: list[Packed] = field(default_factory=list)

    def fork_ahead(self) -> None:
        """Fork all other ranks; take the GPU of rank 0."""
        if self.params.processes > 1:
            self.collectives = Collectives(self.bundle.backend, self.params.processes)
            self.ahead = ProcessGroup(self.params.processes - 1, self.carry_out, self.cores)
            self.ahead.watch()
        self.take_gpu(self.gpus[0])

    def share(self) -> None:
        """Let all ranks take their GPUs, meet, and receive the model."""
        assert self.ahead is not None
        # A GPU takes seconds to initialise.
        self.heartbeat.begin_long_phase()
        criterion = self.criterion
        kept = criterion.state_dict() if isinstance(criterion, nn.Module) else {}
        self.ahead.order(_TakeGpu(frozen(kept)))
        self.ahead.gather()
        self.ahead.order(_Join())
        self._lay_out()
        self._together(self._meet)
        self.ahead.gather()

    def enter(self) -> None:
        """Take the rank's own GPU."""
        self.take_gpu(self.gpus[self.rank])
        self._lay_out()
        # It was forked before any epoch began.
        self.epoch = -1

    def _lay_out(self) -> None:
        """Make room for what the ranks compute: rank 0 receives that of all."""
        like = [*self.parameters, *self.statistics, torch.zeros((), dtype=torch.float64)]
        count = self.params.processes
        if self.rank:
            self.packed = [Packed(like, self.device)] * count
        else:
            self.packed = [Packed(like, self.device) for _ in range(count)]
        size = len(self.parameters)
        self.gradients = [packed.views[:size] for packed in self.packed]
        self.buffers = [packed.views[size:-1] for packed in self.packed]
        self.part_losses = [packed.views[-1] for packed in self.packed]
        if self.rank == 0:
            self.buffers[0] = self.statistics

    def _meet(self, collectives: Collectives) -> None:
        collectives.join(self.rank)
        collectives.spread(tensors_of(self.model))

    def send(self, order: Any) -> None:
        """Give all other ranks an order, and the model with it."""
        super().send(order)
        self._together(lambda found: found.spread(self._changing))

    def catch_up(self) -> None:
        """On ranks > 0: receive the model."""
        assert self.collectives is not None
        self.collectives.settle()
        self.collectives.spread(self._changing)

    def obey(self, order: Any) -> frozenset[int]:
        """Differentiate a part, and offer its gradient to rank 0."""
        assert self.collectives is not None
        if isinstance(order, _TakeGpu):
            if isinstance(self.criterion, nn.Module):
                self.criterion.load_state_dict(thawed(order.criterion))
        elif isinstance(order, _Join):
            self._meet(self.collectives)
        elif isinstance(order, BatchOrder):
            self.catch_up()
            without = super().obey(order)
            copy_each(self.buffers[self.rank], self.statistics)
            self.collectives.offer(self.packed[self.rank])
            return without
        return frozenset()

    def collect(self) -> None:
        """On rank 0: receive what the other ranks computed."""
        # Only what all ranks have offered is waited for.
        super().collect()
        self._together(lambda found: found.collect(self.packed))

    def _together(self, act: Callable[[Collectives], None]) -> None:
        """Act with all other ranks; raise what one of them raises, or its death."""
        assert self.collectives is not None
        try:
            act(self.collectives)
        except RuntimeError as error:
            process_group = self.process_group or self.ahead
            assert process_group is not None
            process_group.receive(1.0)
            text = f"the processes of the job lost each other ({error})"
            raise WorkerDiedError(os.getpid(), text) from error

    @property
    def _changing(self) -> list[torch.Tensor]:
        """What a step changes."""
        return [*self.parameters, *self.statistics]

    def close(self) -> None:
        """End the other processes, and the connections to them."""
        super().close()
        if self.collectives is not None:
            self.collectives.leave()
