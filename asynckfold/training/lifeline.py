"""A process that ends with the one that started it, also while it is busy importing.

Imported before torch, which takes seconds to import, and on a busy machine a minute: so long would
an orphan stay that looks at its pipe only afterwards.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lifeline(descriptor: int) -> Iterator[None]:
    """Exit at once, within the context, when nobody holds the other end of this socket any more."""

    def look(number: int, frame: object) -> None:
        # Also called for what arrives, which stays to be read. A second signal may interrupt the
        # first one's look, and no poll object may be waited on twice at once.
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        if poll.poll(0):
            os._exit(0)

    signal.signal(signal.SIGIO, look)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    look(signal.SIGIO, None)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, signal.SIG_IGN)
