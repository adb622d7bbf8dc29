"""Files without a name, and how open files travel to another process.

`multiprocessing.reduction` sends a descriptor as well, but needs a further one on both sides after
its message is on the way: where a process may open no more, the two sides then wait for each other.
Here that fails before anything is sent, and the receiver always reads what was.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any


def nameless_file(data: bytes = b"", size: int | None = None) -> int:
    """Return the descriptor of a file without a name: nothing of it stays when its users end.

    Parameters
    ----------
    data : bytes
        What it begins with.
    size : int, optional
        Bytes in all, zero after `data`; the length of `data` where it is left out.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("asynckfold", os.MFD_CLOEXEC)
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
        file.truncate(len(data) if size is None else size)
    return descriptor


def send(pipe: Connection[Any, Any], message: object, descriptors: Sequence[int]) -> None:
    """Send a message, then open files, at least one.

    Raises
    ------
    OSError
        The other side is gone; or, with ``EMFILE`` or ``ENFILE``, no further file can be opened
        here, and nothing was sent.
    """
    with as_socket(pipe) as channel:
        pipe.send(message)
        socket.send_fds(channel, [b"\0"], list(descriptors))


def receive(pipe: Connection[Any, Any], count: int) -> list[int]:
    """Return the open files that follow a message.

    Raises
    ------
    OSError
        With ``EMFILE`` or ``ENFILE``: they cannot be opened here, and are let go of.
    """
    try:
        channel = as_socket(pipe)
    except OSError:
        os.read(pipe.fileno(), 1)
        raise
    with channel:
        _, found, _, _ = socket.recv_fds(channel, 1, count)
    if len(found) < count:
        for descriptor in found:
            os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return found


def as_socket(pipe: Connection[Any, Any]) -> socket.socket:
    """Return another hold on a pipe of two directions, to be closed by itself."""
    channel = socket.socket(fileno=os.dup(pipe.fileno()))
    # A program may have set a timeout for all its sockets.
    channel.settimeout(None)
    return channel
