"""Warm worker processes: started cheaply by a clean server, kept between sweeps.

::

    this process                       server (torch imported, nothing run)
      control ────── fork, kill ──────►  fork ──► worker ──► worker …
         ◄─────────── exited ──────────          │
      one pipe for each worker ◄─────────────────┘   no lock or queue is shared

A thread listens to all pipes and ends the futures. Nothing is imported again from ``__main__``, so
scripts without a guard, notebooks and ``python -`` work. When this process ends, however it ends,
the control pipe closes, and the server takes all workers along.
"""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asynckfold.engines.engine import Answer, Tell
from asynckfold.engines.limits import oom_kills, was_short_of_memory
from asynckfold.errors import StorageError, UnpackError, WorkerDiedError
from asynckfold.messages import Task
from asynckfold.placement import Placement

IDLE_SECONDS = 300.0
"""How long workers stay warm after a sweep: long enough for a notebook's next cell."""

_ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)


class Worker:
    """One worker process as seen from here."""

    def __init__(self, name: int, pipe: Connection[Any, Any]) -> None:
        self.name = name
        self.pipe = pipe
        self.pid = 0
        self.bundle = ""
        self.future: Future[Answer] | None = None
        self.tell: Tell | None = None
        self.open = True
        self.status: int | None = None
        self.oom_kills: int | None = None
        self.peak_memory = 0

    @property
    def busy(self) -> bool:
        """Whether a placement runs in it."""
        return self.future is not None

    @property
    def alive(self) -> bool:
        """Whether it may take a placement."""
        return self.open and self.status is None


class WorkerPool:
    """A server and its workers."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.owner = os.getpid()
        self.workers: list[Worker] = []
        self._preload = list(preload)
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._closing = False
        self._forked = False
        self._wake_read, self._wake_write = multiprocessing.Pipe(duplex=False)
        self._server, self._control = _start_server(self._preload)
        self._listener = threading.Thread(
            target=self._listen, name="asynckfold-listener", daemon=True
        )
        self._listener.start()

    def restart(self) -> None:
        """Start a new server after the old one died."""
        self.close()
        self._open()

    @property
    def server_pid(self) -> int:
        """Process number of the server."""
        return self._server.pid

    @property
    def healthy(self) -> bool:
        """Whether workers can be started."""
        return not self._closing and self._server.poll() is None

    def idle_worker(self, bundle: str) -> Worker:
        """Return a worker without work, one that knows the bundle if there is one."""
        with self._lock:
            free = [worker for worker in self.workers if worker.alive and not worker.busy]
            known = [worker for worker in free if worker.bundle == bundle]
            found = known or free
        return found[0] if found else self._start_worker()

    def give(self, worker: Worker, bundle: str, descriptors: Sequence[int]) -> None:
        """Send a bundle and the shared arrays, unless the worker has them."""
        if worker.bundle == bundle:
            return
        try:
            worker.pipe.send(("bundle", sys.path, str(Path.cwd()), len(descriptors)))
            for descriptor in descriptors:
                reduction.send_handle(worker.pipe, descriptor, worker.pid)
        except OSError:
            # It died just now; its end is told by the future of what it is given next.
            return
        worker.bundle = bundle

    def run(
        self, worker: Worker, placement: Placement, tasks: Sequence[Task], tell: Tell
    ) -> Future[Answer]:
        """Send a placement; the future ends with its answer or with the worker."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            worker.future, worker.tell = future, tell
            worker.oom_kills = oom_kills()
            gone = worker.status is not None
        try:
            worker.pipe.send(("run", placement, list(tasks)))
        except OSError:
            # It died just now; the server's word ends the future, unless it came before.
            gone = gone or not self.healthy
        if gone:
            self._finish(worker)
        return future

    def signal(self, worker: Worker, number: int) -> None:
        """Send a signal through the server, which cannot mistake the process."""
        self._command(("signal", worker.name, number))

    def kill(self, worker: Worker) -> None:
        """Kill a worker and everything that it started."""
        self._command(("kill", worker.name))

    def close(self) -> None:
        """End the server, and with it all workers."""
        if self._closing or os.getpid() != self.owner:
            return
        self._closing = True
        self._wake()
        self._listener.join()
        self._control.close()
        if not self._forked:
            # It may still be importing, and has nothing to take along.
            self._server.kill()
        try:
            self._server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        for worker in list(self.workers):
            self._finish(worker)
        self._wake_read.close()
        self._wake_write.close()

    def _wake(self) -> None:
        self._wake_write.send_bytes(b"x")

    def _start_worker(self) -> Worker:
        here, there = multiprocessing.Pipe()
        worker = Worker(next(self._names), here)
        try:
            with self._lock:
                self._control.send(("fork", worker.name))
                reduction.send_handle(self._control, there.fileno(), self._server.pid)
                self.workers.append(worker)
            self._forked = True
            self._wake()
        except OSError:
            worker.open, worker.status = False, -signal.SIGKILL
        finally:
            there.close()
        return worker

    def _command(self, command: tuple[Any, ...]) -> None:
        try:
            with self._lock:
                self._control.send(command)
        except OSError:
            # The server is gone, and its workers with it.
            return

    # The listening thread

    def _listen(self) -> None:
        listening = True
        while listening and not self._closing:
            with self._lock:
                pipes = {worker.pipe: worker for worker in self.workers if worker.open}
            for ready in connection.wait([self._control, self._wake_read, *pipes]):
                if ready is self._wake_read:
                    self._wake_read.recv_bytes()
                elif ready is self._control:
                    listening = self._hear_server()
                else:
                    self._hear(pipes[ready])  # type: ignore[index]

    def _hear_server(self) -> bool:
        try:
            _, name, status, peak = self._control.recv()
        except (EOFError, OSError):
            for worker in list(self.workers):
                worker.status = worker.status if worker.status is not None else -signal.SIGKILL
                self._finish(worker)
            return False
        for worker in list(self.workers):
            if worker.name == name:
                worker.status, worker.peak_memory = status, peak
                self._drain(worker)
                self._finish(worker)
        return True

    def _drain(self, worker: Worker) -> None:
        # A process that the worker started may hold the pipe open, so that no end of file comes.
        try:
            while worker.open and worker.pipe.poll(0):
                self._hear(worker)
        except OSError:
            worker.open = False

    def _hear(self, worker: Worker) -> None:
        try:
            kind, *content = worker.pipe.recv()
        except (EOFError, OSError):
            worker.open = False
            return
        if kind == "ready":
            worker.pid = content[0]
        elif kind == "news":
            if worker.tell is not None:
                worker.tell(content[0])
        else:
            self._answer(worker, kind, content)

    def _answer(self, worker: Worker, kind: str, content: list[Any]) -> None:
        with self._lock:
            future, worker.future = worker.future, None
        if future is None:
            return
        if kind == "answer":
            future.set_result(Answer(content[0], worker.pid, content[1]))
        elif kind == "storage":
            future.set_exception(StorageError(content[0], content[1]))
        elif kind == "lost":
            # It ends by itself; until that is known here, it must not be given anything.
            worker.open = False
            future.set_exception(WorkerDiedError(worker.pid, content[0], content[1]))
        else:
            future.set_exception(UnpackError(content[0], content[1]))

    def _finish(self, worker: Worker) -> None:
        """The worker is gone: end what it was working on."""
        with self._lock:
            if worker in self.workers:
                self.workers.remove(worker)
            future, worker.future = worker.future, None
        worker.open = False
        worker.pipe.close()
        if future is not None:
            future.set_exception(_death(worker))


def _death(worker: Worker) -> WorkerDiedError:
    cause, peak = _cause(worker.status), worker.peak_memory
    if worker.status != -signal.SIGKILL or not was_short_of_memory(worker.oom_kills, peak):
        return WorkerDiedError(worker.pid, cause, peak_memory=peak)
    text = f"{cause}, out of memory at a peak of {peak >> 20} MiB"
    return WorkerDiedError(worker.pid, text, "oom", peak)


def _cause(status: int | None) -> str:
    if status is None:
        return "its server ended"
    if status >= 0:
        return f"exit code {status} without an answer"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _start_server(
    preload: Sequence[str],
) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    here, there = socket.socketpair()
    code = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
        f"from asynckfold.training.server import serve; "
        f"serve({there.fileno()}, {json.dumps(list(preload))})"
    )
    with there:
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env=_environment(os.environ),
            start_new_session=True,
        )
    return server, Connection(here.detach())


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """One thread while libraries are imported: pools that exist would make a fork unsafe."""
    return {**given, **_ONE_THREAD}


class _Warm:
    """The pool that waits for the next sweep of this process."""

    def __init__(self) -> None:
        self.pool: WorkerPool | None = None
        self.timer: threading.Timer | None = None
        self.lock = threading.Lock()


_warm = _Warm()


def take(preload: Sequence[str] = ()) -> WorkerPool:
    """Return the warm pool of this process, or start one."""
    with _warm.lock:
        pool, _warm.pool = _warm.pool, None
        if _warm.timer is not None:
            _warm.timer.cancel()
            _warm.timer = None
    if pool is not None and pool.owner == os.getpid() and pool.healthy:
        return pool
    return WorkerPool(preload)


def start_early(preload: Sequence[str] = ()) -> None:
    """Let the server import torch while this process does, for a sweep that comes soon."""
    give_back(take(preload))


def give_back(pool: WorkerPool, idle_s: float = IDLE_SECONDS) -> None:
    """Keep a pool warm until the next sweep or the idle timeout."""
    with _warm.lock:
        if _warm.pool is None and pool.healthy and idle_s > 0:
            _warm.pool = pool
            _warm.timer = threading.Timer(idle_s, close_warm)
            _warm.timer.daemon = True
            _warm.timer.start()
            return
    pool.close()


def close_warm() -> None:
    """End the workers that wait for a next sweep, if there are any."""
    with _warm.lock:
        pool, _warm.pool = _warm.pool, None
        if _warm.timer is not None:
            _warm.timer.cancel()
            _warm.timer = None
    if pool is not None:
        pool.close()


atexit.register(close_warm)
