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
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asynckfold.engines.engine import Answer, Tell
from asynckfold.engines.server_process import (
    CLOSE_SECONDS,
    ServerProcess,
    environment,
    start_failure,
)
from asynckfold.errors import StorageError, UnpackError, WorkerDiedError
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Placement
from asynckfold.system import file_descriptors, process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.system.limits import oom_kills, was_short_of_memory
from asynckfold.system.units import gibibytes


@dataclass(eq=False)
class Submission:
    """A placement, the future of its answer, and its worker."""

    placement: Placement
    tasks: Sequence[Task]
    tell: Tell
    future: Future[Answer] = field(default_factory=Future)
    worker: Worker | None = None
    cores: tuple[int, ...] = ()  # that the worker is pinned to now

    def __post_init__(self) -> None:
        self.cores = self.placement.cores


class Worker:
    """One worker process; the listening thread and the caller's thread share it."""

    def __init__(self, name: int, pipe: Connection[Any, Any], heartbeat: Heartbeat) -> None:
        self.name = name
        self.pipe = pipe
        self.heartbeat = heartbeat
        self.pid = 0
        self.used = False
        self.gpu = ""
        self.work: Submission | None = None
        self.open = True
        self.status: int | None = None
        self.fork_errno = 0
        self.peak_memory = 0
        self.hang = ""
        self.killed = False
        self.bundle = ""
        self._oom_kills: int | None = None
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether it has work."""
        return self.work is not None

    @property
    def alive(self) -> bool:
        """Whether it may take a placement."""
        return self.open and self.status is None and not self.hang

    def assign(self, work: Submission) -> bool:
        """Note its work; return whether the process had ended before."""
        self.heartbeat.ask(False)
        self.heartbeat.begin_long_phase()
        self.used = True
        self.gpu = work.placement.gpu_uuid or self.gpu
        with self._lock:
            self.work = work
            self._oom_kills = oom_kills()
            return self.status is not None

    def take_work(self) -> Submission | None:
        """Return its work, to the first thread that asks."""
        with self._lock:
            work, self.work = self.work, None
        return work

    def close(self) -> None:
        """Close its pipe, once: both threads may find its end at the same time."""
        with self._lock:
            self.open = False
            self.pipe.close()

    def send(self, work: Submission, bundle: str, files: Sequence[int]) -> None:
        """Send work, and before it the bundle with its files unless the worker has it."""
        if self.bundle != bundle:
            folder, variables = str(Path.cwd()), environment(os.environ)
            message = ("bundle", sys.argv, sys.path, folder, variables, len(files))
            file_descriptors.send(self.pipe, message, files)
            self.bundle = bundle
        self.pipe.send(("run", work.placement, list(work.tasks)))

    def hear(self) -> None:
        """Take one message from its pipe."""
        try:
            kind, *content = self.pipe.recv()
        except (EOFError, OSError):
            self.open = False
            return
        if kind == "ready":
            self.pid = content[0]
        elif kind == "events":
            if (work := self.work) is not None:
                for event in content[0]:
                    work.tell(event)
        else:
            self._answer(kind, content)

    def drain(self) -> None:
        """Take the messages that a worker sent before its end.

        A process that it started may hold the pipe open, so that no end of file comes.
        """
        try:
            while self.open and self.pipe.poll(0):
                self.hear()
        except OSError:
            self.open = False

    def _answer(self, kind: str, content: list[Any]) -> None:
        work = self.take_work()
        if work is None:
            return
        ends = kind == "lost" or (kind == "answer" and content[2])
        if ends or work.placement.wants_new_worker(process.has_gpu()):
            # It is about to exit, so it must not be given anything.
            self.open = False
        if kind == "answer":
            work.future.set_result(Answer(content[0], self.pid, content[1]))
        elif kind == "storage":
            work.future.set_exception(StorageError(content[0], content[1]))
        elif kind == "lost":
            work.future.set_exception(self.loss(*content))
        else:
            work.future.set_exception(UnpackError(content[0], content[1]))

    def death(self) -> WorkerDiedError:
        """Return why the process ended without an answer."""
        cause, peak = _cause(self.status), self.peak_memory
        if self.hang:
            return WorkerDiedError(self.pid, self.hang, "hang", peak)
        if self.status != -signal.SIGKILL or not was_short_of_memory(self._oom_kills, peak):
            return WorkerDiedError(self.pid, cause, peak_memory=peak)
        text = f"{cause}, out of memory at a peak of {gibibytes(peak)}"
        return WorkerDiedError(self.pid, text, "oom", peak)

    def loss(self, cause: str, outcome: str) -> WorkerDiedError:
        """Return why a worker gives up its work, such as another rank that was killed."""
        if outcome == "died" and was_short_of_memory(self._oom_kills, 0):
            return WorkerDiedError(self.pid, f"{cause}, out of memory", "oom")
        return WorkerDiedError(self.pid, cause, outcome)


def _cause(status: int | None) -> str:
    if status is None:
        return "its server ended"
    if status >= 0:
        return f"exit code {status} without an answer"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


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

    @property
    def processes(self) -> dict[int, tuple[int, ...]]:
        """The numbers of the server and its workers, each without a pinned core."""
        pids = [self.server.pid, *(worker.pid for worker in self.workers if worker.pid)]
        return dict.fromkeys(pids, ())

    def knows(self, modules: Sequence[str]) -> bool:
        """Whether no file of these modules was edited since workers may have imported it."""
        stamps = {name: _stamp(name) for name in modules}
        is_same = all(self._stamps.get(name, stamp) == stamp for name, stamp in stamps.items())
        self._stamps.update(stamps)
        return is_same

    def lacking(self, names: Sequence[str]) -> list[str]:
        """Return which of these modules the server was not asked to import."""
        return [name for name in names if name not in self._preload]

    def preload(self, names: Sequence[str]) -> None:
        """Let the server import modules for the workers that it forks later."""
        if wanted := self.lacking(names):
            self._preload += wanted
            self.server.preload(wanted)

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
        """Return, once, the work of these futures that got no worker, each with its errno."""
        with self._lock:
            taken = [item for item in self._refused if item[0].future in futures]
            self._refused = [item for item in self._refused if item[0].future not in futures]
        return taken

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
        if what == "serving":
            self.server.has_imported()
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
        status = Path(file or "").stat()
        return file, status.st_mtime_ns, status.st_size
    return (file,)
