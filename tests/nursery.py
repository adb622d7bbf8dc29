"""Processes that begin where importing torch has ended: forked from one that has imported it.

A command or a script starts two interpreters that import torch, the sweep's and that of the server
of its workers: some ten seconds of a core, in which nothing happens that a test could be about.
From here both are forked, and all that follows is theirs alone. What is about the start itself, or
about what a process has from the one that starts it, needs fresh interpreters.

::

    a test ── words, environment, files ──► nursery ── fork ──► a sweep's process ── fork, at once
                                               │                     └──► its server, once asked for
    a pool of the tests ───────────────────────┴─ fork ──► its server
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asynckfold.engines import server_process
from asynckfold.system import file_descriptors
from tests.leftovers import SERVER

HOME = Path(__file__).parents[1]

fresh_server = server_process.start_server
"""What starts a server as the pools do it by themselves."""


class Nursery:
    """Starts processes.

    Attributes
    ----------
    mark : str
        Stands in the environment of the nursery and, for the kernel, of all that it starts.
    """

    def __init__(self) -> None:
        self.mark = f"NURSERY_{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._line, there = multiprocessing.Pipe()
        with there:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from tests.nursery import main; main()",
                    f"{there.fileno()}",
                ],
                cwd=HOME,
                env={**server_process.environment(os.environ), self.mark: "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return once it has imported torch."""
        self._ask(("ready", None, 0), [])

    def close(self) -> None:
        """End it; what it started is left alone."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def start(
        self,
        words: Sequence[object],
        output: Path,
        environment: Mapping[str, str] | None = None,
        errors: Path | None = None,
        ignored: Sequence[int] = (),
    ) -> Started:
        """Start what ``python WORDS`` would be, in a session of its own.

        Parameters
        ----------
        words : sequence of object
            ``-m MODULE``, ``-c CODE`` or a script, and what they are told.
        output : Path
            What is printed is appended there.
        environment : Mapping, optional
            Of the process; by default that of this one.
        errors : Path, optional
            What is printed as errors is appended there instead.
        ignored : sequence of int
            Signals that it ignores from the start.
        """
        place = Place.here(os.environ if environment is None else environment, ignored)
        with output.open("ab") as file, (errors or output).open("ab") as other:
            pid = self._ask(("be", place, [*map(str, words)]), [file.fileno(), other.fileno()])
        return Started(self, pid, output)

    def start_server(
        self, heartbeats: int, preload: Sequence[str], nice: int
    ) -> tuple[Started, Connection[Any, Any]]:
        """In place of the function of this name in `asynckfold.engines.pool`."""
        here, there = multiprocessing.Pipe()
        place = Place.here(server_process.environment(os.environ))
        with there:
            message = ("serve", place, [list(preload), nice])
            pid = self._ask(message, [1, 2, there.fileno(), heartbeats])
        return Started(self, pid), here

    def ended(self, pid: int) -> int | None:
        """Return how a process ended, None while it runs."""
        found: int | None = self._ask(("ended", None, pid), [])
        return found

    def _ask(self, message: tuple[str, Place | None, Any], files: Sequence[int]) -> Any:
        with self._lock:
            if files:
                file_descriptors.send(self._line, (len(files), *message), files)
            else:
                self._line.send((0, *message))
            return self._line.recv()


class Started:
    """A process of a nursery, as `subprocess.Popen` has it."""

    def __init__(self, nursery: Nursery, pid: int, output: Path | None = None) -> None:
        self.pid = pid
        self.output = output
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ended; return how."""
        return wait_for(self.poll, timeout)

    def printed(self) -> str:
        """Return what it and what it started printed so far."""
        assert self.output is not None
        return self.output.read_text().strip()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def wait_for(poll: Callable[[], int | None], timeout: float | None) -> int:
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    while (code := poll()) is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("a process of the nursery", timeout or 0.0)
        time.sleep(0.005)
    return code


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery, closed at the end."""
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Place:
    """What a process has from the one that starts it."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    ignored: tuple[int, ...]

    @classmethod
    def here(cls, environment: Mapping[str, str], ignored: Sequence[int] = ()) -> Place:
        return cls(dict(environment), str(Path.cwd()), list(sys.path), tuple(ignored))

    def take(self) -> None:
        """Be there."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)


# In the nursery


def fork_for(line: Connection[Any, Any]) -> tuple[str, Any, list[int]] | None:
    """Fork for every request; return twice: in each child what to be, and here None at the end."""
    while True:
        try:
            count, what, place, detail = line.recv()
        except EOFError:
            return None
        if what == "ready":
            line.send(True)
            continue
        if what == "ended":
            found, status = os.waitpid(detail, os.WNOHANG)
            line.send(os.waitstatus_to_exitcode(status) if found else None)
            continue
        output, errors, *files = file_descriptors.receive(line, count)
        pid = os.fork()
        if pid == 0:
            line.close()
            os.setsid()
            os.dup2(output, 1)
            os.dup2(errors, 2)
            for descriptor in (output, errors):
                os.close(descriptor)
            place.take()
            return what, detail, files
        for descriptor in (output, errors, *files):
            os.close(descriptor)
        line.send(pid)


def be(words: list[str]) -> None:
    """Be the program of these words."""
    spare, fresh = Spare(), server_process.start_server

    def start_server(heartbeats: int, preload: Sequence[str], nice: int) -> tuple[Any, Any]:
        return spare.start(heartbeats, preload, nice) or fresh(heartbeats, preload, nice)

    server_process.start_server = start_server
    watch()
    # The tests themselves may run where Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = words
    if words[0] == "-m":
        _, module, *_ = words
        sys.argv = words[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        _, code, *arguments = words
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")


def watch() -> None:
    """Let the processes of a campaign of kills note how far they are."""
    from tests.watched import gate

    if gate.FOLDER in os.environ:
        gate.watch()


class Spare:
    """The process that will be a program's first server: forked before anything else happens."""

    def __init__(self) -> None:
        self._line, there = multiprocessing.Pipe()
        self._used = False
        self._lock = threading.Lock()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._line.close()
                self._wait_to_serve(there)
            except EOFError:
                pass  # its sweep ended, and never asked
            finally:
                os._exit(1)
        there.close()

    def _wait_to_serve(self, line: Connection[Any, Any]) -> None:
        """In the child: never come back."""
        os.setsid()
        be_called_server()
        place, detail = line.recv()
        files = file_descriptors.receive(line, 2)
        line.close()
        place.take()
        watch()
        serve(detail, files)

    def start(
        self, heartbeats: int, preload: Sequence[str], nice: int
    ) -> tuple[Spare, Connection[Any, Any]] | None:
        """Let it serve; None where it did before, or is dead."""
        if self._used:
            return None
        self._used = True
        here, there = multiprocessing.Pipe()
        place = Place.here(server_process.environment(os.environ))
        with there, self._line:
            try:
                message = (place, [list(preload), nice])
                file_descriptors.send(self._line, message, [there.fileno(), heartbeats])
            except OSError:
                here.close()
                self.wait()
                return None
        return self, here

    # What a pool wants of its server, as `subprocess.Popen` has it.

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if found else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return wait_for(self.poll, timeout)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(detail: list[Any], files: list[int]) -> None:
    """Be a server, and never come back."""
    from asynckfold.training.worker import fork_server

    be_called_server()
    preload, nice = detail
    try:
        fork_server.serve(*files, preload, nice)
    finally:
        os._exit(1)


def be_called_server() -> None:
    """Be found by `leftovers.is_server`."""
    Path("/proc/self/comm").write_text(SERVER)


def tasks_lost_by_a_fork() -> list[str]:
    """Return the names of the threads of the kernel beside this one that a child would lack.

    Where pyarrow is installed, pandas imports it: its jemalloc stops a thread at every fork and
    starts it again.
    """
    tasks = Path("/proc/self/task").iterdir()
    names = [task.joinpath("comm").read_text().strip() for task in tasks]
    return [name for name in names if name != "jemalloc_bg_thd"][1:]


def main() -> None:
    # What a run imports, at the latest when it tells its results.
    for name in ("torchvision", "sklearn.metrics", "pandas", "scipy.stats"):
        importlib.import_module(name)
    rooms = "cli", "api.kfold", "api.fold_models", "results.report.page", "data.prepare"
    workers = "training.worker.main", "training.dry_run.preflight", "training.worker.fork_server"
    for name in (*rooms, *workers):
        importlib.import_module(f"asynckfold.{name}")
    sys.modules["asynckfold.training.worker.fork_server"]._warm_up()
    # The tests themselves may run where these are ignored, as SIGINT may be.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    assert threading.active_count() == 1
    assert not tasks_lost_by_a_fork()
    line: Connection[Any, Any] = Connection(int(sys.argv[1]))
    request = fork_for(line)
    if request is None:
        return
    what, detail, files = request
    if what == "serve":
        serve(detail, files)
    be(detail)
