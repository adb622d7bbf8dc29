"""A server that may start one process, as under a small limit of processes."""

from __future__ import annotations

import errno
import os

once = [os.fork]


def fork() -> int:
    if not once:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return once.pop()()


os.fork = fork
