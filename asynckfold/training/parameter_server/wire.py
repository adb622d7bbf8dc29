"""Messages with numbers over TCP: a header as JSON, then raw bytes. Nothing is ever unpickled.

::

    magic │ length of header │ length of payload │ header: a JSON object │ payload: raw numbers
      4            4                  8

Whoever receives knows how long a payload it wants, before it makes room for one: what comes from
the network decides about no allocation but that of the header, which has a limit.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from asynckfold.errors import InputError, PeerLostError, Problem

HEADER_LIMIT = 16 << 20
"""Bytes: the names and shapes of a model with a hundred thousand tensors take less."""

RETRY_SECONDS = 0.1
"""Between two attempts to reach an address that does not answer yet."""

KEEPALIVE_SECONDS, KEEPALIVE_EVERY_SECONDS, KEEPALIVES = 30, 10, 3
"""A peer whose machine vanished is found out after a minute of silence, however long it computes;
one whose process ended is told at once by its kernel."""

_MAGIC = b"AKF1"
_START = struct.Struct("!4sIQ")


class FrameError(ConnectionError):
    """What came is no message of ours, or the connection ended within one."""


def default_address() -> str:
    """Return where a server and its replicas meet that are told nothing: where torchrun says.

    ``MASTER_ADDR`` and ``MASTER_PORT`` of the environment; without them, torch's own port on this
    machine.
    """
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"


def parse(address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"``.

    Raises
    ------
    InputError
        It is not such an address.

    Examples
    --------
    >>> parse("10.0.0.5:29500"), parse("[::1]:0")
    (('10.0.0.5', 29500), ('::1', 0))
    """
    host, _, port = str(address).rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InputError(
            [
                Problem(
                    "an address must be host:port, with a port from 0 to 65535",
                    repr(address),
                    "Write for instance '127.0.0.1:29500'.",
                )
            ]
        )
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at an address; port 0 is any that is free.

    Raises
    ------
    InputError
        The port is in use, or the address is not one of this machine.
    """
    host, port = parse(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InputError(
            [
                Problem(
                    "a server needs an address of this machine with a free port",
                    f"{address} ({error.strerror or error})",
                    "Pass another port, or port 0 for any that is free.",
                )
            ]
        ) from error


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to an address that may begin to answer only within `timeout_s`.

    Raises
    ------
    InputError
        It is not an address.
    PeerLostError
        Nobody answered in time.
    """
    host, port = parse(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            line = socket.create_connection((host, port), max(deadline - time.monotonic(), 0.01))
            # Without a listener, a port that the kernel gave out may be connected to itself.
            if line.getsockname() != line.getpeername():
                line.settimeout(timeout_s)
                return prepared(line)
            line.close()
            error = OSError("nobody listens")
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
    """Send small messages at once, and find out a peer whose machine vanished."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
    seconds = KEEPALIVE_SECONDS + KEEPALIVE_EVERY_SECONDS * KEEPALIVES
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
    return line


def send(line: socket.socket, header: Mapping[str, Any], payload: memoryview | None = None) -> None:
    """Send a message.

    Raises
    ------
    OSError
        The connection ended, or took nothing for longer than its timeout.
    """
    text = json.dumps(header).encode()
    size = 0 if payload is None else payload.nbytes
    line.sendall(_START.pack(_MAGIC, len(text), size) + text)
    if payload is not None:
        line.sendall(payload)


def receive(line: socket.socket) -> tuple[dict[str, Any], int]:
    """Return the header of the next message, and how long the payload is that follows.

    Raises
    ------
    OSError
        The connection ended, was silent for longer than its timeout, or what came is no message
        (`FrameError`).
    """
    start = bytearray(_START.size)
    fill(line, memoryview(start))
    magic, length, size = _START.unpack(start)
    if magic != _MAGIC or length > HEADER_LIMIT:
        raise FrameError("what came is no message of a parameter server or its replica")
    text = bytearray(length)
    fill(line, memoryview(text))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("a header is no JSON object")
    return header, size


def fill(line: socket.socket, room: memoryview, size: int | None = None) -> None:
    """Receive exactly as many bytes as there is room for; `size` is what was announced.

    Raises
    ------
    OSError
        As `receive`; `FrameError` where another number of bytes was announced.
    """
    if size is not None and size != room.nbytes:
        raise FrameError(f"a message announces {size} bytes where {room.nbytes} belong")
    while room.nbytes:
        count = line.recv_into(room)
        if not count:
            raise FrameError("the other side closed the connection")
        room = room[count:]
