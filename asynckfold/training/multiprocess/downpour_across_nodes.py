"""Downpour SGD whose replicas are on several nodes: all push to the server of rank 0.

::

    node x   rank 0  listen ─ batch 0 ─ meet, fork ┬ threads: the parameters ◄─► all replicas
             rank 1                                │ a replica ─ batches 1, n + 1 …
    node y   rank 2  build ─ connect ─ fork ─ the state of the job ─ a replica ─ batches 2, n + 2 …

Replicas of other nodes have two TCP connections: one for orders, see `across_nodes`, and one to the
server. What ranks of one node share, messages tell them: before each batch they ask how many are
done and whether to stop, and after it they tell the loss; with each order come the buffers of rank
0, and with a checkpoint goes the optimizer state of each. They begin from what a checkpoint holds.

Running statistics (BatchNorm) are those of the ranks on the node of rank 0. The other nodes take
them over with each order, so also for evaluation, and drop their own.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asynckfold.training.multiprocess.base import frozen, thawed
from asynckfold.training.multiprocess.downpour import DownpourTraining
from asynckfold.training.multiprocess.hogwild import Board
from asynckfold.training.parameter_server import wire
from asynckfold.training.parameter_server.server import ServedParameters
from asynckfold.training.process_group.meeting import Rendezvous, pipe_of
from asynckfold.training.process_group.ranks import ProcessGroup
from asynckfold.training.process_group.shared_tensors import copy_each


@dataclass(frozen=True)
class _Begin:
    """Order on other nodes: continue from this state of the job."""

    state: Any


@dataclass(frozen=True)
class _WithShared:
    """An order, with what ranks of the node of rank 0 share: buffers, batches done by rank."""

    order: Any
    buffers: Any
    done: list[int]


class RemoteBoard(Board):
    """The board of rank 0, as a rank of another node sees and fills it."""

    def __init__(self, processes: int, batches: int, line: socket.socket) -> None:
        super().__init__(processes, batches)
        self._line, self._total = line, 0

    @property
    def total(self) -> int:
        """Batches of the epoch done by all ranks, at the last look."""
        return self._total

    @property
    def paused(self) -> bool:
        """Look at the board: whether all ranks are asked to stop after their batch."""
        wire.send(self._line, {"kind": "look"})
        header, _ = wire.receive(self._line)
        self._total = header["total"]
        return bool(header["paused"])

    def note(self, rank: int, batch: int, loss: torch.Tensor | float) -> None:
        """Record a batch of this rank."""
        super().note(rank, batch, loss)
        found = {"kind": "note", "rank": rank, "batch": batch, "loss": float(loss)}
        wire.send(self._line, found)


class ServedWithBoard(ServedParameters):
    """Parameters, and the board for the ranks of other nodes."""

    def __init__(self, model: nn.Module, staleness_aware: bool, board: Board) -> None:
        super().__init__(model, staleness_aware=staleness_aware)
        self._board = board

    def answer(self, line: socket.socket, header: dict[str, Any]) -> None:
        """Show the board, or fill it."""
        if header.get("kind") == "look":
            wire.send(line, {"total": self._board.total, "paused": self._board.paused})
        elif header.get("kind") == "note":
            self._board.note(header["rank"], header["batch"], header["loss"])
        else:
            super().answer(line, header)


@dataclass(eq=False)
class DownpourAcrossNodes(DownpourTraining):
    """A job in progress of which each process of several nodes trains a replica.

    ``rendezvous`` is None on other nodes than that of rank 0.
    """

    rendezvous: Rendezvous | None = None

    def fork_ahead(self) -> None:
        """Let the driver start the other nodes."""
        assert self.rendezvous is not None
        self.rendezvous.open(2 * self.params.processes)

    def share(self) -> None:
        """Wait for the ranks of other nodes, and let them begin."""
        assert self.rendezvous is not None
        super().share()
        self.heartbeat.begin_long_phase()
        self.ahead = ProcessGroup(0, self.carry_out, self.cores)
        count, far = self.params.processes, self.on_other_nodes
        numbers = [*far, *(count + rank for rank in far)]
        for number, line in self.rendezvous.arrivals(numbers, self.ahead.receive):
            if number in far:
                self.ahead.adopt(number, pipe_of(line))
            else:
                self.served[number - count] = wire.prepared(line)
        state = self.state_dict()
        for rank in far:
            own = state["optimizer"]["ranks"][rank]
            self.ahead.order(_Begin(frozen({**state, "optimizer": {"ranks": [own]}})), [rank])
        self.ahead.gather()

    def to_serve(self) -> ServedParameters:
        """Return the parameters for the server, with the board."""
        return ServedWithBoard(self.model, self.params.staleness_aware, self.board)

    def send(self, order: Any) -> None:
        """Give all other ranks an order, with what they do not share with rank 0."""
        buffers = frozen(list(self.model.buffers()))
        super().send(_WithShared(order, buffers, self.board.done.tolist()))

    def carry_out(self, rank: int, order: Any) -> Any:
        """On ranks > 0: carry out any order."""
        if isinstance(order, _Begin):
            self.rank = rank
            self.load_state_dict(thawed(order.state))
            self.enter()
            self.board = RemoteBoard(self.params.processes, self.batches, self.lines[rank])
            # Its samples have not been ordered.
            self.epoch = -1
            return None
        if isinstance(order, _WithShared):
            if self.rendezvous is None:
                copy_each(self.model.buffers(), thawed(order.buffers))
                self.board.done.copy_(torch.tensor(order.done))
            order = order.order
        return super().carry_out(rank, order)

    def close(self) -> None:
        """End the other ranks of this node, and the connections to the others, which then end."""
        super().close()
        if self.rendezvous is not None:
            self.rendezvous.close()
