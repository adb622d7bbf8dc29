"""How ranks of other nodes find rank 0: by TCP, with a secret that their part of the job has."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.placement import Span

JOIN_TIMEOUT = timedelta(minutes=5)
"""Longest wait for another rank that lives."""

_NUMBER = struct.Struct("i")
_GREETING_SECONDS, _CONNECT_SECONDS, _LOOK_SECONDS = 5.0, 30.0, 0.1


class StoppedBeforeMeeting(Exception):  # noqa: N818
    """The job shall end while its ranks meet."""


@dataclass(eq=False)
class Rendezvous:
    """Where rank 0 waits for connections of other nodes.

    ``announce`` tells the driver the ports, which then starts the other nodes; ``stop`` says
    whether the job shall end.
    """

    span: Span
    announce: Callable[[tuple[int, ...]], None]
    stop: Callable[[], bool]
    server: socket.socket | None = None

    def open(self, connections: int, *ports: int) -> None:
        """Listen, and announce that with further ports."""
        self.server = socket.create_server((self.span.host, 0), backlog=connections)
        self.announce((self.server.getsockname()[1], *ports))

    def arrivals(
        self, numbers: Iterable[int], on_wait: Callable[[], None]
    ) -> Iterator[tuple[int, socket.socket]]:
        """Yield the connections of these numbers as they come, and stop listening.

        `on_wait` is called every 0.1 s.

        Raises
        ------
        StoppedBeforeMeeting
            `stop` said so.
        WorkerDiedError
            Not all came in time.
        """
        assert self.server is not None
        awaited, end = {*numbers}, time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while awaited:
            if self.stop():
                raise StoppedBeforeMeeting
            if time.monotonic() > end:
                text = f"{len(awaited)} connections of ranks on other nodes did not come"
                raise WorkerDiedError(os.getpid(), text)
            on_wait()
            found = accepted(self.server, self.span.secret, _LOOK_SECONDS)
            if found is not None and found[0] in awaited:
                awaited.discard(found[0])
                yield found
        self.close()

    def close(self) -> None:
        """Stop listening."""
        if self.server is not None:
            self.server.close()


def connected(host: str, port: int, secret: str, number: int) -> socket.socket:
    """Connect to rank 0, and tell the number of the connection.

    Raises
    ------
    OSError
        Rank 0 is not there any more.
    """
    channel = socket.create_connection((host, port), _CONNECT_SECONDS)
    channel.sendall(secret.encode() + _NUMBER.pack(number))
    return _prepared(channel)


def accepted(
    server: socket.socket, secret: str, timeout_s: float
) -> tuple[int, socket.socket] | None:
    """Wait for a connection; return its number and itself, or None if none came."""
    server.settimeout(timeout_s)
    try:
        channel, _ = server.accept()
    except TimeoutError:
        return None
    channel.settimeout(_GREETING_SECONDS)
    known, found = secret.encode(), b""
    with contextlib.suppress(OSError):
        found = channel.recv(len(known) + _NUMBER.size, socket.MSG_WAITALL)
    # Nothing is unpickled before: who does not know the secret is no rank.
    if len(found) < len(known) + _NUMBER.size or not hmac.compare_digest(found[:-4], known):
        channel.close()
        return None
    (number,) = _NUMBER.unpack(found[-4:])
    return number, _prepared(channel)


def pipe_of(channel: socket.socket) -> Connection[Any, Any]:
    """Return a connection as the pipe by which a rank obeys."""
    return Connection(channel.detach())


def _prepared(channel: socket.socket) -> socket.socket:
    channel.settimeout(None)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return channel
