"""Hogwild: processes update one shared model without locks, each on its part of every epoch.

The algorithm is that of Recht, Ré, Wright and Niu (2011, NIPS 24).

::

    rank 0 (the worker)  batch 0 ─ share, fork ─ batch n ─ batch 2n … ┐          ┌ evaluate, LR
    rank 1                                batch 1 ─ batch n+1 …       ├─ paused ─┤ schedule,
    rank 2                                batch 2 ─ batch n+2 …       ┘          └ checkpoint

The batches of an epoch, in the order of the plain trainer, are dealt out to the ranks, so that all
together see each sample once. With one process the bits are those of the plain trainer. With more,
updates race, and the last digits differ from run to run; running statistics (BatchNorm) are shared
like parameters, so a rank's update of them can be lost too. With ``accumulate``, a rank adds up the
gradients of that many of its batches before it updates the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asynckfold.jobs.result import Epoch
from asynckfold.system.heartbeat import PAUSE_SECONDS
from asynckfold.training import gradients, lr_schedules
from asynckfold.training.multiprocess.base import SteppingTraining, set_settings, settings_of
from asynckfold.training.process_group.shared_tensors import copy_each, share_model, shared
from asynckfold.training.training_run import Report

WAIT_SECONDS = 0.02
"""Polling interval of rank 0 when its part of the epoch is done."""


@dataclass(eq=False)
class HogwildTraining(SteppingTraining):
    """A job in progress whose model several processes update.

    ``batch`` counts the batches of all ranks, ``stepped`` the steps of an LR schedule that steps
    with batches; ``working`` says whether the other ranks may be at work. Shared are ``done``, the
    batches done by each rank in this epoch, ``batch_losses``, and whether all ranks are ``paused``:
    asked to stop after their batch.
    """

    done: torch.Tensor = field(init=False)
    batch_losses: torch.Tensor = field(init=False)
    paused: torch.Tensor = field(init=False)
    working: bool = False
    stepped: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.done, self.batch_losses, self.paused = shared(
            [
                torch.zeros(self.params.processes, dtype=torch.int64),
                torch.zeros(self.batches, dtype=torch.float64),
                torch.zeros((), dtype=torch.bool),
            ]
        )

    def begin_epoch(self) -> None:
        """Order the samples; other ranks do so on their next order."""
        super().begin_epoch()
        if self.batch == 0:
            self.done.zero_()

    def step(self) -> None:
        """Train on the next batch of rank 0, or wait for the others."""
        if self.assemble() and not self.working:
            self.paused.fill_(False)
            self.working = True
            self.others.order(("work", self.epoch, settings_of(self.optimizer)))
        if batches := self.next_batches():
            self.train_on(batches)
            self.losses = [self.batch_losses[batches[-1]]]
        if self.assembled:
            self.others.receive()
            # Each step is followed by a beat: wait until some rank has made progress.
            while self.total == self.batch and not self.heartbeat.pause_requested:
                self.others.receive(WAIT_SECONDS)
        self.batch = self.total
        self.keep_up()

    @property
    def total(self) -> int:
        """Batches of the epoch done by all ranks."""
        return int(self.done.sum())

    def next_batches(self) -> Sequence[int]:
        """Return the batches of this rank's next step; none when its part is done."""
        ranks = self.params.processes
        first = self.rank + int(self.done[self.rank]) * ranks
        return range(first, self.batches, ranks)[: self.params.accumulate]

    def train_on(self, batches: Sequence[int]) -> None:
        """Take one step of this rank's optimizer on the shared model."""
        if len(batches) == 1:
            losses = [gradients.training_step(self, *self.samples_of(batches[0]))]
        else:
            losses = gradients.accumulated_step(self, batches)
        for batch, loss in zip(batches, losses, strict=True):
            self.batch_losses[batch] = loss
            self.done[self.rank] += 1

    def keep_up(self) -> None:
        """Step an LR schedule that steps with batches, once for each batch of any rank."""
        while (
            lr_schedules.steps_each_batch(self.lr_schedule, self.params)
            and self.stepped < self.epoch * self.batches + self.total
        ):
            self.lr_schedule.step()
            self.stepped += 1

    def share(self) -> None:
        """Share the model."""
        super().share()
        share_model(self.model)

    def work(self, epoch: int, settings: list[dict[str, Any]]) -> None:
        """On ranks > 0: train on the rest of the part of an epoch."""
        self.begin(epoch, int(self.done[self.rank]))
        if not lr_schedules.steps_each_batch(self.lr_schedule, self.params):
            set_settings(self.optimizer, settings)
        while not self.paused and (batches := self.next_batches()):
            if self.heartbeat.pause_requested:
                time.sleep(PAUSE_SECONDS)
                continue
            self.keep_up()
            self.train_on(batches)

    def quiesce(self) -> None:
        """Stop every rank after its batch."""
        if self.working:
            self.paused.fill_(True)
            self.others.gather()
            self.heartbeat.beat()
            self.working = False
            self.batch = self.total
            self.keep_up()

    def report_progress(self, report: Report) -> None:
        """Report progress, where rank 0 has trained since the last report."""
        if self.losses:
            super().report_progress(report)
            self.losses = []

    def score(self) -> Epoch:
        """Stop all ranks, and return the losses of the epoch."""
        self.quiesce()
        self.losses = list(self.batch_losses.unbind())
        return super().score()

    def save(self, report: Report) -> None:
        """Stop all ranks until the next step, and write a checkpoint."""
        self.quiesce()
        super().save(report)

    def state_dict(self) -> dict[str, Any]:
        """Add the progress of each rank."""
        self.losses = []
        board = [self.done.clone(), self.batch_losses.clone()]
        return {**super().state_dict(), "board": board}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the job, with the progress of each rank."""
        super().load_state_dict(tree)
        copy_each([self.done, self.batch_losses], tree["board"])
        # Torch would warn that the LR schedule steps first: other ranks took the steps.
        vars(self.optimizer)["_opt_called"] = True
        self.stepped = self.epoch * self.batches + self.batch
