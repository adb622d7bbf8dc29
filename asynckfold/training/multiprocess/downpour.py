"""Downpour SGD as a trainer of jobs: each rank trains a replica, and rank 0 also serves them.

::

    rank 0 (the worker)  first batch ─ fork ┬ threads: the parameters ◄─ how far a replica moved,
                                            │              └─► as they are       every n_push steps
                                            └ a replica ─ batches 0, n … ┐           ┌ evaluate, LR
    rank 1                                    a replica ─ batches 1, … ──┴─ at rest ─┤ schedule,
                                                      all pushed and fetched         └ checkpoint

As under Hogwild the batches of an epoch are dealt out, so that all replicas together see each
sample once, and all stop for evaluations and checkpoints; but each has its own parameters and
optimizer. It pushes how far its parameters moved since its last push: for plain SGD the sum of
learning rate × gradient over its steps, as in the paper [1]_. Pushes add up: rare exchanges, above
all with momentum, need smaller learning rates than one process does. Running statistics (BatchNorm)
are not parameters; all ranks share them.

Results depend on timing, as under Hogwild. One process needs no server, and has the bits of the
plain trainer. Socket pairs made before the fork connect the replicas: there is no port.

A replica that dies ends the attempt, which is retried from its last checkpoint. The others could
continue, as those of `Server` do, but the epoch would miss the samples of its part, and candidates
would be compared on different samples.

References
----------
.. [1] Dean et al. (2012). Large scale distributed deep networks. NIPS 25, section 4.1.
.. [2] Zhang, Gupta, Lian, Liu (2016). Staleness-aware async-SGD for distributed deep learning.
   IJCAI.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asynckfold.jobs.messages import Note
from asynckfold.jobs.result import Epoch
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.multiprocess.hogwild import HogwildTraining
from asynckfold.training.parameter_server import wire
from asynckfold.training.parameter_server.flat_parameters import ParameterLayout, as_bytes
from asynckfold.training.parameter_server.server import ServerParameters
from asynckfold.training.process_group.ranks import ProcessGroup
from asynckfold.training.process_group.shared_tensors import place
from asynckfold.training.training_run import Report


class ReplicaClient:
    """The parameters of one rank, with their movement since the last push.

    Parameters
    ----------
    model : nn.Module
        Has the parameters.
    line : socket
        Connection to the server, which has the same parameters now.
    params : TrainerParams
        ``n_push`` and ``n_pull`` are the steps between exchanges.
    """

    def __init__(self, model: nn.Module, line: socket.socket, params: TrainerParams) -> None:
        self._model, self._line, self._params = model, line, params
        self._layout = ParameterLayout.of(model)
        self._known, self._moved = self._layout.empty(), self._layout.empty()
        self._steps = self._unpushed = 0
        self._note()
        self._moved.zero_()

    def stepped(self) -> None:
        """Count a step of the optimizer, and exchange what is due."""
        self._steps += 1
        self._unpushed += 1
        if self._steps % self._params.n_push == 0:
            self._push()
        if self._steps % self._params.n_pull == 0:
            self.pull()

    def settle(self) -> None:
        """Push the rest, and fetch; the server has then applied all pushes."""
        if self._unpushed:
            self._push()
        self.pull()

    def _push(self) -> None:
        self._note()
        wire.send(self._line, {"kind": "push"}, as_bytes(self._moved.numpy()))
        self._moved.zero_()
        self._unpushed = 0

    @torch.no_grad()
    def pull(self) -> None:
        """Fetch the parameters; movement that is not pushed yet is not in them, and stays."""
        self._note()
        wire.send(self._line, {"kind": "pull"})
        _, size = wire.receive(self._line)
        wire.fill(self._line, as_bytes(self._known.numpy()), size)
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

    ``served`` are the server's ends of the connections to the replicas, by rank, and ``lines`` the
    replicas' ends; rank 0 serves ``held`` in ``threads``. ``before`` is `pushed` of earlier
    attempts.
    """

    served: dict[int, socket.socket] = field(default_factory=dict)
    lines: dict[int, socket.socket] = field(default_factory=dict)
    held: ServerParameters | None = None
    threads: list[threading.Thread] = field(default_factory=list)
    replica: ReplicaClient = field(init=False)
    before: Sequence[int] = (0, 0, 0)

    def share(self) -> None:
        """Share the running statistics; make the sockets."""
        super().share()
        for rank in range(self.params.processes):
            self.served[rank], self.lines[rank] = socket.socketpair()

    def enter(self) -> None:
        """Take parameters of the rank's own, to be fetched before the first step."""
        super().enter()
        parameters = list(self.model.parameters())
        place(parameters, [item.detach().clone() for item in parameters])
        self.replica = self._replica()

    def assembled(self) -> ProcessGroup | None:
        """Return the other ranks; serve them from the fork on, since threads do not survive it."""
        process_group = super().assembled()
        if process_group is not None and self.held is None:
            aware = self.params.staleness_aware
            self.held = ServerParameters(self.model, staleness_aware=aware)
            for line in self.served.values():
                thread = threading.Thread(target=_serve, args=(self.held, line), daemon=True)
                thread.start()
                self.threads.append(thread)
            self.replica = self._replica()
        return process_group

    def _replica(self) -> ReplicaClient:
        return ReplicaClient(self.model, self.lines[self.rank], self.params)

    def obey(self, order: Any) -> int:
        """Train on the rank's part with the newest parameters; leave nothing unpushed."""
        self.replica.pull()
        peak = super().obey(order)
        self.replica.settle()
        return peak

    def catch_up(self) -> None:
        """Fetch the served parameters."""
        self.replica.pull()

    def train_on(self, batches: Sequence[int]) -> None:
        """Take one step with this rank's replica."""
        super().train_on(batches)
        if self.lines:
            self.replica.stepped()

    def quiesce(self) -> None:
        """Stop every rank; rank 0 then has the result of all pushes."""
        super().quiesce()
        if self.held is not None:
            self.replica.settle()

    @property
    def pushed(self) -> list[int]:
        """Number of pushes, and the sum and maximum of their staleness."""
        pushes, staleness, most = self.before
        held = self.held
        if held is None:
            return [pushes, staleness, most]
        return [pushes + held.pushes, staleness + held.staleness, max(most, held.max_staleness)]

    def record_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """After the last epoch, report pushes and their staleness."""
        super().record_epoch(item, started, report)
        pushes, staleness, most = self.pushed
        if self.ended and pushes:
            text = (
                f"{pushes} pushes, with a mean staleness of {staleness / pushes:.1f} pushes of "
                f"others, at most {most}"
            )
            self.log.write(f"{text}\n")
            report(Note(self.task.job.id, "parameter_server", text))

    def state_dict(self) -> dict[str, Any]:
        """Add the counts of pushes."""
        return {**super().state_dict(), "pushed": self.pushed}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the job, with the counts of pushes."""
        super().load_state_dict(tree)
        self.before = tree["pushed"]

    def close(self) -> None:
        """End the other ranks, and the threads that serve them."""
        super().close()
        for line in self.served.values():
            _end(line)
        for thread in self.threads:
            thread.join()
        for line in (*self.served.values(), *self.lines.values()):
            line.close()


def _serve(held: ServerParameters, line: socket.socket) -> None:
    """Serve one replica in a thread until the job ends."""
    try:
        with contextlib.suppress(OSError):
            held.obey(line)
    finally:
        # If the server fails, the replica must not wait for it.
        _end(line)


def _end(line: socket.socket) -> None:
    """End a connection for both sides, even while one waits in it."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
