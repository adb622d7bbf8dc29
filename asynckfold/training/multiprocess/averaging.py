"""Parameter averaging: each process trains a clone for some steps, then the clones are averaged.

::

    rank 0   batches 0, 2, 4 … of the round ┐       ┌ mean, weighted by samples ─ next round
    rank 1   batches 1, 3, 5 … of the round ┴───────┴ (wait)

A round is ``steps_per_round`` steps of every process, the last of an epoch fewer; the samples of an
epoch are put in the order of the plain trainer and dealt out batch by batch, so that all together
see each once. With ``partition_size`` or ``epochs_per_round`` each process has a part of the
samples for the whole epoch instead (`partitions`): parts may overlap, and a round may be so many
passes over them, by which the epoch is through, too.

The last process may compute on a GPU, with a part of another size and more passes over it. It is
forked before the first step (`hide_gpus`) and has a copy of its clone there, which it fetches
before a round or an evaluation and hands back after a round; what its optimizer keeps, it tells
when a checkpoint is written. Nobody else knows where it computes.

Parameters and running statistics are averaged; what an optimizer keeps is each process's own.
Within a round the learning rate stays, and nothing is saved, stopped or paused. The mean is summed
in the order of the ranks: the same plan gives the same bits each time. One process is the plain
trainer.

Each process's random numbers are seeded for each round, rank 0 goes on with those of the job.

References
----------
.. [1] McDonald, Hall, Mann (2010). Distributed training strategies for the structured perceptron.
   NAACL, section 4.2 (iterative parameter mixing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asynckfold.jobs.messages import Noted
from asynckfold.jobs.result import Averaged, Epoch
from asynckfold.training import batches, setup, training_run
from asynckfold.training.fused_optimizers import follow_parameters, leave_open
from asynckfold.training.multiprocess.base import (
    Stepping,
    average,
    frozen,
    set_settings,
    settings_of,
    tensors_of,
    thawed,
)
from asynckfold.training.partitions import Deal
from asynckfold.training.process_group.members import ProcessGroup
from asynckfold.training.process_group.shared_tensors import copy_each, place, shared
from asynckfold.training.training_run import Report


@dataclass(frozen=True)
class _Round:
    """Train on your batches from this one on, with these settings of the parameter groups."""

    epoch: int
    first: int
    settings: list[dict[str, Any]]


@dataclass(frozen=True)
class _Start:
    """On the GPU: take up what optimizer and criterion have kept so far, frozen."""

    optimizer: Any
    criterion: Any


@dataclass(frozen=True)
class _TellState:
    """On the GPU: what does your optimizer keep?"""


@dataclass(eq=False)
class Averaging(Stepping):
    """A job in progress, of which each process trains a clone.

    ``clones`` are parameters and buffers of each rank, ``rounds`` how often they were averaged, and
    ``seen`` how many samples each rank has trained on, those of later epochs counted again.
    ``deal`` says who has which part of the samples, where each has one for an epoch. ``steps`` are
    those that each rank has taken, in shared memory, and ``clone_of_gpu`` that of the rank which
    has a copy of it on a GPU.
    """

    clones: list[list[torch.Tensor]] = field(default_factory=list)
    rounds: int = 0
    seen: list[int] = field(default_factory=list)
    deal: Deal | None = None
    steps: torch.Tensor = field(init=False)
    steps_heard: int = 0
    clone_of_gpu: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.steps,) = shared([torch.zeros(self.params.processes, dtype=torch.int64)])
        self.seen = [0] * self.params.processes
        self.deal = batches.deal_of(self.bundle.plan, len(self.train), self.model)
        if self.deal is not None:
            self.bounds = self.deal.bounds

    def put_in_order(self) -> None:
        """Begin or continue an epoch, but for the generators."""
        super().put_in_order()
        if self.deal is not None:
            dealt = self.deal.order(self.order.numpy(), self.seed, self.epoch)
            self.order = torch.from_numpy(dealt)

    def samples_of(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a batch, augmented anew in each pass over a part."""
        if self.deal is None:
            return super().samples_of(batch)
        low, high = self.bounds[batch]
        number = self.epoch * max(self.deal.passes) + self.deal.numbers[batch]
        return self.data.train(self.order[low:high], self.seed, number)

    @property
    def is_on_gpu(self) -> bool:
        """Whether this is the process that computes on a GPU."""
        return self.gpu is not None and self.rank == self.params.processes - 1

    def enlist_ahead(self) -> None:
        """Fork the process that computes on a GPU."""
        if self.gpu is not None:
            self.clone_of_gpu = shared(tensors_of(self.model))
            self.ahead = ProcessGroup(0, self._obey, self.cores)
            self.ahead.enlist([self.params.processes - 1])

    def share(self) -> None:
        """Make a clone for each."""
        super().share()
        found = tensors_of(self.model)
        own = self.params.processes - (self.ahead is not None)
        self.clones = [shared(found) for _ in range(own)]
        place(found, self.clones[0])
        if self.ahead is not None:
            copy_each(self.clone_of_gpu, found)
            self.clones.append(self.clone_of_gpu)
            # A GPU takes seconds to be ready.
            self.heartbeat.aside()
            criterion = self.criterion
            kept = criterion.state_dict() if isinstance(criterion, nn.Module) else {}
            self.ahead.order(_Start(frozen(super().optimizer_state()["ranks"][-1]), frozen(kept)))
            self.ahead.gather()

    def enter(self) -> None:
        """Take up one's clone."""
        if not self.is_on_gpu:
            super().enter()
            place(tensors_of(self.model), self.clones[self.rank])
            return
        assert self.gpu is not None
        self.device = self.gpu.take()
        copies = [tensor.to(self.device, copy=True) for tensor in self.clone_of_gpu]
        place(tensors_of(self.model), copies)
        # For modules that do more than that, such as LSTM, whose weights are to lie side by side.
        self.model.to(self.device)
        self.data = setup.moved(self.data, self.device)
        if isinstance(self.criterion, nn.Module):
            self.criterion = self.criterion.to(self.device)
        # It was forked before any epoch began.
        self.epoch = -1

    def obey(self, order: _Round | _Start | _TellState) -> Any:
        """Carry out an order: return a round's losses, what the GPU's optimizer keeps, or None."""
        if isinstance(order, _Round):
            self.begin(order.epoch, order.first)
            set_settings(self.optimizer, order.settings)
            if self.device.type != "cpu":
                leave_open(self.optimizer)
            self.catch_up()
            losses = self._trained(order.first)
            if self.is_on_gpu:
                copy_each(self.clone_of_gpu, tensors_of(self.model))
            return losses
        if not self.is_on_gpu:
            return None
        if isinstance(order, _TellState):
            return frozen(self.optimizer.state_dict()["state"])
        self.optimizer.load_state_dict(thawed(order.optimizer))
        follow_parameters(self.optimizer)
        if isinstance(self.criterion, nn.Module):
            self.criterion.load_state_dict(thawed(order.criterion))
        return None

    def catch_up(self) -> None:
        """On the GPU: fetch one's clone."""
        if self.is_on_gpu:
            copy_each(tensors_of(self.model), self.clone_of_gpu)

    def optimizer_state(self) -> dict[str, Any]:
        """Return what each process's optimizer keeps, on whatever device."""
        found = super().optimizer_state()
        if self.gpu is not None and self.process_group is not None:
            self.process_group.order(_TellState())
            self.process_group.gather()
            found["ranks"][-1]["state"] = thawed(
                self.process_group.answers[self.params.processes - 1]
            )
        return found

    def step(self) -> None:
        """Train for a round; the first batch alone."""
        process_group, first = self.assembled(), self.batch
        if process_group is None:
            self._see(first, [0])
            super().step()
            return
        process_group.order(_Round(self.epoch, first, settings_of(self.optimizer)))
        found = {0: self._trained(first)}
        process_group.gather(self._listen)
        losses = {rank: iter(part) for rank, part in (found | process_group.answers).items()}
        owners = self._owners(first)
        counts = self._see(first, owners)
        average(self.clones, [count / sum(counts) for count in counts])
        self.rounds += 1
        for owner in owners:
            self.note_step(torch.tensor(next(losses[owner]), dtype=torch.float64))
            if self.steps_each_batch:
                self.lr_schedule.step()

    def _trained(self, first: int) -> list[float]:
        """Train on one's part of the round that begins with this batch; return the losses."""
        losses = []
        for batch in self._part(first, self.rank):
            losses.append(training_run.training_step(self, *self.samples_of(batch)))
            self.steps[self.rank] += 1
            if self.rank == 0:
                self.heartbeat.beat()
        # Only now: to read a number from a GPU is to wait for it.
        return [float(loss) for loss in losses]

    def _listen(self) -> None:
        """Show that others go on, who may have more to do than rank 0."""
        heard = int(self.steps.sum())
        if heard != self.steps_heard:
            self.steps_heard = heard
            self.heartbeat.beat()

    def _part(self, first: int, rank: int) -> list[int]:
        """The batches of a rank in the round that begins with this batch."""
        owners = enumerate(self._owners(first), first)
        return [batch for batch, owner in owners if owner == rank]

    def _owners(self, first: int) -> Sequence[int]:
        """The rank of each batch of the round that begins with this one."""
        count, steps = self.params.processes, self.params.steps_per_round
        if self.deal is not None:
            whole = self.params.epochs_per_round is not None
            return self.deal.owners[first : self.deal.end_of_round(first, None if whole else steps)]
        return [index % count for index in range(min(count * steps, self.batches - first))]

    def _see(self, first: int, owners: Sequence[int]) -> list[int]:
        """Count, and return, the samples of each rank in batches that begin with this one."""
        counts = [0] * self.params.processes
        for owner, (low, high) in zip(owners, self.bounds[first:], strict=False):
            counts[owner] += high - low
        self.seen = [then + now for then, now in zip(self.seen, counts, strict=True)]
        return counts

    def close_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """After the last one, tell of rounds, time and samples."""
        super().close_epoch(item, started, report)
        if self.ended:
            seconds = sum(epoch.seconds for epoch in self.epochs)
            text = (
                f"{self.rounds} rounds in {seconds:.1f} s; samples × epochs of each process: "
                f"{', '.join(map(str, self.seen))}{' (GPU)' if self.params.on_gpu else ''}"
            )
            self.log.write(f"{text}\n")
            report(Noted(self.task.job.id, "averaging", text))

    def averaged(self) -> Averaged:
        """Return what has been done so far."""
        return Averaged(self.rounds, tuple(self.seen))

    def tree(self) -> dict[str, Any]:
        """Return everything that a continuation needs: also what has been done so far."""
        return {**super().tree(), "rounds": self.rounds, "seen": list(self.seen)}

    def take_up(self, tree: dict[str, Any]) -> None:
        """Put everything where a tree says it was."""
        super().take_up(tree)
        self.rounds, self.seen = tree["rounds"], list(tree["seen"])
