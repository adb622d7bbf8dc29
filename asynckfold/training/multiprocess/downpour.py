"""Downpour SGD as a trainer of jobs: each process trains a replica, rank 0 serves them besides.

::

    rank 0 (the worker)  first batch ─ fork ┬ threads: the parameters ◄─ how far a replica moved,
                                            │              └─► as they are       every n_push steps
                                            └ a replica ─ batches 0, n … ┐           ┌ evaluate, LR
    rank 1                                    a replica ─ batches 1, … ──┴─ at rest ─┤ schedule,
                                                      all pushed and fetched         └ checkpoint

As under Hogwild the batches of an epoch are dealt out, so that all replicas together see each
sample once, and all rest for evaluations and checkpoints; but each moves parameters of its own, by
an optimizer of its own. What it pushes is how far they moved since its last push: of plain SGD the
sum of its steps' learning rate × gradient, as in the paper [1]_. What all push adds up: rare
exchanges, with momentum above all, want smaller learning rates than one process does. Running
statistics (BatchNorm) are no parameters, and all processes share them.

The numbers depend on who was faster, as under Hogwild. One process needs no server, and has the
bits of the plain trainer. Replicas are connected by pairs of sockets that exist before they are
forked: there is no port that could be in use, or that anybody else could reach.

A replica that dies ends the attempt, which is tried again from its last checkpoint, though the
others could go on, as those of `Server` do: the samples of its part would be lost to the epoch, and
candidates would be compared that have not seen the same.

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

from asynckfold.jobs.messages import Noted
from asynckfold.jobs.result import Epoch
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.multiprocess.hogwild import Hogwild
from asynckfold.training.parameter_server import wire
from asynckfold.training.parameter_server.flat_parameters import ParameterLayout, as_bytes
from asynckfold.training.parameter_server.server import Held
from asynckfold.training.process_group.members import ProcessGroup
from asynckfold.training.process_group.shared_tensors import place
from asynckfold.training.training_run import Report


class ReplicaClient:
    """The parameters of one process, and what of their movement the server does not know yet.

    Parameters
    ----------
    model : nn.Module
        Has the parameters.
    line : socket
        To the server, which has the same parameters now.
    params : TrainerParams
        Its ``n_push`` and ``n_pull`` count the steps from one exchange to the next.
    """

    def __init__(self, model: nn.Module, line: socket.socket, params: TrainerParams) -> None:
        self._model, self._line, self._params = model, line, params
        self._layout = ParameterLayout.of(model)
        self._known, self._moved = self._layout.empty(), self._layout.empty()
        self._steps = self._unpushed = 0
        self._note()
        self._moved.zero_()

    def stepped(self) -> None:
        """One more step of the optimizer is behind it: exchange what is due."""
        self._steps += 1
        self._unpushed += 1
        if self._steps % self._params.n_push == 0:
            self._push()
        if self._steps % self._params.n_pull == 0:
            self.pull()

    def settle(self) -> None:
        """Push what is left, and fetch: the server has then applied all that was pushed."""
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
        """Fetch the parameters; what was not pushed yet is not in them, and stays to be pushed."""
        self._note()
        wire.send(self._line, {"kind": "pull"})
        _, size = wire.receive(self._line)
        wire.fill(self._line, as_bytes(self._known.numpy()), size)
        for parameter, known, _ in self._parts():
            parameter.copy_(known)
            # In a smaller type, what was rounded away is no movement.
            known.copy_(parameter)

    @torch.no_grad()
    def _note(self) -> None:
        """See how far the parameters moved since they were last looked at."""
        for parameter, known, moved in self._parts():
            moved.add_(known - parameter)
            known.copy_(parameter)

    def _parts(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
        known, moved = self._layout.views(self._known), self._layout.views(self._moved)
        return zip(self._model.parameters(), known, moved, strict=True)


@dataclass(eq=False)
class Downpour(Hogwild):
    """A job in progress, of which each process trains a replica.

    ``lines`` are, by rank, the ends of the server and of the replica; ``held`` are the parameters
    that rank 0 serves in ``threads``. ``before`` counts what earlier attempts pushed, see `pushed`.
    """

    lines: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)
    held: Held | None = None
    threads: list[threading.Thread] = field(default_factory=list)
    replica: ReplicaClient = field(init=False)
    before: Sequence[int] = (0, 0, 0)

    def share(self) -> None:
        """Let all see the running statistics; make the lines to the server."""
        super().share()
        self.lines = [socket.socketpair() for _ in range(self.params.processes)]

    def enter(self) -> None:
        """Take parameters of one's own, which are fetched before the first step."""
        super().enter()
        found = list(self.model.parameters())
        place(found, [item.detach().clone() for item in found])
        self.replica = self._replica()

    def assembled(self) -> ProcessGroup | None:
        """Return the others; they are served from when they are forked, as threads are not."""
        process_group = super().assembled()
        if process_group is not None and self.held is None:
            self.held = Held(self.model, staleness_aware=self.params.staleness_aware)
            for line, _ in self.lines:
                thread = threading.Thread(target=_serve, args=(self.held, line), daemon=True)
                thread.start()
                self.threads.append(thread)
            self.replica = self._replica()
        return process_group

    def _replica(self) -> ReplicaClient:
        return ReplicaClient(self.model, self.lines[self.rank][1], self.params)

    def obey(self, order: Any) -> int:
        """Do one's part of an epoch with the newest parameters, and leave nothing unpushed."""
        self.replica.pull()
        peak = super().obey(order)
        self.replica.settle()
        return peak

    def catch_up(self) -> None:
        """Fetch the parameters that all have pushed to."""
        self.replica.pull()

    def train_on(self, batches: Sequence[int]) -> None:
        """Take one step with the replica of this process."""
        super().train_on(batches)
        if self.lines:
            self.replica.stepped()

    def quiesce(self) -> None:
        """Let every process come to rest; then this one has what all have pushed."""
        super().quiesce()
        if self.held is not None:
            self.replica.settle()

    @property
    def pushed(self) -> list[int]:
        """How often the replicas pushed, and the sum and the greatest of the staleness."""
        pushes, staleness, most = self.before
        held = self.held
        if held is None:
            return [pushes, staleness, most]
        return [pushes + held.pushes, staleness + held.staleness, max(most, held.max_staleness)]

    def close_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """After the last one, tell of pushes and their staleness."""
        super().close_epoch(item, started, report)
        pushes, staleness, most = self.pushed
        if self.ended and pushes:
            text = (
                f"{pushes} pushes; between the parameters of a push and it came "
                f"{staleness / pushes:.1f} of others, at most {most}"
            )
            self.log.write(f"{text}\n")
            report(Noted(self.task.job.id, "parameter_server", text))

    def tree(self) -> dict[str, Any]:
        """Return everything that a continuation needs: also how much was pushed."""
        return {**super().tree(), "pushed": self.pushed}

    def take_up(self, tree: dict[str, Any]) -> None:
        """Put everything where a tree says it was."""
        super().take_up(tree)
        self.before = tree["pushed"]

    def close(self) -> None:
        """End the other processes, and the threads that served them."""
        super().close()
        for line, _ in self.lines:
            _end(line)
        for thread in self.threads:
            thread.join()
        for pair in self.lines:
            for line in pair:
                line.close()


def _serve(held: Held, line: socket.socket) -> None:
    """In a thread: serve one replica until the job ends."""
    try:
        with contextlib.suppress(OSError):
            held.obey(line)
    finally:
        # Should the server fail, the replica must not wait for it.
        _end(line)


def _end(line: socket.socket) -> None:
    """End a connection for both sides, also where one waits in it."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
