"""The process of the command: ``asynckfold``, ``python -m asynckfold``."""

import os
import signal
import sys
from types import FrameType


def program() -> int:
    """Import what the command needs, which takes a second, and be it; return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from asynckfold.cli import program

    signal.signal(signal.SIGINT, before)
    return program()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: nothing was started, and half an import would only say so at length."""
    try:
        os.write(2, b"interrupted before anything was started\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(program())
