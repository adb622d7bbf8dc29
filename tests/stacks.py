"""What the processes of a test that hangs are doing, shortly before its timeout ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from tests.leftovers import MARK, PROC, alive, described, helpers, marked, processes

WAIT_SECONDS = 0.3


def show(mark: str = MARK) -> None:
    """Print the stacks of all marked processes below this one, youngest first; they end by it.

    A Python process with ``PYTHONFAULTHANDLER`` in its environment writes its stacks when it is
    aborted. Where it writes them may be a pipe that nobody reads any more, so it is read from here.
    """
    others = processes() - {os.getpid()} - helpers
    family = {pid for pid in others if marked(pid, mark) and alive(pid)}
    print(f"\n{len(family)} processes still run", file=sys.stderr)
    for line in described(family):
        print(line, file=sys.stderr)
    for pid in sorted(family, reverse=True):
        print(f"\n{pid} says when it is aborted:\n{_aborted(pid)}", file=sys.stderr, flush=True)


def _aborted(pid: int) -> str:
    """Abort a process; return what it writes to its standard error then."""
    try:
        descriptor = os.open(PROC / str(pid) / "fd" / "2", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"(its standard error cannot be read: {error})"
    text = b""
    try:
        with contextlib.suppress(OSError):  # a pipe has no end to go to
            os.lseek(descriptor, 0, os.SEEK_END)
        os.kill(pid, signal.SIGABRT)
        time.sleep(WAIT_SECONDS)
        while block := os.read(descriptor, 1 << 16):
            text += block
    except (BlockingIOError, ProcessLookupError):
        pass  # the pipe is empty, and others hold it open; or it ended by itself
    finally:
        os.close(descriptor)
    return text.decode(errors="replace")
