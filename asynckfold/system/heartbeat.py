"""Heartbeats: words of memory that a worker shares with the sweep's process.

A worker is alive if it makes progress. A heartbeat thread would go on while the training hangs and
would stop while healthy native code holds the interpreter. A word that changes with each finished
batch does neither, and costs the loop less than a microsecond.

::

    word   even: batch after batch        odd: a long phase, which may exceed the batch timeout
           every heartbeat increases it   (a start, the first batch, a checkpoint)

Two more words let a worker pause between two batches, where it holds no lock and has no message
half sent, unlike a process stopped by SIGSTOP: the sweep requests the pause in one, the worker
confirms it in the other.
"""

from __future__ import annotations

import mmap
import signal
import time
from collections.abc import Callable

STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Requests the stacks of all threads; SIGUSR1 and SIGUSR2 are left to the user."""

PAUSE_SECONDS = 0.1
"""Polling interval of a paused worker."""

_BEAT, _PAUSE, _PAUSED = range(3)
_WORDS, _BYTES = 3, 8


class Heartbeat:
    """The words of one worker; private ones by default, for the serial engine."""

    def __init__(self, words: memoryview | None = None) -> None:
        self._word = memoryview(bytearray(_WORDS * _BYTES)).cast("Q") if words is None else words

    @property
    def value(self) -> int:
        """The present value of the heartbeat."""
        return int(self._word[_BEAT])

    def beat(self) -> None:
        """Mark a finished batch."""
        word = self._word[_BEAT]
        self._word[_BEAT] = word + 2 - word % 2

    def begin_long_phase(self) -> None:
        """Mark a phase that may exceed the batch timeout."""
        word = self._word[_BEAT]
        self._word[_BEAT] = word + 1 + word % 2

    def ask(self, pause: bool) -> None:
        """Request a pause after the present batch, or its end."""
        self._word[_PAUSE] = pause

    @property
    def pause_requested(self) -> bool:
        """Whether a pause is requested."""
        return bool(self._word[_PAUSE])

    @property
    def paused(self) -> bool:
        """Whether the worker is in a requested pause."""
        return bool(self._word[_PAUSE] and self._word[_PAUSED])

    def rest(self, stop: Callable[[], bool]) -> None:
        """Pause, in the worker, while that is requested and `stop` is not."""
        while self._word[_PAUSE] and not stop():
            self._word[_PAUSED] = 1
            time.sleep(PAUSE_SECONDS)
        self._word[_PAUSED] = 0


def in_long_phase(value: int) -> bool:
    """Whether a heartbeat of this value marks a phase that may exceed the batch timeout."""
    return value % 2 == 1


class Heartbeats:
    """The heartbeats of all workers, in an anonymous file, whose descriptor may be closed."""

    COUNT = 1 << 12
    """Number of heartbeats; later workers of a pool reuse those of the first ones."""

    SIZE = COUNT * _WORDS * _BYTES
    """Bytes of the file; only written pages take memory."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, self.SIZE)).cast("Q")

    def __getitem__(self, worker: int) -> Heartbeat:
        """Return the heartbeat of a worker, by its number."""
        place = worker % self.COUNT * _WORDS
        return Heartbeat(self._words[place : place + _WORDS])
