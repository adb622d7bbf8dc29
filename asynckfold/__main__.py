"""The process of the command: ``asynckfold``, ``python -m asynckfold``."""

import os
import signal
import sys
from types import FrameType


def program() -> int:
    """Import the command, which takes up to a second, and run it; return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from asynckfold.cli import load, program

    load(sys.argv[1:])
    signal.signal(signal.SIGINT, before)
    return program()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: nothing was started, and an interrupted import would print a traceback."""
    try:
        os.write(2, b"interrupted before anything was started\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(program())
