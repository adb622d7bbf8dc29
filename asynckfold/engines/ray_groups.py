"""Events of a node travel to the driver in groups."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

from asynckfold.jobs.messages import EpochEnded, Progress, Started

GATHER_SECONDS = 0.02
"""How long events wait for others: each answer to `poll` costs both processes some milliseconds."""


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
