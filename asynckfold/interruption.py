"""Signals that ask a run to end: raised where nothing is lost, only noted where something is made.

::

    first    noted ──► the sweep lets running jobs save themselves, writes, and raises
    second   noted ──► the engine stops waiting for them and kills them

An exception that a signal raises may strike between any two instructions: between a row and its
checksum, or in a library's lock. So while workers run and the store is written, signals are noted,
and whoever waits looks at them. Elsewhere (reading the data, building a report) they raise at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from asynckfold.errors import InterruptedRunError

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a batch system, a closed terminal."""

_UNTOUCHED = {signal.SIGINT: signal.default_int_handler}
"""What Python itself installs; a program that sets anything else meant it."""


class Interruption:
    """What the signals of one call asked for; itself the handler of these signals."""

    def __init__(self) -> None:
        self.count = 0
        self._first = 0
        self._raises_from: int | None = 1

    def __call__(self, number: int, frame: object) -> None:
        """Take a signal."""
        self.count += 1
        self._first = self._first or number
        if self._raises_from is not None and self.count >= self._raises_from:
            # What this unwinds is not struck a second time.
            self._raises_from = None
            raise self._error()

    def asked(self) -> bool:
        """Whether the run should end."""
        return self.count > 0

    def urgent(self) -> bool:
        """Whether it was asked again, and should end at once."""
        return self.count > 1

    def check(self) -> None:
        """Raise if the run should end; called where everything is consistent.

        Raises
        ------
        InterruptedRunError
            With the exit code of the first signal.
        """
        if self.asked():
            raise self._error()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Only note what comes in here, and after it while an interruption unwinds the call."""
        before, self._raises_from = self._raises_from, None
        try:
            yield
        finally:
            if not self.count:
                self._raises_from = before

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Let the second signal raise: around user code, which does not look at the first."""
        before, self._raises_from = self._raises_from, 2
        try:
            if self.urgent():
                raise self._error()
            yield
        finally:
            self._raises_from = before

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Forget what was asked, and raise at what comes: for what follows an interruption."""
        self.count, self._raises_from = 0, 1
        try:
            yield
        finally:
            self._raises_from = None

    def _error(self) -> InterruptedRunError:
        name = signal.Signals(self._first).name
        code = 130 if self._first == signal.SIGINT else 143
        return InterruptedRunError(f"interrupted by {name}", code)


@contextmanager
def listening(*numbers: signal.Signals) -> Iterator[Interruption]:
    """Take signals for the length of a call, if they are free to take.

    Handlers belong to the process: those that a host installed (a notebook, a web server, the
    command around this call) stay, and so does being ignored (``nohup``). In any thread but the
    main one nothing is installed. Inside another `listening` it is the same object that listens.

    Parameters
    ----------
    numbers : signal.Signals
        Signals.

    Yields
    ------
    Interruption
        What they asked for; nothing for ever where none could be taken.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
        return
    handlers = [signal.getsignal(number) for number in ENDINGS]
    outer = next((item for item in handlers if isinstance(item, Interruption)), None)
    if outer is not None:
        yield outer
        outer.count = 0
        return
    mine = Interruption()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            if handler == _UNTOUCHED.get(number, signal.SIG_DFL):
                signal.signal(number, mine)
        yield mine
    finally:
        with mine.noted():
            for number, handler in before.items():
                if signal.getsignal(number) is mine:
                    signal.signal(number, handler)
