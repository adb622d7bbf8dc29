"""A worker's sign of life: a word of memory that it shares with the sweep's process.

Alive is who makes progress. A thread that says so would go on while the training hangs, and would
fall silent while healthy native code holds the interpreter; a word that only a finished batch
changes does neither, and costs the loop less than a microsecond.

::

    word   even: batches follow one another      odd: aside, where the next sign may take longer
           every sign makes it greater            (a start, the first batch, a checkpoint)

Two more words let a worker pause between two batches, where it holds no lock and owes no message:
the sweep asks in one, and in the other the worker says that it does. A stopped process (SIGSTOP)
may have half an answer in its pipe, for which the sweep would wait.
"""

from __future__ import annotations

import mmap
import signal
import time
from collections.abc import Callable

STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Asks a silent worker for the stacks of its threads; SIGUSR1 and SIGUSR2 are left to the user."""

PAUSE_SECONDS = 0.1
"""Between two looks of a paused worker at whether it may go on."""

_SIGN, _ASKED, _PAUSED = range(3)
_WORDS, _BYTES = 3, 8


class Heartbeat:
    """The words of one worker; the sign of life it alone writes while it works.

    Parameters
    ----------
    words : memoryview, optional
        Unsigned numbers of 8 bytes; of its own where nobody looks, as in the serial engine.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        self._word = memoryview(bytearray(_WORDS * _BYTES)).cast("Q") if words is None else words

    @property
    def value(self) -> int:
        """The word as it is now."""
        return int(self._word[_SIGN])

    def beat(self) -> None:
        """Say that a batch is finished."""
        word = self._word[_SIGN]
        self._word[_SIGN] = word + 2 - word % 2

    def aside(self) -> None:
        """Say that something begins that is no batch, or whose first batch may take long."""
        word = self._word[_SIGN]
        self._word[_SIGN] = word + 1 + word % 2

    def ask(self, pause: bool) -> None:
        """Ask the worker to pause after its batch, or to go on."""
        self._word[_ASKED] = pause

    @property
    def asked(self) -> bool:
        """Whether the worker is asked to pause."""
        return bool(self._word[_ASKED])

    @property
    def paused(self) -> bool:
        """Whether the worker pauses as it is asked to; no longer once it is asked to go on."""
        return bool(self._word[_ASKED] and self._word[_PAUSED])

    def rest(self, stop: Callable[[], bool]) -> None:
        """Pause, in the worker, for as long as that is asked for and it is not asked to stop."""
        while self._word[_ASKED] and not stop():
            self._word[_PAUSED] = 1
            time.sleep(PAUSE_SECONDS)
        self._word[_PAUSED] = 0


def is_aside(value: int) -> bool:
    """Whether the worker whose word has this value does something else than batch after batch."""
    return value % 2 == 1


class Heartbeats:
    """The words of many workers, in a file without a name that all of them map.

    Parameters
    ----------
    descriptor : int
        Of the file; may be closed afterwards.
    """

    COUNT = 1 << 12
    """Words; a pool that starts more workers in its life uses those of the first ones again."""

    SIZE = COUNT * _WORDS * _BYTES
    """Bytes of the file; the kernel gives memory only to the pages that are written."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, self.SIZE)).cast("Q")

    def __getitem__(self, worker: int) -> Heartbeat:
        """Return the heartbeat of the worker of that name."""
        place = worker % self.COUNT * _WORDS
        return Heartbeat(self._words[place : place + _WORDS])
