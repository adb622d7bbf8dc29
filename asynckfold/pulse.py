"""A worker's sign of life: one word of memory that it shares with the sweep's process.

Alive is who makes progress. A thread that says so would go on while the training hangs, and would
fall silent while healthy native code holds the interpreter; a word that only a finished batch
changes does neither, and costs the loop less than a microsecond.

::

    word   even: batches follow one another      odd: aside, where the next sign may take longer
           every sign makes it greater            (a start, the first batch, a checkpoint)
"""

from __future__ import annotations

import mmap
import signal

STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Asks a silent worker for the stacks of its threads; SIGUSR1 and SIGUSR2 are left to the user."""

_BYTES = 8


class Pulse:
    """The word of one worker, which it alone writes while it works.

    Parameters
    ----------
    word : memoryview, optional
        One unsigned number of 8 bytes; of its own where nobody looks, as in the serial engine.
    """

    def __init__(self, word: memoryview | None = None) -> None:
        self._word = memoryview(bytearray(_BYTES)).cast("Q") if word is None else word

    @property
    def value(self) -> int:
        """The word as it is now."""
        return int(self._word[0])

    def beat(self) -> None:
        """Say that a batch is finished."""
        word = self._word[0]
        self._word[0] = word + 2 - word % 2

    def aside(self) -> None:
        """Say that something begins that is no batch, or whose first batch may take long."""
        word = self._word[0]
        self._word[0] = word + 1 + word % 2


def is_aside(value: int) -> bool:
    """Whether the worker whose word has this value does something else than batch after batch."""
    return value % 2 == 1


class Pulses:
    """The words of many workers, in a file without a name that all of them map.

    Parameters
    ----------
    descriptor : int
        Of the file; may be closed afterwards.
    """

    COUNT = 1 << 12
    """Words; a pool that starts more workers in its life uses those of the first ones again."""

    SIZE = COUNT * _BYTES
    """Bytes of the file; the kernel gives memory only to the pages that are written."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, self.SIZE)).cast("Q")

    def __getitem__(self, worker: int) -> Pulse:
        """Return the pulse of the worker of that name."""
        place = worker % self.COUNT
        return Pulse(self._words[place : place + 1])
