"""The server: holds parameters, and applies the pushes of replicas."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass

import numpy as np
from torch import nn

from asynckfold.errors import InputError, PeerLostError
from asynckfold.training.parameter_server.flat_parameters import (
    Floats,
    ParameterLayout,
    ServedParameters,
    as_bytes,
    refuse_counts,
)
from asynckfold.training.parameter_server.wire import Wire, default_address, listen, published
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
        self._layout = ParameterLayout.of(model)
        index, count = shard
        if not 0 <= index < count <= self._layout.total:
            raise InputError.one(
                "shard must be (index, count), index from 0 to count - 1, and each part must have "
                f"one of the model's {self._layout.total} numbers",
                repr(shard),
                "Pass (0, 2) for the first of two servers.",
            )
        self.model, self.shard, self.staleness_aware = model, shard, staleness_aware
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._wires: set[Wire] = set()
        self._came = 0
        self._lost: list[str] = []
        self._refused: list[str] = []
        self._listener = listen(default_address() if address is None else address)
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
        with self, published(self.address) as replicas:
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
        refuse_counts(replicas=replicas)
        part, vector = self._layout.part(*self.shard), self._layout.vector(self.model)
        values, counts = vector.numpy()[part], np.zeros(3, np.int64)
        served = ServedParameters(values, counts, threading.Lock(), self.staleness_aware)
        threads: list[threading.Thread] = []
        try:
            self._accept(replicas, served, threads)
        finally:
            self.close()
            for thread in threads:
                thread.join()
            copy_each(self.model.parameters(), self._layout.views(vector))
        pushes, staleness, most = counts.tolist()
        mean = staleness / max(1, pushes)
        return ServerSummary(
            self._came, tuple(self._lost), tuple(self._refused), pushes, mean, most
        )

    def _accept(
        self, replicas: int, served: ServedParameters, threads: list[threading.Thread]
    ) -> None:
        last_seen = time.monotonic()
        while True:
            with self._lock:
                present, came = len(self._wires), self._came
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
                line, (host, port, *_) = self._listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return  # `close` was called
                raise
            wire = Wire(line, self.timeout_s)
            with self._lock:
                self._wires.add(wire)
            place = f"{host}:{port}"
            threads.append(threading.Thread(target=self._attend, args=(wire, place, served)))
            threads[-1].start()

    def _attend(self, wire: Wire, place: str, served: ServedParameters) -> None:
        """Serve one replica in a thread until it leaves or is lost."""
        ends, end = self._refused, ""
        room = np.empty_like(served.values)
        try:
            wire.send(json.dumps([self.shard, self._layout.entries()]))
            seen = self._give(wire, served, room)
            # The replica may have another model, or miss a part of it.
            if wire.receive() != "begin":
                raise ConnectionError("it is no replica")
            wire.limit(None)
            with self._lock:
                self._came += 1
            ends = self._lost
            while (command := wire.receive()) != "leave":
                if command == "push":
                    wire.fill(as_bytes(room))
                    served.push(room, seen)
                    # The replica has moved its parameters too.
                    seen += 1
                elif command == "pull":
                    seen = self._give(wire, served, room)
                else:
                    raise ConnectionError(f"it sent {command!r:.40}")
            wire.send("left")
        except OSError as error:
            end = f"{place}: {error.strerror or error}"
        finally:
            with self._lock:
                if end:
                    ends.append(end)
                self._wires.remove(wire)
            wire.close()

    @staticmethod
    def _give(wire: Wire, served: ServedParameters, room: Floats) -> int:
        """Send the parameters, through a buffer; return how many pushes are in them."""
        seen = served.fetch(room)
        wire.send("values", as_bytes(room))
        return seen

    def close(self) -> None:
        """Stop listening, and disconnect all replicas, which then raise `PeerLostError`."""
        self._listener.close()
        with self._lock:
            for wire in self._wires:
                with contextlib.suppress(OSError):
                    wire.shut()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
