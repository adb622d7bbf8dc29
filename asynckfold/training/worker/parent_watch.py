"""A process that ends with the one that started it, also while it is busy importing.

Imported before torch, which takes seconds to import, and on a busy machine a minute: so long would
an orphan stay that looks at its pipe only afterwards.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def lifeline(descriptor: int) -> Iterator[None]:
    """Exit at once, within the context, when nobody holds the other end of this socket any more.

    A thread waits for that, which is gone when the context is left: nothing that is forked
    afterwards inherits it. (A signal for whatever arrives could interrupt its own handler, and a
    flood of them nested until Python gave up.)
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
            # Where no thread can be started, whoever comes after looks at the socket itself.
            thread.start()
        yield
    finally:
        os.close(leave)
        if thread.ident is not None:
            thread.join()
        os.close(left)
