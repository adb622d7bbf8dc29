"""Sums over the processes of a job, for a stage before its training, such as pretraining.

::

    rank 0 (the worker)  order ─ its part ┐       ┌ sum in the order of the ranks ─ next order
    rank 1, 2 …                its part   ┴───────┴ (wait)

All trainers of several processes sum this way, hogwild too: the bits are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from asynckfold.system import process
from asynckfold.training.process_group.ranks import ProcessGroup
from asynckfold.training.process_group.shared_tensors import place, shared

Part = Callable[[Any, int, int], Sequence[torch.Tensor]]
"""(order, rank, processes) → tensors."""


@dataclass(frozen=True)
class ParallelSum:
    """Forks processes that compute parts of a sum while a context lasts.

    ``processes`` includes this one, which has rank 0; `cores` has a core for each, or is empty for
    no pinning.
    """

    processes: int
    cores: Sequence[int] = ()

    @contextmanager
    def __call__(
        self, part: Part, seen: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> Iterator[Callable[[Any], Sequence[torch.Tensor]]]:
        """Yield order → sum over all ranks of what `part` returns.

        Parameters
        ----------
        part : callable
            Called in every process with every order, on what this process holds now.
        seen : sequence of Tensor
            Moved into shared memory: all ranks see changes made here with the next order.
        like : sequence of Tensor
            Tensors of the shapes that `part` returns for any order and rank.
        """
        place(seen, shared(seen))
        slots = [shared(like) for _ in range(1, self.processes)]

        def work(rank: int, order: Any) -> None:
            found = part(order, rank, self.processes)
            for slot, tensor in zip(slots[rank - 1], found, strict=True):
                slot.copy_(tensor)

        def total(order: Any) -> Sequence[torch.Tensor]:
            process_group.order(order)
            found = part(order, 0, self.processes)
            process_group.gather()
            for others in slots:
                for mine, theirs in zip(found, others, strict=True):
                    mine.add_(theirs)
            return found

        process.pin(0, self.cores[:1])
        process_group = ProcessGroup(self.processes - 1, work, self.cores)
        try:
            yield total
        finally:
            process_group.close()
