"""Hogwild: processes update one shared model without locks, each on its part of every epoch.

::

    rank 0 (the worker)  batch 0 ─ share, fork ─ batch n ─ batch 2n … ┐          ┌ evaluate, LR
    rank 1                                batch 1 ─ batch n+1 …       ├─ paused ─┤ schedule,
    rank 2                                batch 2 ─ batch n+2 …       ┘          └ checkpoint

The batches of an epoch, in the order of the plain trainer, are dealt out to the ranks, so that all
together see each sample once. With one process the bits are those of the plain trainer. With more,
updates race, and the last digits differ from run to run; running statistics (BatchNorm) are shared
like parameters, so a rank's update of them can be lost too. With ``accumulate``, a rank adds up the
gradients of that many of its batches before it updates the model.

References
----------
.. [1] Recht, Ré, Wright, Niu (2011). Hogwild!: A lock-free approach to parallelizing stochastic
   gradient descent. NIPS 24, Algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asynckfold.jobs.result import Epoch
from asynckfold.system import process
from asynckfold.system.heartbeat import PAUSE_SECONDS
from asynckfold.training import gradients, lr_schedules
from asynckfold.training.multiprocess.base import SteppingTraining, set_settings, settings_of
from asynckfold.training.process_group.shared_tensors import share_model, shared
from asynckfold.training.training_run import Report

WAIT_SECONDS = 0.02
"""Polling interval of rank 0 when its part of the epoch is done."""


class Board:
    """Shared progress of the ranks: batches done by rank, losses by batch, a pause flag."""

    def __init__(self, processes: int, batches: int) -> None:
        self.done, self.losses, self._paused = shared(
            [
                torch.zeros(processes, dtype=torch.int64),
                torch.zeros(batches, dtype=torch.float64),
                torch.zeros(1, dtype=torch.int64),
            ]
        )

    @property
    def total(self) -> int:
        """Batches of the epoch done by all ranks."""
        return int(self.done.sum())

    @property
    def paused(self) -> bool:
        """Whether all ranks are asked to stop after their batch."""
        return bool(self._paused)

    def pause(self, value: bool) -> None:
        """Ask all ranks to stop after their batch, or no longer."""
        self._paused.fill_(value)

    def next_of(self, rank: int, most: int = 1) -> Sequence[int]:
        """Return the next batches of a rank; none when its part is done.

        Examples
        --------
        >>> board = Board(processes=2, batches=5)
        >>> list(board.next_of(0, 2)), board.note(0, 0, 0.5), list(board.next_of(0, 9))
        ([0, 2], None, [2, 4])
        """
        first = rank + int(self.done[rank]) * len(self.done)
        return range(first, len(self.losses), len(self.done))[:most]

    def note(self, rank: int, batch: int, loss: torch.Tensor | float) -> None:
        """Record a batch of a rank."""
        self.losses[batch] = loss
        self.done[rank] += 1


@dataclass(eq=False)
class HogwildTraining(SteppingTraining):
    """A job in progress whose model several processes update.

    ``batch`` counts the batches of all ranks, ``stepped`` the steps of an LR schedule that steps
    with batches; ``working`` says whether the other ranks may be at work.
    """

    board: Board = field(init=False)
    working: bool = False
    stepped: int = 0

    def __post_init__(self) -> None:
        self.board = Board(self.params.processes, self.batches)

    def begin_epoch(self) -> None:
        """Order the samples; other ranks do so on their next order."""
        super().begin_epoch()
        if self.batch == 0:
            self.board.done.zero_()

    def step(self) -> None:
        """Train on the next batch of rank 0, or wait for the others."""
        process_group = self.assembled()
        if process_group is not None and not self.working:
            self.board.pause(False)
            self.working = True
            process_group.order(("work", self.epoch, settings_of(self.optimizer)))
        batches = self.board.next_of(0, self.params.accumulate)
        if batches:
            self.train_on(batches)
            self.losses = [self.board.losses[batches[-1]]]
        if process_group is not None:
            process_group.receive()
            # Each step is followed by a beat: wait until some rank has made progress.
            while self.board.total == self.batch and not self.heartbeat.pause_requested:
                process_group.receive(WAIT_SECONDS)
        self.batch = self.board.total
        self.keep_up()

    def train_on(self, batches: Sequence[int]) -> None:
        """Take one step of this rank's optimizer on the shared model."""
        if len(batches) == 1:
            losses = [gradients.training_step(self, *self.samples_of(batches[0]))]
        else:
            losses = gradients.accumulated_step(self, batches)
        for batch, loss in zip(batches, losses, strict=True):
            self.board.note(self.rank, batch, loss)

    def keep_up(self) -> None:
        """Step an LR schedule that steps with batches, once for each batch of any rank."""
        while (
            lr_schedules.steps_each_batch(self.lr_schedule, self.params)
            and self.stepped < self.epoch * self.batches + self.board.total
        ):
            self.lr_schedule.step()
            self.stepped += 1

    def share(self) -> None:
        """Share the model."""
        super().share()
        share_model(self.model)

    def work(self, epoch: int, settings: list[dict[str, Any]]) -> int:
        """On ranks > 0: train on the rest of the part of an epoch; return the peak memory."""
        self.begin(epoch, int(self.board.done[self.rank]))
        if not lr_schedules.steps_each_batch(self.lr_schedule, self.params):
            set_settings(self.optimizer, settings)
        count = self.params.accumulate
        while not self.board.paused and (batches := self.board.next_of(self.rank, count)):
            if self.heartbeat.pause_requested:
                time.sleep(PAUSE_SECONDS)
                continue
            self.keep_up()
            self.train_on(batches)
        return process.peak_memory()

    def quiesce(self) -> None:
        """Stop every rank after its batch."""
        if self.process_group is not None and self.working:
            self.board.pause(True)
            self.process_group.gather(self.heartbeat.beat)
            self.working = False
            self.batch = self.board.total
            self.keep_up()

    def report_progress(self, report: Report) -> None:
        """Report progress, where rank 0 has trained since the last report."""
        if self.losses:
            super().report_progress(report)
            self.losses = []

    def score(self) -> Epoch:
        """Stop all ranks, and return the losses of the epoch."""
        self.quiesce()
        self.losses = list(self.board.losses.unbind())
        return super().score()

    def save(self, report: Report) -> None:
        """Stop all ranks until the next step, and write a checkpoint."""
        self.quiesce()
        super().save(report)

    def state_dict(self) -> dict[str, Any]:
        """Add the progress of each rank."""
        self.losses = []
        return {
            **super().state_dict(),
            "board": [self.board.done.clone(), self.board.losses.clone()],
        }

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the job, with the progress of each rank."""
        super().load_state_dict(tree)
        done, losses = tree["board"]
        self.board.done.copy_(done)
        self.board.losses.copy_(losses)
        # Torch would warn that the LR schedule steps first: other ranks took the steps.
        vars(self.optimizer)["_opt_called"] = True
        self.stepped = self.epoch * self.batches + self.batch
