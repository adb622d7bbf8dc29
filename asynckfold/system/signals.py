"""Signals and a time budget, which ask a run to end: raised where nothing is lost, else noted.

::

    first    noted ──► the sweep lets running jobs save themselves, writes, and raises
    second   noted ──► the engine stops waiting for them and kills them

An exception from a signal handler may be raised between any two instructions: between a row and its
checksum, or inside a library's lock. So while workers run and the store is written, signals are
only noted, and every wait checks for them. Elsewhere (reading the data, building a report) they
raise at once, except in what must not be left halfway: the import of a compiled library, which may
crash the process at once or at its exit, and `unbroken` functions. If a library wraps the exception
it is still an interruption.
"""

from __future__ import annotations

import _thread
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import CodeType, FrameType
from typing import TypeVar

from asynckfold.errors import OUT_OF_TIME, TERMINATED, InterruptedRunError

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a batch system, a closed terminal."""

_UNTOUCHED = {signal.SIGINT: signal.default_int_handler}
"""The handlers that Python installs; any other was set on purpose."""

_COMPILED = ("torch", "torchvision", "numpy", "scipy", "sklearn", "pandas", "matplotlib")
"""Their Python modules are parts of compiled ones: torch calls back from C++ while it is imported,
and ends the process on an exception there."""

_IMPORTLIB = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
"""The first one loads a compiled module in two steps. Given up between them, matplotlib.ft2font
ends the process at its exit: what it made for the second step is freed after the interpreter."""

_AGAIN_SECONDS = 0.01
"""Interval between attempts to raise."""

_unbroken: set[CodeType] = set()

Function = TypeVar("Function", bound=Callable[..., object])


def unbroken(function: Function) -> Function:
    """Postpone signals until a function has returned, which should be soon."""
    _unbroken.add(function.__code__)
    return function


class Interruption:
    """The state of the signals during one call, and their handler."""

    def __init__(self) -> None:
        self.count = 0
        self._first = 0
        self._raises_from: int | None = 1
        self._budget_s: float | None = None
        self._reason = ""
        self._deadline = math.inf
        self._waits = self._repeated = False
        self._lock = threading.Lock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
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
        # A second exception must not interrupt what the first one unwinds.
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
                # This also wakes the main thread if it waits.
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def forget(self) -> None:
        """Drop a postponed signal."""
        with self._lock:
            self._waits = self._repeated = False

    def limit(self, budget_s: float | None) -> None:
        """Set a time budget in seconds from now; None: no limit."""
        self._budget_s, self._reason = budget_s, ""
        self._deadline = math.inf if budget_s is None else time.monotonic() + budget_s

    def end(self, reason: str) -> None:
        """End the run as if its time were over."""
        self._reason, self._deadline = reason, -math.inf

    def stop_requested(self) -> bool:
        """Whether the run should end."""
        return self.count > 0 or time.monotonic() >= self._deadline

    def urgent(self) -> bool:
        """Whether a second signal asked the run to end at once."""
        return self.count > 1

    def check(self) -> None:
        """Raise `InterruptedRunError` if the run should end; called where state is consistent."""
        if self.stop_requested():
            self._raises_from = self._raises_from if not self.count else None
            raise self._error()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Only note signals in here, and afterwards while an interruption unwinds the call."""
        before, self._raises_from = self._raises_from, None
        try:
            yield
        finally:
            if not self.count:
                self._raises_from = before

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Let the second signal raise: around user code, which does not check for the first."""
        before, self._raises_from = self._raises_from, 2
        try:
            if self.urgent():
                raise self._error()
            yield
        finally:
            self._raises_from = before

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Forget earlier signals and raise at the next: for the work after an interruption."""
        self.count, self._raises_from = 0, 1
        self.limit(None)
        try:
            yield
        finally:
            self._raises_from = None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Turn an exception that a library made of an interruption back into one."""
        try:
            yield
        except Exception as error:
            if not self.count or not _stems_from_interruption(error):
                raise
            raise self._error() from error

    def _error(self) -> InterruptedRunError:
        if not self.count:
            text = self._reason or f"the time budget of {self._budget_s:g} s is over"
            return InterruptedRunError(text, OUT_OF_TIME)
        name = signal.Signals(self._first).name
        code = 130 if self._first == signal.SIGINT else TERMINATED
        return InterruptedRunError(f"interrupted by {name}", code)


def _must_wait(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _IMPORTLIB:
            known = frame.f_locals
            loader = getattr(known.get("spec"), "loader", known.get("self"))
            if isinstance(loader, ExtensionFileLoader):
                return True
        if frame.f_code.co_name == "<module>":
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package in _COMPILED:
                return True
        if frame.f_code in _unbroken:
            return True
        frame = frame.f_back
    return False


def _stems_from_interruption(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, InterruptedRunError):
        error = error.__context__ or error.__cause__
    return error is not None


@contextmanager
def listening() -> Iterator[Interruption]:
    """Handle `ENDINGS` for the length of a call, unless others handle them.

    Handlers that a host installed (a notebook, a web server, the calling command) stay, and so do
    ignored signals (``nohup``). Only the main thread installs handlers. A nested `listening` yields
    the outer object.
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
    before = {number: signal.getsignal(number) for number in ENDINGS}
    try:
        for number, handler in before.items():
            if handler == _UNTOUCHED.get(number, signal.SIG_DFL):
                signal.signal(number, mine)
        with mine.owned():
            yield mine
    finally:
        with mine.noted():
            mine.forget()
            for number, handler in before.items():
                if signal.getsignal(number) is mine:
                    signal.signal(number, handler)
