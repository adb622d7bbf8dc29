"""What a node tells the driver: events in groups, and with each group a load, not always new."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Any

from asynckfold.jobs.messages import EpochEnded, Progress, Started
from asynckfold.jobs.placement import Load

GATHER_SECONDS = 0.02
"""How long events wait for others: each answer to `poll` costs both processes some milliseconds."""

LOAD_SECONDS = 0.1
"""How old a load may be: to read it costs more than to send events."""


class RecentLoad:
    """The load of a node, read again when it is old, or when something else runs."""

    def __init__(
        self, read: Callable[[], Load], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._known: tuple[float, object, Load] | None = None

    def get(self, running: object) -> Load:
        """Return the load; `running` is what runs, and where."""
        now = self._clock()
        if self._known is not None:
            since, same, load = self._known
            if same == running and now - since <= LOAD_SECONDS:
                return load
        load = self._read()
        self._known = now, running, load
        return load


def gathered(waiting: queue.SimpleQueue[tuple[Any, ...]], seconds: float) -> list[tuple[Any, ...]]:
    """Return what is waiting, or arrives within `seconds`; events wait for others a little."""
    found: list[tuple[Any, ...]] = []
    with contextlib.suppress(queue.Empty):
        found.append(waiting.get(timeout=seconds))
        end = time.monotonic() + GATHER_SECONDS
        while True:
            left = end - time.monotonic() if all(map(_can_wait, found)) else 0.0
            found.append(waiting.get(timeout=left) if left > 0 else waiting.get_nowait())
    return [message for message in found if message]


def _can_wait(message: tuple[Any, ...]) -> bool:
    """Whether nobody waits for a message, neither a core nor another process."""
    return message[:1] == ("event",) and isinstance(message[1], (Started, Progress, EpochEnded))
