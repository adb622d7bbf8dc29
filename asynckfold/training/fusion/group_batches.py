"""The next batches of a fusion group: gathered together, or job by job where that raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from asynckfold.data.transforms import mapped
from asynckfold.training.fusion.backward import ReplicaBatches, parts_of
from asynckfold.training.training_run import Training

Guard = Callable[[Sequence[Any]], AbstractContextManager[None]]
"""Replicas → a context in which what their own code raises ends them alone."""


class GroupBatches:
    """Batches of the replicas of a group, whose orders of samples are stacked."""

    def __init__(self, replicas: Sequence[Training]) -> None:
        self._replicas = replicas
        self._seeds = [replica.task.job.seed for replica in replicas]
        self._orders = torch.empty(0, dtype=torch.int64)
        self._runs: dict[int, list[range]] = {}
        self._one_by_one = False

    def begin_epoch(self) -> None:
        """Take the order of every replica."""
        orders = [replica.order for replica in self._replicas]
        self._orders = pad_sequence(orders, batch_first=True)

    def parts(self, epoch: int, batch: int, guard: Guard) -> list[ReplicaBatches]:
        """Return one batch of every replica that has this one."""
        if not self._one_by_one:
            try:
                return [self._gathered(run, epoch, batch) for run in self._alike(batch)]
            except (Exception, SystemExit):  # noqa: BLE001
                # Gathering job by job shows whose samples raise.
                self._one_by_one = True
        return parts_of(self._each(batch, guard))

    def _alike(self, batch: int) -> list[range]:
        """Adjacent replicas with the same bounds and data in this batch."""
        if batch not in self._runs:
            kinds = [
                (*replica.bounds[batch], id(replica.data)) if batch < replica.batches else None
                for replica in self._replicas
            ]
            found = groupby(range(len(kinds)), kinds.__getitem__)
            runs = [list(run) for kind, run in found if kind is not None]
            self._runs[batch] = [range(run[0], run[-1] + 1) for run in runs]
        return self._runs[batch]

    def _gathered(self, run: range, epoch: int, batch: int) -> ReplicaBatches:
        first, part = self._replicas[run.start], slice(run.start, run.stop)
        if first.device.type != "cpu":
            ordered = [replica.ordered for replica in self._replicas[part]]
            found = first.data.train_in_order(ordered, *first.bounds[batch])
            return ReplicaBatches(run, *found)
        orders = self._orders[part, slice(*first.bounds[batch])]
        return ReplicaBatches(run, *first.data.train_together(orders, self._seeds[part], epoch))

    def _each(self, batch: int, guard: Guard) -> list[Any]:
        found: list[Any] = [None] * len(self._replicas)
        busy = [(i, r) for i, r in enumerate(self._replicas) if batch < r.batches]
        for index, replica in busy:
            with guard([replica]):
                found[index] = replica.samples_of(replica.batch)
        there = next((item for item in found if item is not None), None)
        for index, replica in busy:
            if found[index] is None and there is not None:
                # The width of a group touches bits: a job without samples takes those of another.
                low, high = replica.bounds[batch]
                taken = torch.arange(high - low, device=there[1].device) % len(there[1])
                found[index] = mapped(partial(_selected, taken), there)
        return found


def _selected(rows: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return item.index_select(0, rows)
