"""One job whose ranks are on several nodes: how they meet, and all-reduce over them.

::

    node x   rank 0  build ─ fork ─ listen ─ batch 0 ─ meet ─ join ─ spread ─ part 0 … sum, step
             rank 1          └──────────────────────────────── join ─ spread ─ part 1 …
    node y   rank 2          build ─ connect ─ fork ────────── join ─ spread ─ part 2 …
             rank 3                            └────────────── join ─ spread ─ part 3 …

Rank 0 tells the driver where it listens, and the driver then starts the other nodes. Each rank
there has a TCP connection to rank 0 instead of a pipe: it obeys the same orders, and its end ends
the connection, and so the attempt. The model comes from rank 0; pretraining runs on its node alone.

The steps of all-reduce, and its bits, are those of one node. Its tensors travel as in
`allreduce_on_gpus`, between cores by gloo. `downpour_across_nodes` has the parameter server.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asynckfold.data.batches import Batches
from asynckfold.jobs.placement import Placement
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.job_log import NoLog
from asynckfold.training.multiprocess.allreduce_on_gpus import AllReduceOnGpus
from asynckfold.training.multiprocess.base import MultiprocessTraining
from asynckfold.training.multiprocess.downpour_across_nodes import DownpourAcrossNodes
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.collectives import NetworkCollectives
from asynckfold.training.process_group.gpu_handoff import GpuToTake
from asynckfold.training.process_group.meeting import Rendezvous, connected, pipe_of
from asynckfold.training.process_group.ranks import ProcessGroup


class OnCores:
    """Stands for the GPU of a rank that computes on a core."""

    def take(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")


@dataclass(eq=False)
class AllReduceAcrossNodes(AllReduceOnGpus):
    """A job in progress whose gradients the processes of several nodes compute.

    ``rendezvous`` is None on other nodes than that of rank 0.
    """

    rendezvous: Rendezvous | None = None

    def __post_init__(self) -> None:
        self.gpus = self.gpus or (OnCores(),) * self.params.processes

    def fork_ahead(self) -> None:
        """Fork the other ranks of this node, and let the driver start those of other nodes."""
        assert self.rendezvous is not None
        count, host = self.params.processes, self.rendezvous.span.host
        store = socket.create_server((host, 0), backlog=count)
        port = store.getsockname()[1]
        self.collectives = NetworkCollectives(
            self.bundle.backend, count, host, port, host, store.detach()
        )
        self.ahead = ProcessGroup(self.on_other_nodes.start - 1, self.carry_out, self.cores)
        self.rendezvous.open(count, port)
        self.take_gpu(self.gpus[0])

    def share(self) -> None:
        """Wait for the ranks of other nodes; let all join, and receive the model."""
        assert self.ahead is not None
        assert self.rendezvous is not None
        self.heartbeat.begin_long_phase()
        for rank, line in self.rendezvous.arrivals(self.on_other_nodes, self.ahead.receive):
            self.ahead.adopt(rank, pipe_of(line))
        self.ahead.watch()
        super().share()

    def close(self) -> None:
        """End the other ranks of this node, and the connections to the others, which then end."""
        super().close()
        if self.rendezvous is not None:
            self.rendezvous.close()


ACROSS_NODES: dict[str, type[AllReduceAcrossNodes | DownpourAcrossNodes]] = {
    "allreduce": AllReduceAcrossNodes,
    "parameter_server": DownpourAcrossNodes,
}


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
    port, *others = span.ports

    def line(number: int) -> socket.socket:
        return connected(span.host, port, span.secret, number)

    training: MultiprocessTraining
    try:
        orders = {rank: line(rank) for rank in here}
        if params.trainer == "allreduce":
            address = orders[span.first].getsockname()[0]
            # By rank; those of other nodes are not taken here.
            by_rank = (*(OnCores(),) * span.first, *gpus) if gpus else ()
            collectives = NetworkCollectives(
                bundle.backend, params.processes, span.host, others[0], address
            )
            training = AllReduceAcrossNodes(**vars(plain), gpus=by_rank, collectives=collectives)
        else:
            lines = {rank: line(params.processes + rank) for rank in here}
            training = DownpourAcrossNodes(**vars(plain), lines=lines)
    except OSError:
        return  # rank 0 has ended
    pipes = {rank: pipe_of(channel) for rank, channel in orders.items()}
    try:
        ranks.serve(pipes, training.carry_out, placement.cores)
    finally:
        training.close()
