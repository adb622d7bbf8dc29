"""The server: holds parameters, and applies the pushes of replicas."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

import numpy as np
from torch import nn

from asynckfold.errors import PeerLostError, refuse
from asynckfold.training.parameter_server import discovery, wire
from asynckfold.training.parameter_server.flat_parameters import (
    Floats,
    ParameterLayout,
    ServedParameters,
    as_bytes,
    count_problems,
    model_problems,
    shard_problems,
    timeout_problems,
)
from asynckfold.training.process_group.shared_tensors import copy_each

ACCEPT_SECONDS = 0.1
"""Polling interval of a server that waits for replicas to leave."""


@dataclass(frozen=True)
class ServerSummary:
    """The summary of a server's run.

    Parameters
    ----------
    replicas : int
        Replicas that joined.
    lost : tuple of str
        One line for each replica that ended without leaving.
    refused : tuple of str
        One line for each connection with another model, or none.
    pushes : int
        Updates applied.
    mean_staleness, max_staleness : float, int
        Updates of others applied since the replica of an update fetched the parameters.
    """

    replicas: int
    lost: tuple[str, ...]
    refused: tuple[str, ...]
    pushes: int
    mean_staleness: float
    max_staleness: int


class Server:
    """Holds the parameters of a model, or a part of them, and applies the pushes of replicas [1]_.

    It listens from the start, and serves replicas from `serve` on. `serve` takes the parameters
    from the model, and writes them back when it returns.

    Parameters
    ----------
    model : nn.Module
        On the CPU; replicas must have parameters of the same names and shapes.
    address : str, optional
        ``"host:port"`` of this machine, port 0 for any that is free; by default ``MASTER_ADDR`` and
        ``MASTER_PORT`` of the environment, else 127.0.0.1:29500. In a torch process group, whose
        store has that port, any free port of ``MASTER_ADDR``.
    shard : (int, int)
        Part of the parameters to hold: ``(1, 3)`` is the second of three servers.
    staleness_aware : bool
        Divide the learning rate of a push by its staleness, the number of pushes of others since
        its replica fetched the parameters [2]_; at least by 1.
    timeout_s : float
        Time to wait, while no replica is connected, for one that is expected.

    Attributes
    ----------
    address : str
        ``"host:port"`` where it listens.

    Raises
    ------
    InputError
        The address is in use or not of this machine, or another argument is invalid.

    References
    ----------
    .. [1] Dean et al. (2012). Large scale distributed deep networks. NIPS 25.
    .. [2] Zhang, Gupta, Lian, Liu (2016). Staleness-aware async-SGD for distributed deep learning.
       IJCAI.

    Examples
    --------
    >>> with Server(nn.Linear(2, 1), address="127.0.0.1:0") as server:
    ...     server.address.startswith("127.0.0.1:")
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        address: str | None = None,
        shard: tuple[int, int] = (0, 1),
        staleness_aware: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        refuse(model_problems(model))
        self._layout = ParameterLayout.of(model)
        refuse([*shard_problems(shard, self._layout.total), *timeout_problems(timeout_s)])
        self.model, self.shard, self.staleness_aware = model, shard, staleness_aware
        self.timeout_s = timeout_s
        self._served = self._taken_up()
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, str] = {}
        self._came = 0
        self._lost: list[str] = []
        self._refused: list[str] = []
        self._listener = wire.listen(discovery.address_to_bind() if address is None else address)
        self._listener.settimeout(ACCEPT_SECONDS)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(self) -> ServerSummary:
        """Serve all other ranks of the torch process group until they have left or ended.

        They find this server through the group: ``Hogwild`` needs no address there. Returns and
        raises what `serve` does.

        Raises
        ------
        InputError
            There is no process group, no other rank, or another rank serves already.
        """
        with self, discovery.published(self.address) as replicas:
            return self.serve(replicas)

    def serve(self, replicas: int = 1) -> ServerSummary:
        """Serve until this many replicas have joined and all have left; call it once.

        Further ones may join in place of those that died. After `timeout_s` without a connected
        replica, it stops waiting for missing ones; a connected one may take any time for a step.

        Parameters
        ----------
        replicas : int
            Expected number.

        Returns
        -------
        Served
            Summary of the run.

        Raises
        ------
        PeerLostError
            No replica joined.
        """
        refuse(count_problems(replicas=replicas))
        self._served = self._taken_up()
        threads: list[threading.Thread] = []
        try:
            self._accept(replicas, threads)
        finally:
            self.close()
            for thread in threads:
                thread.join()
            vector = self._layout.vector(self.model)
            vector.numpy()[self._layout.part(*self.shard)] = self._served.values
            copy_each(self.model.parameters(), self._layout.views(vector))
        pushes, staleness, most = self._served.counts.tolist()
        mean = staleness / max(1, pushes)
        return ServerSummary(
            self._came, tuple(self._lost), tuple(self._refused), pushes, mean, most
        )

    def _taken_up(self) -> ServedParameters:
        """Return a copy of the parameters to serve."""
        values = self._layout.vector(self.model).numpy()[self._layout.part(*self.shard)].copy()
        return ServedParameters(
            values, np.zeros(3, np.int64), threading.Lock(), self.staleness_aware
        )

    def _accept(self, replicas: int, threads: list[threading.Thread]) -> None:
        last_seen = time.monotonic()
        while True:
            with self._lock:
                present, came = len(self._lines), self._came
            if came >= replicas and not present:
                return
            if present:
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > self.timeout_s:
                if came:
                    return
                raise PeerLostError(
                    f"no replica joined {self.address} within {self.timeout_s:g} s. Start them "
                    "with this address, or pass a greater timeout_s"
                )
            try:
                line, place = self._listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return  # `close` was called
                raise
            line.settimeout(None)
            with self._lock:
                self._lines[wire.prepared(line)] = f"{place[0]}:{place[1]}"
            threads.append(threading.Thread(target=self._attend, args=(line,)))
            threads[-1].start()

    def _attend(self, line: socket.socket) -> None:
        """Serve one replica in a thread until it leaves or is lost."""
        ends, end = self._refused, ""
        try:
            seen = self._admit(line)
            ends = self._lost
            self._obey(line, seen)
        except OSError as error:
            end = f"{self._lines[line]}: {error.strerror or error}"
        finally:
            with self._lock:
                if end:
                    ends.append(end)
                del self._lines[line]
            line.close()

    def _admit(self, line: socket.socket) -> int:
        """Send the parameters to a replica with the same model, and wait until it begins."""
        line.settimeout(self.timeout_s)
        header, _ = wire.receive(line)
        difference = self._layout.difference(ParameterLayout.from_json(header.get("model")))
        if difference:
            wire.send(line, {"kind": "refused", "difference": difference})
            raise wire.FrameError(f"another model, {difference}")
        seen = self._give(line, np.empty_like(self._served.values))
        # The replica may find that the servers do not hold all parts of one model.
        wire.receive(line)
        line.settimeout(None)
        with self._lock:
            self._came += 1
        return seen

    def _give(self, line: socket.socket, room: Floats) -> int:
        """Send the parameters, through a buffer; return how many pushes are in them."""
        seen = self._served.fetch(room)
        wire.send(line, {"kind": "values", "shard": self.shard}, as_bytes(room))
        return seen

    def _obey(self, line: socket.socket, seen: int) -> None:
        """Serve one replica, whose parameters include `seen` pushes, until it leaves.

        Raises `OSError` if it ends without leaving, or sends an invalid message.
        """
        room = np.empty_like(self._served.values)
        while True:
            header, size = wire.receive(line)
            kind = header.get("kind")
            if kind == "push":
                wire.fill(line, as_bytes(room), size)
                self._served.push(room, seen)
                # The replica has moved its parameters too.
                seen += 1
            elif kind == "pull":
                seen = self._give(line, room)
            elif kind == "leave":
                wire.send(line, {"kind": "left"})
                return
            else:
                raise wire.FrameError(f"a message of unknown kind {kind!r:.40}")

    def close(self) -> None:
        """Stop listening, and disconnect all replicas, which then raise `PeerLostError`."""
        self._listener.close()
        with self._lock:
            for line in self._lines:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
