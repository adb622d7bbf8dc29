"""All-reduce whose ranks are on several nodes: the steps, and the bits, are those of one node.

::

    node x   rank 0  build ─ fork ─ listen ─ batch 0 ─ meet ─ join ─ spread ─ part 0 … sum, step
             rank 1          └──────────────────────────────── join ─ spread ─ part 1 …
    node y   rank 2          build ─ connect ─ fork ────────── join ─ spread ─ part 2 …
             rank 3                            └────────────── join ─ spread ─ part 3 …

Rank 0 tells the driver where it listens, and the driver then starts the other nodes. Each rank
there has a TCP connection to rank 0 instead of a pipe: it obeys the same orders, and its end ends
the connection, and so the attempt. Tensors travel as in `allreduce_on_gpus`, between cores by gloo.
The model comes from rank 0; pretraining runs on its node alone.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from asynckfold.data.batches import Batches
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.placement import Placement, Span
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.job_log import NoLog
from asynckfold.training.multiprocess.allreduce_on_gpus import AllReduceOnGpus
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.collectives import JOIN_TIMEOUT, NetworkCollectives
from asynckfold.training.process_group.gpu_handoff import GpuToTake
from asynckfold.training.process_group.meeting import accepted, connected
from asynckfold.training.process_group.ranks import ProcessGroup

_LOOK_SECONDS = 0.1


class StoppedBeforeMeeting(Exception):  # noqa: N818
    """The job shall end while its ranks meet."""


class OnCores:
    """Stands for the GPU of a rank that computes on a core."""

    def take(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")


@dataclass(eq=False)
class AllReduceAcrossNodes(AllReduceOnGpus):
    """A job in progress whose gradients the processes of several nodes compute.

    ``announce`` tells the driver the ports on which rank 0 listens, by `server` for orders.
    """

    span: Span = field(default_factory=lambda: Span("", ""))
    announce: Callable[[tuple[int, ...]], None] = lambda ports: None
    stop: Callable[[], bool] = lambda: False
    server: socket.socket | None = None

    def fork_ahead(self) -> None:
        """Fork the other ranks of this node, and let the driver start those of other nodes."""
        count, host = self.params.processes, self.span.host
        self.server = socket.create_server((host, 0), backlog=count)
        store = socket.create_server((host, 0), backlog=count)
        ports = self.server.getsockname()[1], store.getsockname()[1]
        self.collectives = NetworkCollectives(
            self.bundle.backend, count, host, ports[1], host, store.detach()
        )
        self.ahead = ProcessGroup(count // self.params.nodes - 1, self.carry_out, self.cores)
        self.announce(ports)
        self.take_gpu(self.gpus[0])

    def share(self) -> None:
        """Wait for the ranks of other nodes; let all join, and receive the model."""
        self.heartbeat.begin_long_phase()
        self._meet_others()
        super().share()

    def _meet_others(self) -> None:
        assert self.ahead is not None
        assert self.server is not None
        count = self.params.processes
        awaited = {*range(count // self.params.nodes, count)}
        end = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while awaited:
            if self.stop():
                raise StoppedBeforeMeeting
            if time.monotonic() > end:
                raise WorkerDiedError(os.getpid(), f"ranks {sorted(awaited)} did not connect")
            self.ahead.receive()
            found = accepted(self.server, self.span.secret, _LOOK_SECONDS)
            if found is not None and found[0] in awaited:
                self.ahead.adopt(*found)
                awaited.discard(found[0])
        self.ahead.watch()

    def close(self) -> None:
        """End the other ranks of this node, and the connections to the others, which then end."""
        super().close()
        if self.server is not None:
            self.server.close()


def on_cores(processes: int) -> tuple[OnCores, ...]:
    """Return what stands for the GPUs of all ranks."""
    return (OnCores(),) * processes


def serve(
    bundle: Bundle,
    placement: Placement,
    data: Batches,
    heartbeat: Heartbeat,
    gpus: Sequence[GpuToTake] = (),
) -> None:
    """Carry out the ranks that a placement has on this node, until rank 0 hangs up.

    `gpus` are theirs; without them, they compute on cores.
    """
    span, params = placement.span, bundle.plan.params
    assert span is not None
    assert span.task is not None
    log, device = NoLog(), torch.device("cpu")
    plain = setup.build(bundle, span.task, data, device, log, heartbeat, pretrains=False)
    here = range(span.first, span.first + params.processes // params.nodes)
    orders, tensors = span.ports
    try:
        found = {rank: connected(span.host, orders, span.secret, rank) for rank in here}
    except OSError:
        return  # rank 0 has ended
    _, address = found[span.first]
    training = AllReduceAcrossNodes(
        **vars(plain),
        # By rank; those of other nodes are not taken here.
        gpus=(*on_cores(span.first), *(gpus or on_cores(len(here)))),
        collectives=NetworkCollectives(
            bundle.backend, params.processes, span.host, tensors, address
        ),
        span=span,
    )
    lines = {rank: line for rank, (line, _) in found.items()}
    try:
        ranks.serve(lines, training.carry_out, placement.cores)
    finally:
        training.close()
