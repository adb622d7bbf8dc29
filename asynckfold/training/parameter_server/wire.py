"""Messages with numbers over TCP: a JSON header, then raw bytes; no pickle.

::

    magic │ length of header │ length of payload │ header: a JSON object │ payload: raw numbers
      4            4                  8

The receiver knows the length of the payload before it allocates memory for it; the network only
decides the size of the header, which has a limit.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from asynckfold.errors import InputError, PeerLostError

HEADER_LIMIT = 16 << 20
"""Bytes; names and shapes of a model with a hundred thousand tensors take less."""

RETRY_SECONDS = 0.1
"""Between two attempts to connect."""

KEEPALIVE_SECONDS, KEEPALIVE_EVERY_SECONDS, KEEPALIVES = 30, 10, 3
"""A peer whose machine vanished is detected after a minute of silence; for one whose process ended,
the kernel closes the connection at once."""

_MAGIC = b"AKF1"
_START = struct.Struct("!4sIQ")


class FrameError(ConnectionError):
    """An invalid message, or a connection that ended within one."""


def default_address() -> str:
    """Return torchrun's ``MASTER_ADDR:MASTER_PORT``, else torch's default port on this machine."""
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"


def parse(address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"``.

    Examples
    --------
    >>> parse("10.0.0.5:29500"), parse("[::1]:0")
    (('10.0.0.5', 29500), ('::1', 0))
    """
    host, _, port = str(address).rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        rule = "an address must be host:port, with a port from 0 to 65535"
        raise InputError.one(rule, repr(address), "Write for instance '127.0.0.1:29500'.")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at an address; port 0 is any that is free."""
    host, port = parse(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InputError.one(
            "a server needs an address of this machine with a free port",
            f"{address} ({error.strerror or error})",
            "Pass another port, or port 0 for any that is free.",
        ) from error


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to an address; retry for `timeout_s`, then raise `PeerLostError`."""
    host, port = parse(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            line = socket.create_connection((host, port), max(deadline - time.monotonic(), 0.01))
            # Without a listener, an ephemeral port may connect to itself.
            if line.getsockname() != line.getpeername():
                line.settimeout(timeout_s)
                return prepared(line)
            line.close()
            error = OSError("no listener")
        except OSError as caught:
            error = caught
        if time.monotonic() + RETRY_SECONDS >= deadline:
            raise PeerLostError(
                f"no parameter server answered at {address} within {timeout_s:g} s "
                f"({error.strerror or error}). Start it, correct the address, or pass a greater "
                "timeout_s"
            ) from error
        time.sleep(RETRY_SECONDS)


def prepared(line: socket.socket) -> socket.socket:
    """Send small messages at once, and detect a peer whose machine vanished."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
    seconds = KEEPALIVE_SECONDS + KEEPALIVE_EVERY_SECONDS * KEEPALIVES
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
    return line


def send(line: socket.socket, header: Mapping[str, Any], payload: memoryview | None = None) -> None:
    """Send a message."""
    text = json.dumps(header).encode()
    size = 0 if payload is None else payload.nbytes
    line.sendall(_START.pack(_MAGIC, len(text), size) + text)
    if payload is not None:
        line.sendall(payload)


def receive(line: socket.socket) -> tuple[dict[str, Any], int]:
    """Return the header of the next message, and the length of its payload.

    Raises
    ------
    OSError
        The connection ended or timed out, or the message is invalid (`FrameError`).
    """
    start = bytearray(_START.size)
    fill(line, memoryview(start))
    magic, length, size = _START.unpack(start)
    if magic != _MAGIC or length > HEADER_LIMIT:
        raise FrameError("the data received is not a message of a parameter server or its replica")
    text = bytearray(length)
    fill(line, memoryview(text))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("a header is not a JSON object")
    return header, size


def fill(line: socket.socket, room: memoryview, size: int | None = None) -> None:
    """Receive as many bytes as `room` holds; an announced `size` must be equal."""
    if size is not None and size != room.nbytes:
        raise FrameError(f"a message announces {size} bytes where {room.nbytes} belong")
    while room.nbytes:
        count = line.recv_into(room)
        if not count:
            raise FrameError("the other side closed the connection")
        room = room[count:]
