"""Work that a call leaves to a process beside it, such as drawing; the exit waits for it.

A thread would not do: it and the caller's code would wait for the interpreter's lock in turns.
The process gives way to others, ignores Ctrl-C, and ends with its work, also if its parent is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

from asynckfold.system.file_descriptors import nameless_file

NICE = 3
"""Half the share of others: callers get more of a busy machine, and an exit waits little longer."""

_running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
"""By key, with what the exit says if it fails."""


def start(module: str, data: bytes, key: str, complaint: str) -> None:
    """Call ``run(data)`` of a module in a new process, unless one is at work for the key.

    If it fails, the exit warns with the complaint and the last line of the traceback.

    Raises
    ------
    OSError
        No process can be started.
    """
    running()
    if key in _running:
        return
    path = [str(Path(name).absolute()) for name in sys.path]
    code = (
        f"import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.nice({NICE}); "
        f"sys.path[:] = {json.dumps(path)}; from {module} import run; run(sys.stdin.buffer.read())"
    )
    file = nameless_file(data)
    try:
        os.lseek(file, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            # An import must not start threads for sums that no figure needs.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    finally:
        os.close(file)
    _running[key] = process, complaint


def running() -> tuple[int, ...]:
    """Return the numbers of the processes at work; those that have ended well are forgotten."""
    for key, (process, _) in [*_running.items()]:
        if process.poll() == 0:
            _end(key)
    return tuple(process.pid for process, _ in _running.values() if process.returncode is None)


def wait() -> list[str]:
    """Wait for all of them; return what to say of those that failed."""
    return [text for key in [*_running] if (text := _end(key))]


def _end(key: str) -> str:
    process, complaint = _running.pop(key)
    try:
        _, said = process.communicate()
    except BaseException:
        process.kill()
        process.communicate()
        raise
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return f"{complaint}: {last or process.returncode}" if process.returncode else ""


@atexit.register
def _at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        for text in wait():
            warnings.warn(text, RuntimeWarning, 2)
