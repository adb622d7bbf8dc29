"""What a stage before the training does in parts: one for each process of its job, added up.

::

    rank 0 (the worker)  order ─ its part ┐       ┌ sum in the order of the ranks ─ next order
    rank 1, 2 …                its part   ┴───────┴ (wait)

The same way for all trainers of several processes, also for hogwild: the sum has the same bits each
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asynckfold import proc
from asynckfold.training.crew import Crew
from asynckfold.training.shared import place, shared

Part = Callable[[Any, int, int], Sequence[torch.Tensor]]
"""(order, rank, processes) → tensors."""


@contextmanager
def summing(
    part: Part,
    seen: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
    *,
    processes: int,
    cores: Sequence[int] = (),
) -> Iterator[Callable[[Any], Sequence[torch.Tensor]]]:
    """Fork processes that do parts of orders, for as long as the context lasts.

    Parameters
    ----------
    part : callable
        Is called in every process with every order, in turn; sees what this process has now.
    seen : sequence of Tensor
        Moved into shared memory: what becomes of them here, all see with the next order.
    like : sequence of Tensor
        Of the shapes of what `part` returns, whatever the order and the rank.
    processes : int
        This one, which has rank 0, included.
    cores : sequence of int
        One for each; empty for no pinning.

    Yields
    ------
    callable
        order → sum over all ranks of what `part` returned.

    Raises
    ------
    WorkerDiedError
        A process is gone.
    Exception
        What `part` raised in any of them.
    """
    place(seen, shared(seen))
    slots = [shared(like) for _ in range(1, processes)]

    def work(rank: int, order: Any) -> None:
        for slot, found in zip(slots[rank - 1], part(order, rank, processes), strict=True):
            slot.copy_(found)

    def total(order: Any) -> Sequence[torch.Tensor]:
        crew.order(order)
        found = part(order, 0, processes)
        crew.gather()
        for others in slots:
            for mine, theirs in zip(found, others, strict=True):
                mine.add_(theirs)
        return found

    proc.pin(0, cores[:1])
    crew = Crew(processes - 1, work, cores)
    try:
        yield total
    finally:
        crew.close()
