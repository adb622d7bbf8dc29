"""The server: it holds parameters, and applies what replicas push."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from asynckfold.errors import PeerLostError, refuse
from asynckfold.training.parameter_server import wire
from asynckfold.training.parameter_server.checks import (
    count_problems,
    shard_problems,
    timeout_problems,
)
from asynckfold.training.parameter_server.flat_parameters import Floats, ParameterLayout, as_bytes

ACCEPT_SECONDS = 0.1
"""Between two looks of a server at whether all replicas have left."""


@dataclass(frozen=True)
class Served:
    """What a server did.

    Parameters
    ----------
    replicas : int
        How many came.
    lost : tuple of str
        One line for each that ended without saying so.
    refused : tuple of str
        One line for each that had another model, or was no replica.
    pushes : int
        Updates that were applied.
    mean_staleness, max_staleness : float, int
        Of an update: how many others were applied since its replica fetched the parameters.
    """

    replicas: int
    lost: tuple[str, ...]
    refused: tuple[str, ...]
    pushes: int
    mean_staleness: float
    max_staleness: int


class Held:
    """The parameters that a server holds, or a part of them: what replicas push, it applies.

    Threads may serve a replica each.

    Parameters
    ----------
    model : nn.Module
        Whose parameters they are.
    shard : (int, int)
        Which of how many parts.
    staleness_aware : bool
        As of `Server`.

    Attributes
    ----------
    pushes, staleness, max_staleness : int
        Updates that were applied, the sum of their staleness, and the greatest.
    """

    def __init__(
        self, model: nn.Module, shard: tuple[int, int] = (0, 1), staleness_aware: bool = False
    ) -> None:
        self.layout = ParameterLayout.of(model)
        self._model, self._shard, self._aware = model, shard, staleness_aware
        self._part = self.layout.part(*shard)
        self._lock = threading.Lock()
        self.pushes = self.staleness = self.max_staleness = 0
        self.take_up()

    def take_up(self) -> None:
        """Hold what the model has now."""
        with torch.no_grad():
            vector = self.layout.empty()
            self._copy(self._model.parameters(), self.layout.views(vector))
            self._values: Floats = vector.numpy()[self._part].copy()

    def give_back(self) -> None:
        """Let the model have what is held; in parts of others it stays as it is."""
        with torch.no_grad():
            vector = self.layout.empty()
            self._copy(self._model.parameters(), self.layout.views(vector))
            vector.numpy()[self._part] = self._values
            self._copy(self.layout.views(vector), self._model.parameters())

    @staticmethod
    def _copy(values: Iterable[torch.Tensor], to: Iterable[torch.Tensor]) -> None:
        for value, place in zip(values, to, strict=True):
            place.copy_(value)

    def give(self, line: socket.socket, room: Floats | None = None) -> int:
        """Send the parameters, by way of some room; return how many pushes are in them."""
        room = np.empty_like(self._values) if room is None else room
        with self._lock:
            seen = self.pushes
            np.copyto(room, self._values)
        wire.send(line, {"kind": "values", "shard": self._shard}, as_bytes(room))
        return seen

    def obey(self, line: socket.socket, seen: int = 0) -> None:
        """Serve one replica, whose parameters have so many pushes in them, until it leaves.

        Raises
        ------
        OSError
            It ended without saying so, or what came is no message.
        """
        room = np.empty_like(self._values)
        while True:
            header, size = wire.receive(line)
            kind = header.get("kind")
            if kind == "push":
                wire.fill(line, as_bytes(room), size)
                with self._lock:
                    self._apply(room, self.pushes - seen)
                # Its own parameters moved along with what it pushed.
                seen += 1
            elif kind == "pull":
                seen = self.give(line, room)
            elif kind == "leave":
                wire.send(line, {"kind": "left"})
                return
            else:
                raise wire.FrameError(f"a message of unknown kind {kind!r:.40}")

    def _apply(self, update: Floats, staleness: int) -> None:
        self.pushes += 1
        self.staleness += staleness
        self.max_staleness = max(self.max_staleness, staleness)
        if self._aware:
            update /= max(1, staleness)
        # By NumPy, in this thread alone: torch would start threads of its own for each of ours.
        np.subtract(self._values, update, out=self._values)


class Server:
    """Holds the parameters of a model, or a part of them, and applies what replicas push.

    It listens from the start; replicas that come are served from `serve` on. The parameters are
    those of the model then, and the model has them again when `serve` returns.

    Parameters
    ----------
    model : nn.Module
        On the CPU; a replica must have parameters of the same names and shapes.
    address : str, optional
        ``"host:port"`` of this machine, port 0 for any that is free; by default ``MASTER_ADDR`` and
        ``MASTER_PORT`` of the environment, else 127.0.0.1:29500.
    shard : (int, int)
        Which of how many parts of the parameters it holds, from 0: ``(1, 3)`` is the second of
        three servers.
    staleness_aware : bool
        Divide the learning rate of a push by its staleness, the number of pushes of others that
        came between its parameters and it [2]_; at least by 1.
    timeout_s : float
        How long it waits, while no replica is there, for one that is expected.

    Attributes
    ----------
    address : str
        Where it listens, ``"host:port"``.

    Raises
    ------
    InputError
        The address is in use or not of this machine, or another argument cannot be.

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
        total = ParameterLayout.of(model).total
        refuse([*shard_problems(shard, total), *timeout_problems(timeout_s)])
        self.model, self.shard, self.staleness_aware = model, shard, staleness_aware
        self.timeout_s = timeout_s
        self._held = Held(model, shard, staleness_aware)
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, str] = {}
        self._came = 0
        self._lost: list[str] = []
        self._refused: list[str] = []
        self._listener = wire.listen(wire.default_address() if address is None else address)
        self._listener.settimeout(ACCEPT_SECONDS)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def serve(self, replicas: int = 1) -> Served:
        """Serve, once, until so many replicas have come and all that came have left.

        More may come, in place of those that died. Where nobody is there for `timeout_s`, those
        that are still missing are waited for no longer; a replica that is there is, however long it
        takes for a step.

        Parameters
        ----------
        replicas : int
            How many are expected.

        Returns
        -------
        Served
            What was done.

        Raises
        ------
        PeerLostError
            Nobody came.
        """
        refuse(count_problems(replicas=replicas))
        self._held.take_up()
        threads: list[threading.Thread] = []
        try:
            self._accept(replicas, threads)
        finally:
            self.close()
            for thread in threads:
                thread.join()
            self._held.give_back()
        return Served(
            self._came,
            tuple(self._lost),
            tuple(self._refused),
            self._held.pushes,
            self._held.staleness / max(1, self._held.pushes),
            self._held.max_staleness,
        )

    def _accept(self, replicas: int, threads: list[threading.Thread]) -> None:
        somebody = time.monotonic()
        while True:
            with self._lock:
                present, came = len(self._lines), self._came
            if came >= replicas and not present:
                return
            if present:
                somebody = time.monotonic()
            elif time.monotonic() - somebody > self.timeout_s:
                if came:
                    return
                raise PeerLostError(
                    f"no replica came to {self.address} within {self.timeout_s:g} s. Start them "
                    "with this address, or pass a greater timeout_s"
                )
            try:
                line, place = self._listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return  # somebody called `close`
                raise
            line.settimeout(None)
            with self._lock:
                self._lines[wire.prepared(line)] = f"{place[0]}:{place[1]}"
            threads.append(threading.Thread(target=self._attend, args=(line,)))
            threads[-1].start()

    def _attend(self, line: socket.socket) -> None:
        """In a thread: serve one replica until it leaves, in whatever way."""
        ends, end = self._refused, ""
        try:
            seen = self._admit(line)
            ends = self._lost
            self._held.obey(line, seen)
        except OSError as error:
            end = f"{self._lines[line]}: {error.strerror or error}"
        finally:
            with self._lock:
                if end:
                    ends.append(end)
                del self._lines[line]
            line.close()

    def _admit(self, line: socket.socket) -> int:
        """Give a replica the parameters, unless it has another model, and wait until it begins."""
        line.settimeout(self.timeout_s)
        header, _ = wire.receive(line)
        difference = self._held.layout.difference(ParameterLayout.from_json(header.get("model")))
        if difference:
            wire.send(line, {"kind": "refused", "difference": difference})
            raise wire.FrameError(f"another model, {difference}")
        seen = self._held.give(line)
        # It may find that the servers are not all parts of one model.
        wire.receive(line)
        line.settimeout(None)
        with self._lock:
            self._came += 1
        return seen

    def close(self) -> None:
        """Listen no longer, and part from all replicas, which then raise `PeerLostError`."""
        self._listener.close()
        with self._lock:
            for line in self._lines:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
