"""Anonymous files, and sending open files to another process.

`multiprocessing.reduction` needs a further descriptor on both sides after its message is sent: at
the limit of open files both sides then wait for each other. Here that fails before anything is
sent.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any


def nameless_file(data: bytes = b"", size: int | None = None) -> int:
    """Return the descriptor of an anonymous file with this content, zero-filled up to `size`."""
    descriptor = os.memfd_create("asynckfold", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
        file.truncate(len(data) if size is None else size)
    return descriptor


def send(pipe: Connection[Any, Any], message: object, descriptors: Sequence[int]) -> None:
    """Send a message, then at least one open file.

    Raises
    ------
    OSError
        The other side is gone; with ``EMFILE`` or ``ENFILE``, nothing was sent.
    """
    with as_socket(pipe) as channel:
        pipe.send(message)
        socket.send_fds(channel, [b"\0"], list(descriptors))


def receive(pipe: Connection[Any, Any], count: int) -> list[int]:
    """Return the open files that follow a message.

    Raises
    ------
    OSError
        With ``EMFILE`` or ``ENFILE``: they cannot be opened here and were closed.
    """
    try:
        channel = as_socket(pipe)
    except OSError:
        os.read(pipe.fileno(), 1)
        raise
    with channel:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, count)
    if len(descriptors) < count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptors


def as_socket(pipe: Connection[Any, Any]) -> socket.socket:
    """Return a socket that duplicates a duplex pipe, to be closed separately."""
    channel = socket.socket(fileno=os.dup(pipe.fileno()))
    # A program may have set a timeout for all its sockets.
    channel.settimeout(None)
    return channel
