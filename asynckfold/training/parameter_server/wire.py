"""Commands and numbers over TCP: lines of text, raw bytes of a known length; no pickle.

In a torch process group, whose store all ranks reach, the store holds the server's address. The
group itself carries nothing: see the package on why replicas use plain TCP.

::

    server ──► a line of JSON: shapes, dtype, shard ─ numbers         replica: compares its model
    server ◄── "begin" … "push" ─ numbers … "pull" … "leave"
           ──►                              numbers      "left"
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asynckfold.errors import InputError, PeerLostError
from asynckfold.system import terminal

LINE_LIMIT = 16 << 20
"""Bytes; names and shapes of a model with a hundred thousand tensors take less."""

RETRY_SECONDS = 0.1
"""Between two attempts to connect."""

KEY = "asynckfold/parameter_server"

_served: list[Any] = []
"""The process group that a server of this process has served."""

_TCP_OPTIONS = {
    # Small messages are sent at once.
    socket.TCP_NODELAY: 1,
    # A peer whose machine vanished is detected after a minute of silence; for one whose process
    # ended, the kernel closes the connection at once.
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}


class Wire:
    """A connection between a server and a replica. Its methods raise `OSError` when it is lost."""

    def __init__(self, line: socket.socket, timeout_s: float) -> None:
        self._line, self._file = line, line.makefile("rb")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS.items():
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        self.limit(timeout_s)

    def limit(self, timeout_s: float | None) -> None:
        """Set how long to wait for the other side."""
        self._line.settimeout(timeout_s)

    def send(self, text: str, numbers: memoryview | None = None) -> None:
        """Send a line of text, and numbers after it."""
        self._line.sendall(f"{text}\n".encode())
        if numbers is not None:
            self._line.sendall(numbers)

    def receive(self) -> str:
        """Return the next line."""
        text = self._file.readline(LINE_LIMIT)
        if not text.endswith(b"\n"):
            raise ConnectionError("the other side closed the connection, or is something else")
        return text[:-1].decode(errors="replace")

    def fill(self, room: memoryview) -> None:
        """Receive as many bytes as `room` holds."""
        if self._file.readinto(room) < room.nbytes:
            raise ConnectionError("the other side closed the connection")

    def shut(self) -> None:
        """Disconnect; a thread that waits for the other side is woken."""
        self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._line.close()


def parse(address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"``."""
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


def connect(address: str, timeout_s: float) -> Wire:
    """Return a connection to an address; retry for `timeout_s`, then raise `PeerLostError`."""
    host, port = parse(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.01)
            return Wire(socket.create_connection((host, port), left), timeout_s)
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise PeerLostError(
                    f"no parameter server answered at {address} within {timeout_s:g} s "
                    f"({error.strerror or error}). Start it, correct the address, or pass a "
                    "greater timeout_s"
                ) from error
        time.sleep(RETRY_SECONDS)


def has_group() -> bool:
    """Whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def default_address() -> str:
    """Return torchrun's ``MASTER_ADDR:MASTER_PORT``, else torch's default port on this machine.

    In a group, whose store has that port, any port that is free.
    """
    port = "0" if has_group() else os.environ.get("MASTER_PORT", "29500")
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"


@contextlib.contextmanager
def published(address: str) -> Iterator[int]:
    """Tell the other ranks the address of the server; yield how many they are."""
    store, mine = _store("Server.run"), f"{dist.get_rank()} {address}"
    published_by = store.compare_set(KEY, "", mine).decode()
    if published_by != mine:
        raise InputError.one(
            "one rank of a process group is the server",
            f"rank {mine.split()[0]} while rank {published_by.split()[0]} serves",
            "Call Server.run on rank 0 only, and make a Hogwild on the other ranks.",
        )
    try:
        yield dist.get_world_size() - 1
    finally:
        _served[:] = [dist.group.WORLD]
        with contextlib.suppress(RuntimeError):
            store.delete_key(KEY)


def server_address(timeout_s: float) -> str:
    """Return the address that the group's server published; wait up to `timeout_s` for it."""
    if _served and _served[0] is dist.group.WORLD:
        # A script whose server never returns makes its optimizer below, on every rank.
        terminal.complain("this rank has served until the replicas left; it ends here")
        raise SystemExit(0)
    store = _store("Hogwild without an address")
    try:
        store.wait([KEY], timedelta(seconds=timeout_s))
        return str(store.get(KEY).decode().partition(" ")[2])
    except RuntimeError as error:
        raise PeerLostError(
            f"no rank of the process group serves within {timeout_s:g} s: is Server(model).run() "
            "called on rank 0, and does its process still run? Call it, or pass a greater timeout_s"
        ) from error


def _store(caller: str) -> Any:
    """Return the store of the process group; refuse none, and one without another rank."""
    size = dist.get_world_size() if has_group() else 0
    if size < 2:
        raise InputError.one(
            f"{caller} needs a torch process group with a server and at least one replica",
            f"a world size of {size}" if size else "none in this process",
            "Call torch.distributed.init_process_group on two or more ranks first, or Server.serve "
            "with the number of replicas.",
        )
    return dist.distributed_c10d._get_default_store()
