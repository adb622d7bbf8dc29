"""A server that may start no process, as under a small limit of processes."""

from __future__ import annotations

import errno
import os


def fork() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


os.fork = fork
