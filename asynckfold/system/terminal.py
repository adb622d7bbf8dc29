"""The only way to the terminal: text is cleaned, and a failing stream ends no run.

::

    complain(text)    a line to standard error
    write(text)       output for other programs, to standard output
    steady_streams()  while code runs that prints by itself

Tables and animations go through `asynckfold.system.console`, to the same streams. Standard output
and error may be closed (``>&-``), full (``> /dev/full``), without a reader (``| head -1``), or of
few characters (``PYTHONIOENCODING=ascii``).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from asynckfold.system.plain_text import plain

_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe and of a terminal whose reader is gone."""


class _Steady:
    """A stream that never fails."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        """Why it failed, unless its reader is gone."""

    def write(self, text: str) -> int:
        """Write text; characters outside the stream's encoding are escaped."""

        def put(stream: TextIO) -> None:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

        self._try(put)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, if it is open."""
        self._try(lambda stream: stream.flush())

    def _try(self, act: Callable[[TextIO], object]) -> None:
        if self._stream is None or self._stream.closed:
            return
        try:
            act(self._stream)
        except BlockingIOError:
            pass  # a full pipe that its reader made non-blocking: this part is lost
        except OSError as error:
            self._give_up(error)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
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
        # Redirect the descriptor itself, for what Python flushes on exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        if self._stream is None:
            if name == "encoding":
                return "utf-8"
            raise AttributeError(name)
        return getattr(self._stream, name)


def steady(stream: TextIO | None) -> TextIO:
    """Return a stream that never fails; ``None`` is a closed one."""
    if isinstance(cast("object", stream), _Steady):
        return cast("TextIO", stream)
    return cast("TextIO", _Steady(stream))


@contextmanager
def steady_streams() -> Iterator[None]:
    """Make standard output and error steady for all code."""
    with redirect_stdout(steady(sys.stdout)), redirect_stderr(steady(sys.stderr)):
        yield


def flush() -> None:
    """Flush both streams; a failure on exit would change Python's exit code."""
    for stream in (sys.stdout, sys.stderr):
        steady(stream).flush()


def lost_output() -> str:
    """Return why standard output lost text; empty if only its reader is gone."""
    lost = getattr(sys.stdout, "lost", None)
    return "" if lost is None else os.strerror(lost.errno)


def open_standard() -> None:
    """Open closed standard streams on the null device.

    Else the next open file, perhaps ``run.db``, would get the number, and prints would go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # This is the lowest free number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def is_terminal(*, stderr: bool = False) -> bool:
    """Whether standard output, or error, is a terminal."""
    return steady(sys.stderr if stderr else sys.stdout).isatty()


def complain(text: str) -> None:
    """Print to standard error."""
    stream = steady(sys.stderr)
    stream.write(f"{plain(text)}\n")
    stream.flush()


def write(text: str) -> None:
    """Print to standard output for other programs, such as JSON."""
    stream = steady(sys.stdout)
    stream.write(plain(text))
    stream.flush()
