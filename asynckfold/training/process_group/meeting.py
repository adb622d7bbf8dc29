"""How ranks of other nodes find rank 0: by TCP, with a secret that their part of the job has."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

_RANK = struct.Struct("i")
_GREETING_SECONDS, _CONNECT_SECONDS = 5.0, 30.0


def connected(host: str, port: int, secret: str, rank: int) -> tuple[Connection[Any, Any], str]:
    """Connect a rank to rank 0; return the connection, and the address of this end.

    Raises
    ------
    OSError
        Rank 0 is not there any more.
    """
    channel = socket.create_connection((host, port), _CONNECT_SECONDS)
    channel.sendall(secret.encode() + _RANK.pack(rank))
    here = str(channel.getsockname()[0])
    return _line(channel), here


def accepted(
    server: socket.socket, secret: str, timeout_s: float
) -> tuple[int, Connection[Any, Any]] | None:
    """Wait for a rank; return its number and the connection, or None if none came."""
    server.settimeout(timeout_s)
    try:
        channel, _ = server.accept()
    except TimeoutError:
        return None
    channel.settimeout(_GREETING_SECONDS)
    known, found = secret.encode(), b""
    with contextlib.suppress(OSError):
        found = channel.recv(len(known) + _RANK.size, socket.MSG_WAITALL)
    # Nothing is unpickled before: who does not know the secret is no rank.
    if len(found) < len(known) + _RANK.size or not hmac.compare_digest(found[:-4], known):
        channel.close()
        return None
    (rank,) = _RANK.unpack(found[-4:])
    return rank, _line(channel)


def _line(channel: socket.socket) -> Connection[Any, Any]:
    channel.settimeout(None)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(channel.detach())
