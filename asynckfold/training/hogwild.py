"""Hogwild: processes update one shared model without locks, each on its part of every epoch.

::

    rank 0 (the worker)  batch 0 ─ share, fork ─ batch n ─ batch 2n … ┐          ┌ evaluate, LR
    rank 1                                batch 1 ─ batch n+1 …       ├─ paused ─┤ schedule,
    rank 2                                batch 2 ─ batch n+2 …       ┘          └ checkpoint

The samples of an epoch are put in the order of the plain trainer and dealt out batch by batch, so
that all processes together see each sample once an epoch. With one process the bits are those of
the plain trainer. With more, the order in which updates meet is left to chance, and so are the last
digits of every run; running statistics (BatchNorm) are shared and updated like parameters, so that
now and then one process's contribution is lost, as everything is here.

References
----------
.. [1] Recht, Ré, Wright, Niu (2011). Hogwild!: A lock-free approach to parallelizing stochastic
   gradient descent. NIPS 24, Algorithm 1.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asynckfold import proc
from asynckfold.data import Batches
from asynckfold.messages import Task
from asynckfold.pulse import PAUSE_SECONDS, Pulse
from asynckfold.result import Epoch, Result
from asynckfold.training import loop, seeding
from asynckfold.training.bundle import Bundle, JobLog
from asynckfold.training.crew import Crew
from asynckfold.training.kernels import follow_parameters
from asynckfold.training.loop import Report, Training
from asynckfold.training.shared import share_model, share_state, shared

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

    def next_of(self, rank: int) -> int | None:
        """Return the batch that is next for a process; None where it has done its part.

        Examples
        --------
        >>> board = Board(processes=2, batches=3)
        >>> board.next_of(1), board.note(1, 1, 0.5), board.next_of(1)
        (1, None, None)
        """
        batch = rank + int(self.done[rank]) * len(self.done)
        return batch if batch < len(self.losses) else None

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
class Hogwild(Training):
    """A job in progress on several processes; this one has rank 0.

    ``batch`` counts the batches that all have done. ``cores`` are those of each rank, ``stepped``
    how often the LR schedule was stepped for batches, and ``states`` what the optimizer of each
    rank keeps.
    """

    cores: tuple[int, ...] = ()
    board: Board = field(init=False)
    crew: Crew | None = None
    working: bool = False
    stepped: int = 0
    states: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = Board(self.params.processes, self.batches)

    def begin_epoch(self) -> None:
        """Put the samples in order; the members get theirs when they are told to go on."""
        super().begin_epoch()
        if self.batch == 0:
            self.board.done.zero_()

    def step(self) -> None:
        """Train on the next batch of this process, or see how far the others are."""
        begun = self.batch > 0 or self.epoch > 0
        if begun and self.crew is None and self.params.processes > 1:
            # By now an optimizer has what it keeps: most make it in their first step.
            self.share()
        if self.crew is not None and not self.working:
            self.board.paused, self.working = False, True
            self.crew.order(_Order(self.epoch, _settings(self.optimizer)))
        batch = self.board.next_of(0)
        if batch is not None:
            self.train_on(0, batch)
            self.losses = [self.board.losses[batch]]
        if self.crew is not None:
            self.crew.hear()
            # A sign of life follows each step: none comes before anybody got on.
            while self.board.total == self.batch and not self.pulse.asked:
                self.crew.hear(WAIT_SECONDS)
        self.batch = self.board.total
        self.keep_up()

    def train_on(self, rank: int, batch: int) -> None:
        """Take one step of this process's optimizer on the model of all."""
        low, high = self.bounds[batch]
        inputs, targets = self.data.train(self.order[low:high], self.seed, self.epoch)
        self.board.note(rank, batch, loop.training_step(self, inputs, targets))

    def keep_up(self) -> None:
        """Where the LR schedule steps with batches, one step for each batch of anybody."""
        while self.steps_each_batch and self.stepped < self.epoch * self.batches + self.board.total:
            self.lr_schedule.step()
            self.stepped += 1

    def share(self) -> None:
        """Move the model into shared memory, and fork the others."""
        share_model(self.model)
        count = self.params.processes
        loaded = self.states or [self.optimizer.state] * count
        if self.params.shared_state:
            self.states = [_shared_state(loaded[0])] * count
        else:
            self.states = [_shared_state(state) for state in loaded]
        self.optimizer.state = self.states[0]
        proc.pin(0, self.cores[:1])
        self.crew = Crew(count - 1, self._obey, self.cores)

    def _obey(self, rank: int, order: _Order) -> int:
        """In a member: do one's part of an epoch, or what is left of it; return the peak memory."""
        self.optimizer.state = self.states[rank]
        self.epoch = order.epoch
        if not self.steps_each_batch:
            for group, settings in zip(self.optimizer.param_groups, order.settings, strict=True):
                group.update(settings)
        self.order = torch.from_numpy(loop.epoch_order(self.train, self.seed, self.epoch))
        seeding.seed_all(
            seeding.stream(self.seed, self.epoch + 1, rank, int(self.board.done[rank]))
        )
        loop.set_mode(self, train=True)
        while not self.board.paused and (batch := self.board.next_of(rank)) is not None:
            if self.pulse.asked:
                time.sleep(PAUSE_SECONDS)
                continue
            self.keep_up()
            self.train_on(rank, batch)
        return proc.peak_memory()

    def quiesce(self) -> None:
        """Let every process come to rest after its batch."""
        if self.crew is not None and self.working:
            self.board.paused = True
            self.crew.gather(self.pulse.beat)
            self.working = False
            self.batch = self.board.total
            self.keep_up()

    def tell(self, report: Report) -> None:
        """As in the plain trainer, where this process has trained on anything."""
        if self.losses:
            super().tell(report)
            self.losses = []

    def scored(self) -> Epoch:
        """Return the losses of the epoch, of all processes, which stand still now."""
        self.quiesce()
        self.losses = list(self.board.losses.unbind())
        return super().scored()

    def save(self, report: Report) -> None:
        """Write a checkpoint of what all have done; they stand still until the next step."""
        self.quiesce()
        super().save(report)

    def tree(self) -> dict[str, Any]:
        """Return everything that a continuation needs: also how far each process is."""
        self.losses = []
        return {**super().tree(), "board": [self.board.done.clone(), self.board.losses.clone()]}

    def take_up(self, tree: dict[str, Any]) -> None:
        """Put everything where a tree says it was."""
        super().take_up(tree)
        done, losses = tree["board"]
        self.board.done.copy_(done)
        self.board.losses.copy_(losses)
        self.stepped = self.epoch * self.batches + self.batch

    def optimizer_state(self) -> dict[str, Any]:
        """Return what each process's optimizer keeps; one entry where they share it."""
        states = self.states[:1] if self.params.shared_state else self.states
        found = []
        own = self.optimizer.state
        for state in states or [own]:
            self.optimizer.state = state
            found.append(self.optimizer.state_dict())
        self.optimizer.state = own
        return {"ranks": found}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take up what `optimizer_state` returned; a single entry stands for all."""
        loaded: list[Any] = []
        for entry in reversed(state["ranks"]):
            self.optimizer.load_state_dict(entry)
            follow_parameters(self.optimizer)
            loaded.insert(0, self.optimizer.state)
        missing = self.params.processes - len(loaded)
        self.states = [*loaded, *loaded[:1] * missing]

    def close(self) -> None:
        """End the other processes."""
        if self.crew is not None:
            self.crew.close()


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _shared_state(state: Any) -> Any:
    """In shared memory, and such that a parameter without an entry gets one."""
    return defaultdict(dict, share_state(state))


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    cores: Sequence[int],
    report: Report,
    stop: Callable[[], bool],
    pulse: Pulse | None = None,
) -> Result | None:
    """Train one job on as many processes as its plan says, and score its held-out fold.

    Parameters
    ----------
    bundle : Bundle
        The sweep.
    task : Task
        The job, and where earlier attempts got to.
    data : Batches
        The samples, held in memory.
    cores : sequence of int
        One for each process; empty for no pinning.
    report : callable
        Receives progress, epochs and checkpoints as they come.
    stop : callable
        Asked after every batch; when true, the training is saved and left.
    pulse : Pulse, optional
        Shows progress to whoever watches.

    Returns
    -------
    Result or None
        None when it was asked to stop.

    Raises
    ------
    WorkerDiedError
        One of the other processes ended.
    """
    pulse = pulse or Pulse()
    pulse.aside()
    with JobLog(bundle.root, task.job) as log:
        plain = loop.build(bundle, task, data, torch.device("cpu"), log, pulse)
        training = Hogwild(**vars(plain), cores=tuple(cores))
        try:
            return loop.trained(training, report, stop)
        finally:
            training.close()
