"""Hogwild: processes update one shared model without locks, each on its part of every epoch.

::

    rank 0 (the worker)  batch 0 ─ share, fork ─ batch n ─ batch 2n … ┐          ┌ evaluate, LR
    rank 1                                batch 1 ─ batch n+1 …       ├─ paused ─┤ schedule,
    rank 2                                batch 2 ─ batch n+2 …       ┘          └ checkpoint

The samples of an epoch are put in the order of the plain trainer and dealt out batch by batch, so
that all processes together see each sample once an epoch. With one process the bits are those of
the plain trainer. With more, the order in which updates meet is left to chance, and so are the last
digits of every run; running statistics (BatchNorm) are shared and updated like parameters, so that
now and then one process's contribution is lost, as everything is here. With ``accumulate``, a
process adds up the gradients of so many of its batches before it updates the model.

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
from asynckfold.training import lr_schedules, training_run
from asynckfold.training.losses import portions
from asynckfold.training.multiprocess.base import Stepping, set_settings, settings_of
from asynckfold.training.process_group.shared_tensors import share_model, shared
from asynckfold.training.training_run import Report

WAIT_SECONDS = 0.02
"""Between two looks of a process that is through at whether the others are."""


class Board:
    """What the processes of a job write for all to see.

    Parameters
    ----------
    processes, batches : int
        How many.
    """

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
        """Batches of the epoch that are done."""
        return int(self.done.sum())

    @property
    def paused(self) -> bool:
        """Whether all members are asked to stand still after their batch."""
        return bool(self._paused)

    @paused.setter
    def paused(self, value: bool) -> None:
        self._paused.fill_(value)

    def next_of(self, rank: int, most: int = 1) -> Sequence[int]:
        """Return the batches that are next for a process; none where it has done its part.

        Examples
        --------
        >>> board = Board(processes=2, batches=5)
        >>> list(board.next_of(0, 2)), board.note(0, 0, 0.5), list(board.next_of(0, 9))
        ([0, 2], None, [2, 4])
        """
        first = rank + int(self.done[rank]) * len(self.done)
        return range(first, len(self.losses), len(self.done))[:most]

    def note(self, rank: int, batch: int, loss: torch.Tensor | float) -> None:
        """A process has trained on a batch."""
        self.losses[batch] = loss
        self.done[rank] += 1


@dataclass(frozen=True)
class _Order:
    """Work on an epoch, with these settings of the parameter groups."""

    epoch: int
    settings: list[dict[str, Any]]


@dataclass(eq=False)
class Hogwild(Stepping):
    """A job in progress, whose model several processes update.

    ``batch`` counts the batches that all have done, ``stepped`` how often the LR schedule was
    stepped for batches; ``working`` says whether the others may be at work.
    """

    board: Board = field(init=False)
    working: bool = False
    stepped: int = 0

    def __post_init__(self) -> None:
        self.board = Board(self.params.processes, self.batches)

    def begin_epoch(self) -> None:
        """Put the samples in order; the members get theirs when they are told to go on."""
        super().begin_epoch()
        if self.batch == 0:
            self.board.done.zero_()

    def step(self) -> None:
        """Train on the next batch of this process, or see how far the others are."""
        process_group = self.assembled()
        if process_group is not None and not self.working:
            self.board.paused, self.working = False, True
            process_group.order(_Order(self.epoch, settings_of(self.optimizer)))
        batches = self.board.next_of(0, self.params.accumulate)
        if batches:
            self.train_on(batches)
            self.losses = [self.board.losses[batches[-1]]]
        if process_group is not None:
            process_group.hear()
            # A sign of life follows each step: none comes before anybody got on.
            while self.board.total == self.batch and not self.heartbeat.asked:
                process_group.hear(WAIT_SECONDS)
        self.batch = self.board.total
        self.keep_up()

    def train_on(self, batches: Sequence[int]) -> None:
        """Take one step of this process's optimizer on the model of all.

        Of several batches it is one with the mean of their gradients over samples; a pause comes
        before or after all of them.
        """
        if len(batches) == 1:
            losses = [training_run.training_step(self, *self.samples_of(batches[0]))]
        else:
            losses = self._accumulated(batches)
        for batch, loss in zip(batches, losses, strict=True):
            self.board.note(self.rank, batch, loss)

    def _accumulated(self, batches: Sequence[int]) -> list[torch.Tensor]:
        bounds = [self.bounds[batch] for batch in batches]
        weights = portions(
            self.criterion,
            self.bundle.plan,
            [high - low for low, high in bounds],
            lambda: self.data.targets_of(torch.cat([self.order[slice(*pair)] for pair in bounds])),
        )
        self.optimizer.zero_grad()
        losses = [
            training_run.add_gradient(self, *self.samples_of(batch), weight)
            for batch, weight in zip(batches, weights, strict=True)
        ]
        training_run.clip(self)
        self.optimizer.step()
        return losses

    def keep_up(self) -> None:
        """Where the LR schedule steps with batches, one step for each batch of anybody."""
        while (
            lr_schedules.steps_each_batch(self.lr_schedule, self.params)
            and self.stepped < self.epoch * self.batches + self.board.total
        ):
            self.lr_schedule.step()
            self.stepped += 1

    def share(self) -> None:
        """Let all see the model."""
        super().share()
        share_model(self.model)

    def obey(self, order: _Order) -> int:
        """Do one's part of an epoch, or what is left of it; return the peak memory."""
        self.begin(order.epoch, int(self.board.done[self.rank]))
        if not lr_schedules.steps_each_batch(self.lr_schedule, self.params):
            set_settings(self.optimizer, order.settings)
        count = self.params.accumulate
        while not self.board.paused and (batches := self.board.next_of(self.rank, count)):
            if self.heartbeat.asked:
                time.sleep(PAUSE_SECONDS)
                continue
            self.keep_up()
            self.train_on(batches)
        return process.peak_memory()

    def quiesce(self) -> None:
        """Let every process come to rest after its batch."""
        if self.process_group is not None and self.working:
            self.board.paused = True
            self.process_group.gather(self.heartbeat.beat)
            self.working = False
            self.batch = self.board.total
            self.keep_up()

    def report_progress(self, report: Report) -> None:
        """As in the plain trainer, where this process has trained on anything."""
        if self.losses:
            super().report_progress(report)
            self.losses = []

    def score(self) -> Epoch:
        """Return the losses of the epoch, of all processes, which stand still now."""
        self.quiesce()
        self.losses = list(self.board.losses.unbind())
        return super().score()

    def save(self, report: Report) -> None:
        """Write a checkpoint of what all have done; they stand still until the next step."""
        self.quiesce()
        super().save(report)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a continuation needs: also how far each process is."""
        self.losses = []
        return {
            **super().state_dict(),
            "board": [self.board.done.clone(), self.board.losses.clone()],
        }

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Put everything where a tree says it was."""
        super().load_state_dict(tree)
        done, losses = tree["board"]
        self.board.done.copy_(done)
        self.board.losses.copy_(losses)
        # Torch would warn of an LR schedule before which the others alone take steps.
        vars(self.optimizer)["_opt_called"] = True
        self.stepped = self.epoch * self.batches + self.batch
