"""Work that a call leaves to a process beside it, such as drawing; the exit waits for it.

::

    this process   ┤ call ├   ┤ call ├ pause ┤
    beside it             └ waits ────────────┼ both drawings ┤

A thread would not do: it and the caller's code would wait for the interpreter's lock in turns. The
process begins once no call has followed for a moment, or this process is gone: where cores are
few, it takes none from the jobs of a next call. It gives way to others, ignores Ctrl-C, and ends
with its work.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import fcntl
import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NICE = 3
"""Half the share of others: callers get more of a busy machine, and an exit waits little longer."""

PAUSE_SECONDS = 0.5
"""After a call; a loop of calls makes the next one in less."""

FEW_CORES = 4
"""With more, jobs do not miss the one on which the figures of earlier calls are drawn."""

PIPE_BYTES = 1 << 20  # the most that Linux gives anybody


class _Beside:
    """The processes beside this one: that which gets work, and those that do it."""

    def __init__(self) -> None:
        self.waiting: subprocess.Popen[bytes] | None = None
        self.works: dict[str, tuple[subprocess.Popen[bytes], str]] = {}  # with what to say, by key
        self.calls = 0
        self.timer = threading.Timer(0.0, self.let_go)
        self.lock = threading.RLock()

    def change(self, calls: int) -> None:
        """Note that calls have begun or ended; what waits begins a pause after the last one."""
        with self.lock:
            self.calls += calls
            self.timer.cancel()
            if self.waiting and not self.calls:
                self.timer = threading.Timer(PAUSE_SECONDS, self.let_go)
                self.timer.daemon = True
                # Without a thread, it begins at the exit.
                with contextlib.suppress(RuntimeError):
                    self.timer.start()

    def let_go(self, *, at_once: bool = False) -> None:
        """Let the process that waits begin, unless a call goes on."""
        with self.lock:
            self.timer.cancel()
            if at_once or not self.calls:
                self.send(None)
                self.waiting = None

    def send(self, work: object) -> None:
        """Send work, or None: it may begin."""
        pipe = self.waiting and self.waiting.stdin
        # If it was killed, the exit says so.
        with contextlib.suppress(OSError):
            if pipe:
                pipe.write(json.dumps(work).encode() + b"\n")
                pipe.flush()


_beside = _Beside()


@contextmanager
def held() -> Iterator[None]:
    """Begin nothing while a call goes on where it needs all cores."""
    calls = int(len(os.sched_getaffinity(0)) <= FEW_CORES)
    _beside.change(calls)
    try:
        yield
    finally:
        _beside.change(-calls)


def start(module: str, data: bytes, key: str, complaint: str) -> None:
    """Call ``run(data)`` of a module in a process beside this one, unless one has the key.

    If it fails, the exit warns with the complaint and the error.

    Raises
    ------
    OSError
        No process can be started.
    """
    running()
    with _beside.lock:
        if key not in _beside.works:
            _beside.waiting = _beside.waiting or _process()
            _beside.works[key] = _beside.waiting, complaint
            _beside.send((module, base64.b64encode(data).decode(), complaint))
            _beside.change(0)


def running() -> tuple[int, ...]:
    """Return the numbers of the processes beside this one; what went well is forgotten."""
    with _beside.lock:
        processes = {process for process, _ in _beside.works.values()}
    for process in processes:
        if process.poll() == 0:
            _end(process)
    return tuple(process.pid for process in processes if process.returncode is None)


def wait() -> list[str]:
    """Let all begin and wait for them; return what to say of those that failed."""
    _beside.let_go(at_once=True)
    with _beside.lock:
        processes = dict.fromkeys(process for process, _ in _beside.works.values())
    return [text for process in processes if (text := _end(process))]


def _end(process: subprocess.Popen[bytes]) -> str:
    with _beside.lock:
        works = _beside.works
        keys = [key for key, (item, _) in works.items() if item is process]
        complaints = "; ".join(works.pop(key)[1] for key in keys)
    if not keys:
        return ""  # another thread ends it
    try:
        _, said = process.communicate()
    except BaseException:
        process.kill()
        process.communicate()
        raise
    text = said.decode(errors="replace").strip() or f"{complaints}: {process.returncode}"
    return text if process.returncode else ""


def _process() -> subprocess.Popen[bytes]:
    path = [str(Path(name).absolute()) for name in sys.path]
    code = (
        f"import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.nice({NICE}); "
        f"sys.path[:] = {json.dumps(path)}; from {__name__} import carry_out; carry_out()"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        # An import must not start threads for sums that no figure needs.
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    # Room for the work of most runs, so that the caller does not wait until the process reads.
    with contextlib.suppress(OSError):
        fcntl.fcntl(process.stdin or -1, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return process


def carry_out() -> None:
    """Collect the work that another process sends; do it once that says so, or is gone."""
    # A line that lacks its end was cut off by the end of its sender.
    lines = itertools.takewhile(lambda line: line.endswith(b"]\n"), sys.stdin.buffer)
    failures = []
    for module, data, complaint in [*map(json.loads, lines)]:
        try:
            importlib.import_module(module).run(base64.b64decode(data))
        except Exception as error:  # noqa: BLE001
            failures.append(f"{complaint}: {type(error).__name__}: {error}")
    if failures:
        sys.exit("; ".join(failures))


@atexit.register
def _at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        for text in wait():
            warnings.warn(text, RuntimeWarning, 2)
