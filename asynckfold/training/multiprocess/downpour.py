"""Downpour SGD as a trainer of jobs: each rank trains a replica, and rank 0 also serves them.

::

    shared memory        the parameters ◄─ how far a replica moved, every n_push steps
                                └─► as they are, every n_pull steps
    rank 0 (the worker)  first batch ─ fork ─ a replica ─ batches 0, n … ┐           ┌ evaluate, LR
    rank 1                                    a replica ─ batches 1, … ──┴─ at rest ─┤ schedule,
                                                      all pushed and fetched         └ checkpoint

As under Hogwild the batches of an epoch are dealt out, so that all replicas together see each
sample once, and all stop for evaluations and checkpoints; but each has separate parameters and
optimizer. It pushes how far its parameters moved since its last push: for plain SGD the sum of
learning rate × gradient over its steps, as in the paper (Dean et al. 2012). Pushes add up: rare
exchanges, above all with momentum, need smaller learning rates than one process does. Running
statistics (BatchNorm) are not parameters; all ranks share them.

Results depend on timing, as under Hogwild. One process needs no server, and has the bits of the
plain trainer. The server is shared memory with a lock: there is no port.

A replica that dies ends the attempt, which is retried from its last checkpoint. The others could
continue, as those of `Server` do, but the epoch would miss the samples of its part, and candidates
would be compared on different samples.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asynckfold.jobs.messages import Note
from asynckfold.jobs.result import Epoch
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.multiprocess.hogwild import HogwildTraining
from asynckfold.training.parameter_server.flat_parameters import ParameterLayout, ServedParameters
from asynckfold.training.process_group.shared_tensors import place, shared
from asynckfold.training.training_run import Report


class _Lock:
    """A lock between processes, which the kernel releases when its holder dies."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exception: object) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_UN)


class Replica:
    """The parameters of one rank, with their movement since the last push.

    ``model`` has the served parameters now; ``n_push`` and ``n_pull`` of `params` are the steps
    between exchanges.
    """

    def __init__(self, model: nn.Module, served: ServedParameters, params: TrainerParams) -> None:
        self._model, self._served, self._params = model, served, params
        self._layout = ParameterLayout.of(model)
        self._known, self._moved = self._layout.vector(model), self._layout.empty()
        self._seen = int(served.counts[0])
        self._steps = self._unpushed = 0

    def stepped(self) -> None:
        """Count a step of the optimizer, and exchange what is due."""
        self._steps += 1
        self._unpushed += 1
        if self._steps % self._params.n_push == 0:
            self._push()
        if self._steps % self._params.n_pull == 0:
            self.pull()

    def settle(self) -> None:
        """Push the rest, and fetch."""
        if self._unpushed:
            self._push()
        self.pull()

    def _push(self) -> None:
        self._note()
        self._served.push(self._moved.numpy(), self._seen)
        # The replica has moved its parameters too.
        self._seen += 1
        self._moved.zero_()
        self._unpushed = 0

    @torch.no_grad()
    def pull(self) -> None:
        """Fetch the parameters; movement that is not pushed yet is not in them, and stays."""
        self._note()
        self._seen = self._served.fetch(self._known.numpy())
        for parameter, known, _ in self._parts():
            parameter.copy_(known)
            # Rounding to a smaller type is not movement.
            known.copy_(parameter)

    @torch.no_grad()
    def _note(self) -> None:
        """Add the movement of the parameters since the last call."""
        for parameter, known, moved in self._parts():
            moved.add_(known - parameter)
            known.copy_(parameter)

    def _parts(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
        known, moved = self._layout.views(self._known), self._layout.views(self._moved)
        return zip(self._model.parameters(), known, moved, strict=True)


@dataclass(eq=False)
class DownpourTraining(HogwildTraining):
    """A job in progress of which each process trains a replica.

    ``counts`` are those of the ``served`` parameters, of earlier attempts, too; both are shared.
    """

    counts: torch.Tensor = field(init=False)
    lock: _Lock | None = None
    served: ServedParameters = field(init=False)
    replica: Replica | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.counts,) = shared([torch.zeros(3, dtype=torch.int64)])

    def share(self) -> None:
        """Share the running statistics, and a copy of the parameters to push to."""
        super().share()
        self.lock = _Lock()
        (values,) = shared([ParameterLayout.of(self.model).vector(self.model)])
        self.served = ServedParameters(
            values.numpy(), self.counts.numpy(), self.lock, self.params.staleness_aware
        )
        self.replica = Replica(self.model, self.served, self.params)

    def enter(self) -> None:
        """Take separate parameters, to be fetched before the first step."""
        super().enter()
        parameters = list(self.model.parameters())
        place(parameters, [item.detach().clone() for item in parameters])
        self.replica = Replica(self.model, self.served, self.params)

    def work(self, epoch: int, settings: list[dict[str, Any]]) -> None:
        """On ranks > 0: train with the newest parameters; leave nothing unpushed."""
        assert self.replica is not None
        self.replica.pull()
        super().work(epoch, settings)
        self.replica.settle()

    def catch_up(self) -> None:
        """Fetch the served parameters."""
        assert self.replica is not None
        self.replica.pull()

    def train_on(self, batches: Sequence[int]) -> None:
        """Take one step with this rank's replica."""
        super().train_on(batches)
        if self.replica is not None:
            self.replica.stepped()

    def quiesce(self) -> None:
        """Stop every rank; rank 0 then has the result of all pushes."""
        super().quiesce()
        if self.replica is not None:
            self.replica.settle()

    def record_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """After the last epoch, report pushes and their staleness."""
        super().record_epoch(item, started, report)
        pushes, staleness, most = self.counts.tolist()
        if self.ended and pushes:
            text = (
                f"{pushes} pushes, with a mean staleness of {staleness / pushes:.1f} pushes of "
                f"others, at most {most}"
            )
            self.log.write(f"{text}\n")
            report(Note(self.task.job.id, "parameter_server", text))

    def state_dict(self) -> dict[str, Any]:
        """Add the counts of pushes."""
        return {**super().state_dict(), "pushed": self.counts.tolist()}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the job, with the counts of pushes."""
        super().load_state_dict(tree)
        self.counts.copy_(torch.tensor(tree["pushed"]))

    def close(self) -> None:
        """End the other ranks."""
        super().close()
        if self.lock is not None:
            self.lock.file.close()
