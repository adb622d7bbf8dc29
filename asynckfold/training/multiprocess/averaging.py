"""Parameter averaging: each rank trains a clone for some steps, then the clones are averaged.

Also called iterative parameter mixing (McDonald, Hall and Mann 2010, NAACL, section 4.2).

::

    rank 0   batches 0, 2, 4 … of the round ┐       ┌ mean, weighted by samples ─ next round
    rank 1   batches 1, 3, 5 … of the round ┴───────┴ (wait)

A round is ``steps_per_round`` steps of every rank, fewer at the end of an epoch; the batches of an
epoch, in the order of the plain trainer, are dealt out, so that all ranks together see each sample
once. With ``partition_size`` or ``epochs_per_round`` each rank has a part of the samples for the
whole epoch instead (`partitions`): parts may overlap, and a round may be several passes over them,
which are then the whole epoch.

The last ranks may compute on a GPU, which they share, with parts of another size and more passes
over them. They are forked before the first step (`hide_gpus`) and keep a copy of their clone there,
which they fetch before a round or an evaluation and return after a round; they send their optimizer
state when a checkpoint is written.

Parameters and running statistics are averaged; optimizer states are separate. Within a
round the learning rate stays, and nothing is saved, stopped or paused. The mean is summed in the
order of the ranks: the same plan gives the same bits each time. One process is the plain trainer.
Random numbers of ranks > 0 are seeded for each round; rank 0 continues those of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asynckfold.jobs.messages import Note
from asynckfold.jobs.result import AveragingSummary, Epoch
from asynckfold.training import batches, gradients, lr_schedules, setup
from asynckfold.training.batches import EpochParts
from asynckfold.training.multiprocess.base import (
    SteppingTraining,
    average,
    set_settings,
    settings_of,
)
from asynckfold.training.process_group.shared_tensors import copy_each, place, shared, tensors_of
from asynckfold.training.training_run import Report


@dataclass(eq=False)
class AveragingTraining(SteppingTraining):
    """A job in progress of which each process trains a clone.

    ``clones`` are parameters and buffers by rank, in shared memory; ``rounds`` counts their
    averages, and ``seen`` the samples that each rank has trained on, over all epochs. ``parts``
    assigns samples to ranks, where each has a part for an epoch.
    """

    clones: list[list[torch.Tensor]] = field(default_factory=list)
    rounds: int = 0
    seen: list[int] = field(default_factory=list)
    parts: EpochParts | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen = [0] * self.params.processes
        self.parts = batches.parts_of_epoch(self.bundle.plan, len(self.train), self.model)
        if self.parts is not None:
            self.bounds = self.parts.bounds

    def order_samples(self) -> None:
        """Begin or continue an epoch, except for the generators."""
        super().order_samples()
        if self.parts is not None:
            epoch_parts = self.parts.order(self.order.numpy(), self.task.job.seed, self.epoch)
            self.order = torch.from_numpy(epoch_parts)

    def samples_of(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a batch; each pass over a part augments anew."""
        if self.parts is None:
            return super().samples_of(batch)
        low, high = self.bounds[batch]
        number = self.epoch * max(self.parts.passes) + self.parts.numbers[batch]
        rows = self.order[low:high]
        inputs, targets = self.data.train(rows, self.task.job.seed, number)
        return inputs, self.data.weighted(targets, rows)

    @property
    def on_gpu(self) -> range:
        """The ranks that compute on a GPU."""
        count = self.params.processes
        return range(self.params.on_cores if self.gpu else count, count)

    def fork_ahead(self) -> None:
        """Fork the ranks that compute on a GPU, where the plan has such."""
        if self.gpu:
            self.clones = [shared(tensors_of(self.model)) for _ in range(self.params.processes)]
            self.others.fork(self.on_gpu)

    def share(self) -> None:
        """Make a clone for each rank."""
        super().share()
        tensors = tensors_of(self.model)
        self.clones = self.clones or [shared(tensors) for _ in range(self.params.processes)]
        if self.gpu:
            for clone in self.clones:
                copy_each(clone, tensors)
            # A GPU takes seconds to initialise.
            self.heartbeat.begin_long_phase()
            criterion = self.criterion
            kept = criterion.state_dict() if isinstance(criterion, nn.Module) else {}
            entries = [self.optimizer.state_dict(), *self.loaded[1:]]
            self.others.order(("load", entries, kept))
            self.others.gather()
        place(tensors, self.clones[0])

    def enter(self) -> None:
        """Take the rank's clone; on the GPU, copy it before each round."""
        if self.rank not in self.on_gpu:
            super().enter()
            place(tensors_of(self.model), self.clones[self.rank])
            return
        assert self.gpu is not None
        self.device = self.gpu.take()
        self.model.to(self.device)
        self.data = setup.to_device(self.data, self.device)
        if isinstance(self.criterion, nn.Module):
            self.criterion = self.criterion.to(self.device)
        # It was forked before any epoch began.
        self.epoch = -1

    def load(self, entries: Sequence[dict[str, Any]], criterion: dict[str, Any]) -> None:
        """On the GPU: load a state of the optimizer, of this rank or all, and of the criterion."""
        self.take_state(entries[self.rank] if self.rank < len(entries) else entries[0])
        if isinstance(self.criterion, nn.Module):
            self.criterion.load_state_dict(criterion)

    def work(self, epoch: int, first: int, settings: list[dict[str, Any]]) -> list[float]:
        """On ranks > 0: train on the batches of a round from this one on; return losses."""
        self.begin(epoch, first)
        set_settings(self.optimizer, settings)
        self.catch_up()
        losses = self._trained(first)
        if self.rank in self.on_gpu:
            copy_each(self.clones[self.rank], tensors_of(self.model))
        return losses

    def catch_up(self) -> None:
        """On the GPU: fetch the clone."""
        if self.rank in self.on_gpu:
            copy_each(tensors_of(self.model), self.clones[self.rank])

    def step(self) -> None:
        """Train for a round; before the fork, on one batch."""
        first = self.batch
        if not self.assemble():
            self._see(first, [0])
            super().step()
            return
        self.others.order(("work", self.epoch, first, settings_of(self.optimizer)))
        losses = [self._trained(first), *self.others.gather()]
        owners = self._owners(first)
        counts = self._see(first, owners)
        average(self.clones, [count / sum(counts) for count in counts])
        self.rounds += 1
        for owner in owners:
            self.record_step(torch.tensor(losses[owner].pop(0), dtype=torch.float64))
            if lr_schedules.steps_each_batch(self.lr_schedule, self.params):
                self.lr_schedule.step()

    def _trained(self, first: int) -> list[float]:
        """Train on the rank's part of the round that begins with batch `first`; return losses."""
        losses = []
        for batch, owner in enumerate(self._owners(first), first):
            if owner == self.rank:
                losses.append(gradients.training_step(self, *self.samples_of(batch)))
                # On any rank: others may have more to do than rank 0.
                self.heartbeat.beat()
        # At the end, because reading a number waits for the GPU.
        return [float(loss) for loss in losses]

    def _owners(self, first: int) -> Sequence[int]:
        """Return the rank of each batch of the round that begins with batch `first`."""
        count, steps = self.params.processes, self.params.steps_per_round
        if self.parts is not None:
            whole = self.params.epochs_per_round is not None
            return self.parts.owners[
                first : self.parts.end_of_round(first, None if whole else steps)
            ]
        return [index % count for index in range(min(count * steps, self.batches - first))]

    def _see(self, first: int, owners: Sequence[int]) -> list[int]:
        """Add up and return the samples of each rank in these batches."""
        counts = [0] * self.params.processes
        for owner, (low, high) in zip(owners, self.bounds[first:], strict=False):
            counts[owner] += high - low
        self.seen = [then + now for then, now in zip(self.seen, counts, strict=True)]
        return counts

    def record_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """After the last epoch, report rounds, time and samples."""
        super().record_epoch(item, started, report)
        if self.ended:
            seconds = sum(epoch.seconds for epoch in self.epochs)
            text = (
                f"{self.rounds} rounds in {seconds:.1f} s; samples × epochs of each process: "
                f"{', '.join(map(str, self.seen))}"
            )
            if self.gpu:
                text += f" (the last {len(self.on_gpu)} on the GPU)"
            if self.reached_target:
                loss, count = self.epochs[-1].train_loss, len(self.epochs)
                text += f"; reached a training loss of {loss:.4g} after {count} epochs"
            self.log.write(f"{text}\n")
            report(Note(self.task.job.id, "averaging", text))

    def averaged(self) -> AveragingSummary:
        """Return the rounds and samples so far."""
        return AveragingSummary(self.rounds, tuple(self.seen))

    def state_dict(self) -> dict[str, Any]:
        """Add the rounds and samples so far."""
        return {**super().state_dict(), "rounds": self.rounds, "seen": list(self.seen)}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the job, with rounds and samples."""
        super().load_state_dict(tree)
        self.rounds, self.seen = tree["rounds"], list(tree["seen"])
