"""A server that may start one process after another, as under a small limit of processes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

server, fork_anyway, forked = os.getpid(), os.fork, [0]


def fork() -> int:
    if os.getpid() != server:
        return fork_anyway()
    # One that ended counts until it is reaped.
    if forked[-1] and Path(f"/proc/{forked[-1]}").exists():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    forked.append(fork_anyway())
    return forked[-1]


os.fork = fork
