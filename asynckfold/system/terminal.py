"""The only way to the terminal: text is cleaned, and a stream that fails ends no run.

::

    complain(text)    a line to standard error
    write(text)       text as it is made for other programs, to standard output
    steady_streams()  for as long as code runs that prints by itself

Tables and what moves go through `asynckfold.system.console`, to the same streams.

Standard output and error may be closed (``>&-``), full (``> /dev/full``), read by nobody any more
(``| head -1``), or know few characters (``PYTHONIOENCODING=ascii``). None of that is a failure of
what is being told.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from asynckfold.system.plain_text import plain

_GONE = (errno.EPIPE, errno.EIO)
"""What a write says when the reader went away: of a pipe, and of a terminal."""

_SIMPLER = {
    "±": "+/-",
    "…": "...",
    "×": "x",
    "–": "-",
    "—": "-",
    "·": ".",
    "→": "->",
    "“": '"',
    "”": '"',
    "’": "'",
    "\ufffd": "?",
}
"""For terminals that know few characters."""


class _Steady:
    """A stream that takes whatever is written, as well as it can."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        """What it failed by, unless its reader went away."""

    def write(self, text: str) -> int:
        """Write what the stream's encoding can show; the rest escaped."""
        if self._stream is None or self._stream.closed:
            return len(text)
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(_encodable(text, self._stream.encoding or "ascii"))
        except BlockingIOError:
            pass  # a pipe that its reader made non-blocking is full: this part is not shown
        except OSError as error:
            self._give_up(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Let it arrive, where there is somewhere to arrive."""
        if self._stream is None or self._stream.closed:
            return
        try:
            self._stream.flush()
        except BlockingIOError:
            pass
        except OSError as error:
            self._give_up(error)

    def isatty(self) -> bool:
        """Whether a person sees it."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def _give_up(self, error: OSError) -> None:
        assert self._stream is not None
        if error.errno not in _GONE:
            self.lost = error
        try:
            descriptor = self._stream.fileno()
        except OSError:
            self._stream = None
            return
        # The descriptor itself, so that what Python flushes at its end goes nowhere, too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        if self._stream is None:
            if name == "encoding":
                return "utf-8"
            raise AttributeError(name)
        return getattr(self._stream, name)


def _encodable(text: str, encoding: str) -> str:
    return "".join(_simpler(sign, encoding) for sign in text)


def _simpler(sign: str, encoding: str) -> str:
    try:
        sign.encode(encoding)
    except UnicodeEncodeError:
        return _SIMPLER.get(sign) or sign.encode("ascii", "backslashreplace").decode()
    return sign


def steady(stream: TextIO | None) -> TextIO:
    """Return a stream that stops nothing, whatever becomes of it: ``None`` is a closed one.

    ``asynckfold run … | head -1`` goes on to the end.
    """
    if isinstance(cast("object", stream), _Steady):
        return cast("TextIO", stream)
    return cast("TextIO", _Steady(stream))


@contextmanager
def steady_streams() -> Iterator[None]:
    """Make standard output and error steady, also for what others print."""
    with redirect_stdout(steady(sys.stdout)), redirect_stderr(steady(sys.stderr)):
        yield


def flush() -> None:
    """Let what was printed arrive, or go nowhere: Python would end with another exit code."""
    for stream in (sys.stdout, sys.stderr):
        steady(stream).flush()


def lost_output() -> str:
    """Return why standard output took less than was written; empty where a reader went away."""
    lost = getattr(sys.stdout, "lost", None)
    return "" if lost is None else os.strerror(lost.errno)


def open_standard() -> None:
    """Open, on nothing, what was closed of standard input, output and error.

    Else the next file that is opened, which may be ``run.db``, would take its number, and whatever
    a library prints would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def is_terminal(*, stderr: bool = False) -> bool:
    """Whether a person sees what is printed there."""
    return steady(sys.stderr if stderr else sys.stdout).isatty()


def complain(text: str) -> None:
    """Print to standard error."""
    stream = steady(sys.stderr)
    stream.write(f"{plain(text)}\n")
    stream.flush()


def write(text: str) -> None:
    """Print to standard output what is for other programs, such as JSON."""
    stream = steady(sys.stdout)
    stream.write(plain(text))
    stream.flush()
