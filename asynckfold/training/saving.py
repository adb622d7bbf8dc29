"""When a running job saves itself: whatever costs more than it protects is put off."""

from __future__ import annotations

import time
from collections.abc import Callable

EPOCH_SECONDS = 1.0
"""Least time between two checkpoints at the end of epochs: less work is cheaper to repeat."""

MIDDLE_SECONDS = 30.0
"""Time without a checkpoint after which one is written in the middle of an epoch."""

SHARE = 0.01
"""Largest share of a job's time that checkpoints take: a large model on a slow disk is saved less
often, so that 99 seconds of training stand against each second of saving."""


class Saver:
    """Saves a job, and knows how long that takes.

    Parameters
    ----------
    save : callable
        Writes a checkpoint.
    clock : callable
        Seconds, monotonic.

    Examples
    --------
    >>> now = iter([0, 10, 12, 100, 300])
    >>> saver = Saver(lambda: None, lambda: next(now))
    >>> saver.save()  # takes from 10 to 12: the next may come 200 seconds later
    >>> saver.due(EPOCH_SECONDS), saver.due(EPOCH_SECONDS)
    (False, True)
    """

    def __init__(
        self, save: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._save = save
        self._clock = clock
        self._cost = 0.0
        self._saved = clock()

    def due(self, least: float) -> bool:
        """Whether so many seconds have passed, and enough to pay for another checkpoint."""
        return self._clock() - self._saved >= max(least, self._cost / SHARE)

    def save(self) -> None:
        """Write a checkpoint."""
        started = self._clock()
        self._save()
        self._saved = self._clock()
        self._cost = self._saved - started
