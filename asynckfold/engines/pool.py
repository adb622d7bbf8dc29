"""Warm worker processes: forked by a clean server, kept between sweeps.

::

    this process                       server (torch imported, nothing run)
      control ────── fork, kill ──────►  fork ──► worker ──► worker …
         ◄─────────── exited ──────────          │
      one pipe for each worker ◄─────────────────┘   no lock or queue is shared

A thread listens to all pipes and completes the futures. Nothing is imported again from
``__main__``: scripts without a guard, notebooks and ``python -`` work. When this process ends,
however it ends, the control pipe closes and the server ends all workers. Nothing here waits without
a time limit, neither for a worker that cannot be killed nor for a server that does not answer.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Container, Sequence
from concurrent.futures import Future
from multiprocessing import connection
from pathlib import Path
from typing import Any

from asynckfold.engines.engine import Answer
from asynckfold.engines.server_process import CLOSE_SECONDS, ServerProcess, start_failure
from asynckfold.engines.worker_handle import Submission, Worker
from asynckfold.errors import StorageError
from asynckfold.jobs.placement import Placement
from asynckfold.system import file_descriptors, process

_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


class WorkerPool:
    """A fork server and its workers.

    Raises
    ------
    StorageError
        No further process, thread or file can be opened.
    """

    def __init__(self, preload: Sequence[str] = (), nice: int = 0) -> None:
        self.owner = os.getpid()
        self.nice = nice
        self.workers: list[Worker] = []
        self._refused: list[tuple[Submission, int]] = []
        self._preload = list(preload)
        self._names = itertools.count()
        self._stamps: dict[str, tuple[Any, ...]] = {}
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._closing = False
        try:
            self._wake_read, self._wake_write = multiprocessing.Pipe(duplex=False)
            self.server = ServerProcess(self._preload, self.nice)
            self._listener = threading.Thread(
                target=self._listen, name="asynckfold-listener", daemon=True
            )
            self._listener.start()
        except (OSError, RuntimeError) as error:
            # A thread that cannot be started raises RuntimeError, without an errno.
            number = getattr(error, "errno", None) or errno.EAGAIN
            raise StorageError(number, start_failure(number)) from error

    def restart(self) -> None:
        """Start a new server after the old one died."""
        self.close()
        self._open()

    @property
    def healthy(self) -> bool:
        """Whether workers can be started."""
        return not self._closing and self.server.alive

    def knows(self, modules: Sequence[str]) -> bool:
        """Whether no file of these modules was edited since workers may have imported it."""
        stamps = {name: _stamp(name) for name in modules}
        is_same = all(self._stamps.get(name, stamp) == stamp for name, stamp in stamps.items())
        self._stamps.update(stamps)
        return is_same

    def preload(self, names: Sequence[str]) -> None:
        """Let the server import modules for the workers that it forks later."""
        wanted = [name for name in names if name not in self._preload]
        if wanted:
            self._preload += wanted
            self.server.command("import", None, wanted)

    def idle_worker(self, bundle: str, placement: Placement) -> Worker | None:
        """Return an idle worker, preferably one that has the bundle.

        A worker opens one GPU in its life, or none.
        """
        with self._lock:
            free = [worker for worker in self.workers if worker.alive and not worker.busy]
        if placement.wants_new_worker(process.has_gpu()):
            free = [worker for worker in free if not worker.used]
        gpu = placement.gpu_uuid
        free = [worker for worker in free if not gpu or worker.gpu in ("", gpu)]
        free.sort(key=lambda worker: (worker.gpu != gpu, worker.bundle != bundle))
        return free[0] if free else None

    def run(self, work: Submission, bundle: str, files: Sequence[int]) -> Worker | None:
        """Send work to an idle worker, or a new one, which completes its future.

        Returns
        -------
        Worker or None
            None if no further process or file can be opened. The work is then in `refused`, as it
            is later if the server cannot fork.
        """
        try:
            worker = self.idle_worker(bundle, work.placement) or self._start_worker()
        except OSError as error:
            self._refuse(work, error.errno or errno.EAGAIN)
            return None
        ended = worker.assign(work)
        try:
            worker.send(work, bundle, files)
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                if taken := worker.take_work():
                    self._refuse(taken, error.errno)
                return None
            # It has just died. The server reports it, unless it did before.
            ended = ended or not self.healthy
        if ended:
            self._finish(worker)
        return worker

    def refused(self, futures: Container[Future[Answer]]) -> list[tuple[Submission, int]]:
        """Return, once, the work of these futures that found no worker, each with its errno."""
        with self._lock:
            found = [item for item in self._refused if item[0].future in futures]
            self._refused = [item for item in self._refused if item[0].future not in futures]
        return found

    def _refuse(self, work: Submission, number: int) -> None:
        with self._lock:
            self._refused.append((work, number))

    def _start_worker(self) -> Worker:
        here, there = multiprocessing.Pipe()
        name = next(self._names)
        worker = Worker(name, here, self.server.heartbeats[name])
        try:
            with self._lock:
                self.server.fork(name, there.fileno())
                self.workers.append(worker)
            self._wake_write.send_bytes(b"x")
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                here.close()
                raise
            self.server.lost = True
            worker.open, worker.status = False, -signal.SIGKILL
        finally:
            there.close()
        return worker

    def kill(self, worker: Worker, hang: str = "") -> None:
        """Kill a worker and everything that it started; `hang` says why it counts as hung."""
        worker.hang = hang or worker.hang
        self.server.command("kill", worker.name)

    def abandon(self, worker: Worker) -> None:
        """Go on without a worker that does not end after `kill`."""
        if worker.killed:
            reason = worker.hang or "its sweep ended"
            worker.hang = f"{reason}; it cannot be killed (stuck in the kernel) and is left behind"
        else:
            # The server does not obey: it ends with its workers, and a new one starts.
            self.server.kill()
        with contextlib.suppress(OSError), file_descriptors.as_socket(worker.pipe) as channel:
            # The listener may wait for the rest of a message.
            channel.shutdown(socket.SHUT_RDWR)
        self._end(worker)

    def close(self) -> None:
        """End the server, and with it all workers."""
        if self._closing or os.getpid() != self.owner:
            return
        self._closing = True
        self._wake_write.send_bytes(b"x")
        self._listener.join(CLOSE_SECONDS)
        if not self.server.stop():
            self._kill_groups()
        for worker in list(self.workers):
            self._finish(worker)
        self._wake_read.close()
        self._wake_write.close()

    def _kill_groups(self) -> None:
        """Kill what the workers of a dead server started; they themselves died with it."""
        for worker in list(self.workers):
            # A worker leads its process group, so its pid is not reused while members live.
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)

    def _listen(self) -> None:
        """Run in the listening thread."""
        listening = True
        while listening and not self._closing:
            with self._lock:
                pipes = {worker.pipe: worker for worker in self.workers if worker.open}
            for ready in connection.wait([self.server.control, self._wake_read, *pipes]):
                if ready is self._wake_read:
                    self._wake_read.recv_bytes()
                elif ready is self.server.control:
                    listening = self._hear_server()
                else:
                    pipes[ready].hear()  # type: ignore[index]

    def _hear_server(self) -> bool:
        try:
            what, name, detail = self.server.control.recv()
        except (EOFError, OSError):
            self.server.lost = True
            self._kill_groups()
            for worker in list(self.workers):
                worker.status = worker.status if worker.status is not None else -signal.SIGKILL
                self._finish(worker)
            return False
        self.server.serving = True
        with self._lock:
            # Its exit may be reported before `_start_worker` has registered it.
            meant = [worker for worker in self.workers if worker.name == name]
        for worker in meant:
            if what == "killed":
                worker.killed = True
                continue
            if what == "unborn":
                worker.fork_errno, worker.status = detail, 0
            else:
                worker.status, worker.peak_memory = detail
                worker.drain()
            self._finish(worker)
        return True

    def _finish(self, worker: Worker) -> None:
        """Complete the future of a worker that is gone."""
        self._end(worker)
        worker.close()

    def _end(self, worker: Worker) -> None:
        with self._lock:
            if worker in self.workers:
                self.workers.remove(worker)
        work = worker.take_work()
        if work is not None and worker.fork_errno:
            self._refuse(work, worker.fork_errno)
        elif work is not None:
            work.future.set_exception(worker.death())


def _stamp(name: str) -> tuple[Any, ...]:
    """Return a value that changes when the file of a module is edited."""
    file = getattr(sys.modules.get(name), "__file__", None)
    with contextlib.suppress(OSError, TypeError, ValueError):
        found = Path(file or "").stat()
        return file, found.st_mtime_ns, found.st_size
    return (file,)
