"""End a process with its parent, even while it is busy importing.

Imported before torch: its import takes seconds, on a busy machine a minute, and an orphan that
looks at its pipe only afterwards would stay that long.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def exit_with_parent(descriptor: int) -> Iterator[None]:
    """Within the context, exit as soon as the other end of this socket is closed.

    A thread waits for that, and ends with the context: processes forked later inherit nothing. (A
    signal for incoming data could interrupt its own handler; a flood of them nested until Python
    gave up.)
    """
    left, leave = os.pipe()
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.register(left, 0)

    def watch() -> None:
        if left not in dict(poll.poll()):
            os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    try:
        with suppress(RuntimeError):
            # If no thread can be started, the server notices later, when it reads the socket.
            thread.start()
        yield
    finally:
        os.close(leave)
        if thread.ident is not None:
            thread.join()
        os.close(left)
