"""What asks a run to end, signals and a time budget: raised where nothing is lost, else noted.

::

    first    noted ──► the sweep lets running jobs save themselves, writes, and raises
    second   noted ──► the engine stops waiting for them and kills them

An exception that a signal raises may strike between any two instructions: between a row and its
checksum, or in a library's lock. So while workers run and the store is written, signals are noted,
and whoever waits looks at them. Elsewhere (reading the data, building a report) they raise at once,
but for what they wait for, since it may not be given up halfway: the import of a compiled module,
which may take the process with it, and what is `unbroken`. What a library makes of the exception is
an interruption still, and where Python would drop it (in a finalizer, or a callback such as each
import ends with) it comes again.
"""

from __future__ import annotations

import _thread
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import CodeType, FrameType
from typing import TypeVar

from asynckfold.errors import OUT_OF_TIME, InterruptedRunError

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a batch system, a closed terminal."""

_UNTOUCHED = {signal.SIGINT: signal.default_int_handler}
"""What Python itself installs; a program that sets anything else meant it."""

_AGAIN_SECONDS = 0.01
"""After so long it is seen whether what may not be given up is going on still."""

_unbroken: set[CodeType] = set()

Function = TypeVar("Function", bound=Callable[..., object])


def unbroken(function: Function) -> Function:
    """Let signals wait until a function has returned, which should be soon."""
    _unbroken.add(function.__code__)
    return function


class Interruption:
    """What the signals of one call asked for; itself the handler of these signals."""

    def __init__(self) -> None:
        self.count = 0
        self._first = 0
        self._raises_from: int | None = 1
        self._budget_s: float | None = None
        self._deadline = math.inf
        self._waits = self._repeated = False
        self._lock = threading.Lock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._repeated:
            self._waits = self._repeated = False
        else:
            self.count += 1
            self._first = self._first or number
        if self._raises_from is None or self.count < self._raises_from:
            return
        if _must_wait(frame):
            self._take_later(number)
            return
        # What this unwinds is not struck a second time.
        self._raises_from = None
        raise self._error()

    def _take_later(self, number: int) -> None:
        if not self._waits:
            self._waits = True
            _thread.start_new_thread(self._repeat, (number,))

    def _repeat(self, number: int) -> None:
        time.sleep(_AGAIN_SECONDS)
        with self._lock:
            if self._waits:
                self._repeated = True
                # Wakes it, too, if it waits for anything.
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def again(self) -> None:
        """Raise once more, soon: what was raised has come to nothing."""
        self._raises_from = self.count
        self._take_later(self._first)

    def forget(self) -> None:
        """Take no signal later that came already."""
        with self._lock:
            self._waits = self._repeated = False

    def limit(self, budget_s: float | None) -> None:
        """Ask for the end after so many seconds from now, too; None: never."""
        self._budget_s = budget_s
        self._deadline = math.inf if budget_s is None else time.monotonic() + budget_s

    def asked(self) -> bool:
        """Whether the run should end."""
        return self.count > 0 or time.monotonic() >= self._deadline

    def urgent(self) -> bool:
        """Whether it was asked again, and should end at once."""
        return self.count > 1

    def check(self) -> None:
        """Raise if the run should end; called where everything is consistent.

        Raises
        ------
        InterruptedRunError
            With the exit code of the first signal, or of a time budget that is over.
        """
        if self.asked():
            self._raises_from = self._raises_from if not self.count else None
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
        self.limit(None)
        try:
            yield
        finally:
            self._raises_from = None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Raise again, as an interruption, what a library made of the one that struck it."""
        try:
            yield
        except Exception as error:
            if not self.count or not _stems_from_interruption(error):
                raise
            raise self._error() from error

    def _error(self) -> InterruptedRunError:
        if not self.count:
            text = f"the time budget of {self._budget_s:g} s is over"
            return InterruptedRunError(text, OUT_OF_TIME)
        name = signal.Signals(self._first).name
        code = 130 if self._first == signal.SIGINT else 143
        return InterruptedRunError(f"interrupted by {name}", code)


def _must_wait(frame: FrameType | None) -> bool:
    while frame is not None:
        importlib = frame.f_code.co_filename == "<frozen importlib._bootstrap_external>"
        if importlib and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        if frame.f_code in _unbroken:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _undropped(signals: Interruption) -> Iterator[None]:
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if signals.count and isinstance(dropped.exc_value, InterruptedRunError):
            signals.again()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


def _stems_from_interruption(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, InterruptedRunError):
        error = error.__context__ or error.__cause__
    return error is not None


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
        with outer.owned():
            yield outer
        outer.count = 0
        outer.limit(None)
        return
    mine = Interruption()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            if handler == _UNTOUCHED.get(number, signal.SIG_DFL):
                signal.signal(number, mine)
        with mine.owned(), _undropped(mine):
            yield mine
    finally:
        with mine.noted():
            mine.forget()
            for number, handler in before.items():
                if signal.getsignal(number) is mine:
                    signal.signal(number, handler)
