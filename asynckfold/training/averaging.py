"""Parameter averaging: each process trains a clone for some steps, then the clones are averaged.

::

    rank 0   batches 0, 2, 4 … of the round ┐       ┌ mean, weighted by samples ─ next round
    rank 1   batches 1, 3, 5 … of the round ┴───────┴ (wait)

A round is ``steps_per_round`` steps of every process, the last of an epoch fewer; the samples of an
epoch are put in the order of the plain trainer and dealt out batch by batch, so that all together
see each once. Parameters and running statistics are averaged; what an optimizer keeps is each
process's own. Within a round the learning rate stays, and nothing is saved, stopped or paused. The
mean is summed in the order of the ranks: the same plan gives the same bits each time. One process
is the plain trainer.

Each process's random numbers are seeded for each round, rank 0 goes on with those of the job.

References
----------
.. [1] McDonald, Hall, Mann (2010). Distributed training strategies for the structured perceptron.
   NAACL, section 4.2 (iterative parameter mixing).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from asynckfold.messages import Remark
from asynckfold.result import Epoch
from asynckfold.training import loop
from asynckfold.training.loop import Report
from asynckfold.training.shared import place, shared
from asynckfold.training.team import Stepping, average, set_settings, settings_of, tensors_of


@dataclass(frozen=True)
class _Round:
    """Train on your batches from this one on, with these settings of the parameter groups."""

    epoch: int
    first: int
    settings: list[dict[str, Any]]


@dataclass(eq=False)
class Averaging(Stepping):
    """A job in progress, of which each process trains a clone.

    ``clones`` are parameters and buffers of each rank, ``rounds`` how often they were averaged, and
    ``seen`` how many samples each rank has trained on, those of later epochs counted again.
    """

    clones: list[list[torch.Tensor]] = field(default_factory=list)
    rounds: int = 0
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen = [0] * self.params.processes

    def share(self) -> None:
        """Make a clone for each."""
        super().share()
        found = tensors_of(self.model)
        self.clones = [shared(found) for _ in range(self.params.processes)]
        place(found, self.clones[0])

    def enter(self) -> None:
        """Take up one's clone."""
        super().enter()
        place(tensors_of(self.model), self.clones[self.rank])

    def obey(self, order: _Round) -> list[float]:
        """Train one's clone for a round; return the losses."""
        self.begin(order.epoch, order.first)
        set_settings(self.optimizer, order.settings)
        return self._trained(order.first)

    def step(self) -> None:
        """Train for a round; the first batch alone."""
        crew, first = self.assembled(), self.batch
        if crew is None:
            self._see(first)
            super().step()
            return
        crew.order(_Round(self.epoch, first, settings_of(self.optimizer)))
        found = {0: self._trained(first)}
        crew.gather()
        found |= crew.answers
        before = list(self.seen)
        for rank, losses in found.items():
            for batch in self._part(first, rank)[: len(losses)]:
                self._see(batch, rank)
        counts = [now - then for now, then in zip(self.seen, before, strict=True)]
        average(self.clones, [count / sum(counts) for count in counts])
        self.rounds += 1
        steps = sum(map(len, found.values()))
        # Batch after batch: the first of each rank, then the second of each, …
        for index in range(steps):
            turn, rank = divmod(index, self.params.processes)
            self.note_step(torch.tensor(found[rank][turn], dtype=torch.float64))
            if self.steps_each_batch:
                self.lr_schedule.step()

    def _trained(self, first: int) -> list[float]:
        """Train on one's part of the round that begins with this batch; return the losses."""
        losses = []
        for batch in self._part(first, self.rank):
            losses.append(float(loop.training_step(self, *self.samples_of(batch))))
            if self.rank == 0:
                self.pulse.beat()
        return losses

    def _part(self, first: int, rank: int) -> range:
        """The batches of a rank in the round that begins with this batch."""
        count = self.params.processes
        end = min(first + count * self.params.steps_per_round, self.batches)
        return range(first + rank, end, count)

    def _see(self, batch: int, rank: int = 0) -> None:
        low, high = self.bounds[batch]
        self.seen[rank] += high - low

    def close_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """After the last one, tell of rounds, time and samples."""
        super().close_epoch(item, started, report)
        if self.ended:
            seconds = sum(epoch.seconds for epoch in self.epochs)
            text = (
                f"{self.rounds} rounds in {seconds:.1f} s; samples × epochs of each process: "
                f"{', '.join(map(str, self.seen))}"
            )
            self.log.write(f"{text}\n")
            report(Remark(self.task.job.id, "averaging", text))

    def tree(self) -> dict[str, Any]:
        """Return everything that a continuation needs: also what has been done so far."""
        return {**super().tree(), "rounds": self.rounds, "seen": list(self.seen)}

    def take_up(self, tree: dict[str, Any]) -> None:
        """Put everything where a tree says it was."""
        super().take_up(tree)
        self.rounds, self.seen = tree["rounds"], list(tree["seen"])
