"""The joblib engine: placements run in the processes of a registered joblib backend.

::

    submit ──► waiting ───────────────┐
       │                              ▼
       └─► backend.submit(serve) ──► a process of the backend connects, gets the oldest
                                     submission, and speaks the pipe protocol of `worker.main`

The backend only lends processes: which one takes which submission makes no difference. Data arrive
as open files over a Unix socket, so the processes must be on this machine. A process ends its task
between two batches when it is asked to, or when this process is gone. It runs one placement at a
time, since the threads of a process share torch's settings, and gets its environment back. What a
backend cannot do: detect a hung job, move a running one, replace a process that user code changed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, wait
from dataclasses import replace
from functools import cache
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from asynckfold.engines.engine import Answer, Engine, ReadLoad, Tell
from asynckfold.engines.pool import Submission, Worker
from asynckfold.engines.serial import SerialEngine
from asynckfold.errors import Problem, UnpackError, WorkerDiedError
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.recipe import pack
from asynckfold.system import file_descriptors, process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.batches import DataHandle
    from asynckfold.training.bundle import Bundle

END_SECONDS = 5.0
"""Time for jobs to end after their pipe was closed; then their processes are killed."""

SAME_FAULT_SECONDS = 1.0
"""Processes that end this soon after another one were ended by the backend, as loky does."""

MOST_BREAKS = 3
"""How often a backend may break before any of its processes asked for work."""

_WATCH_SECONDS = 0.05


def checked(n_jobs: int | None) -> tuple[list[Problem], list[str]]:
    """Return why the active backend cannot train `n_jobs` at a time, and what a run notes."""
    from joblib.parallel import LokyBackend, MultiprocessingBackend, get_active_backend

    backend = get_active_backend()[0]
    count = _processes(n_jobs)
    name = type(backend).__name__
    if name == "MultiprocessingBackend":
        # By name: Ray's backend derives from this class, and does not fork.
        return [
            Problem(
                "engine='joblib' needs a backend that does not fork this process, which has "
                "torch's threads",
                name,
                "Use joblib.parallel_config(backend='loky'), or engine='process'.",
            )
        ], []
    if getattr(backend, "uses_threads", False):
        return [], [
            f"the joblib backend {name} has no processes, and threads share torch's settings: jobs "
            "run one after another in this process"
        ]
    # Those of joblib, and Ray's, start none for a single job; Dask's are there already.
    starts = isinstance(backend, (LokyBackend, MultiprocessingBackend))
    if starts and backend.effective_n_jobs(count) == 1:
        return [], [
            f"n_jobs={count} asks the joblib backend {name} for one process, and joblib then "
            "starts none: jobs run one after another in this process"
        ]
    return [], [
        f"jobs run in the processes of the joblib backend {name}: hung jobs are not detected, and "
        "running jobs are not moved to other cores"
    ]


@contextlib.contextmanager
def joblib_engine(
    bundle: Bundle,
    data: DataHandle,
    read_load: ReadLoad,
    tell: Tell,
    n_jobs: int | None = None,
    signals: Interruption | None = None,
) -> Iterator[Engine]:
    """Yield the engine for the active joblib backend.

    As in joblib, jobs run in this process where the backend has threads only, or ``n_jobs=1``.

    Parameters
    ----------
    bundle, data, read_load, tell, signals
        As for the other engines.
    n_jobs : int or None
        Processes to ask the backend for; None for those of ``joblib.parallel_config``, else all.
    """
    import joblib

    with joblib.Parallel(n_jobs=_processes(n_jobs)) as parallel:
        if getattr(parallel._backend, "uses_threads", False):
            yield SerialEngine(bundle, data.open(data.fds), read_load, tell, signals)
            return
        engine = JoblibEngine(bundle, data.fds, read_load, tell, parallel, signals)
        try:
            yield engine
        finally:
            engine.close()


def _processes(n_jobs: int | None) -> Any:
    """Return how many processes to ask the backend for, in joblib's words."""
    from joblib.parallel import get_active_backend

    return n_jobs or get_active_backend()[1] or -1


class JoblibEngine:
    """Executes placements in the processes of the backend of an entered `joblib.Parallel`."""

    runs_in_submit = False
    batch_seconds = None

    def __init__(
        self,
        bundle: Bundle,
        files: Sequence[int],
        read_load: ReadLoad,
        tell: Tell,
        parallel: Any,
        signals: Interruption | None = None,
    ) -> None:
        self._read_load, self._tell, self._parallel = read_load, tell, parallel
        self._signals = signals or Interruption()
        self._key = os.urandom(8).hex()
        self._files = [file_descriptors.nameless_file(pack(bundle)), *files]
        self._waiting: deque[Submission] = deque()
        self._workers: dict[Connection[Any, Any], Worker] = {}
        self._tasks = self._breaks = 0
        self._died_at = -SAME_FAULT_SECONDS
        self._names = itertools.count()
        self._lock = threading.RLock()
        self._closed = False
        # An abstract address: nothing is left behind, and only this user's processes are heard.
        self._address = f"\0asynckfold-{os.urandom(16).hex()}"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._address)
        self._server.listen()
        self._wake_read, self._wake_write = Pipe(duplex=False)
        self._slots = self._backend.effective_n_jobs(parallel.n_jobs)
        self._listener = threading.Thread(
            target=self._listen, name="asynckfold-joblib", daemon=True
        )
        self._listener.start()
        self._backend.start_call()

    @property
    def _backend(self) -> Any:
        return self._parallel._backend

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the machine's load; nothing is idle while all processes have work."""
        with self._lock:
            busy = [worker for worker in self._workers.values() if worker.work]
            count = len(busy) + len(self._waiting)
            pinned = {worker.pid: item.placement.cores for worker in busy if (item := worker.work)}
        load = self._read_load(running, pinned)
        if count < self._slots:
            return load
        held = {core for placement in running for core in placement.cores}
        return replace(load, idle=tuple(core for core in load.idle if core in held))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Ask the backend for a process, which takes the oldest waiting placement."""
        work = Submission(placement, tasks, self._tell)
        work.future.set_running_or_notify_cancel()
        with self._lock:
            self._waiting.append(work)
            self._tasks += 1
        try:
            self._post()
        except Exception:  # noqa: BLE001 - a foreign backend may raise anything
            # A broken pool of processes is replaced when the backend is entered again.
            self._parallel.__exit__(None, None, None)
            self._parallel.__enter__()
            self._backend.start_call()
            try:
                self._post()
            except Exception as error:  # noqa: BLE001
                self._end_task(error)
        return work.future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """A backend does not say how to move its processes."""

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, end what is left; the backend stays as it was."""
        if self._closed:
            return
        with self._lock:
            for work in self._waiting:
                work.future.set_result(Answer([None for _ in work.tasks], 0))
            self._waiting.clear()
        if grace_s > 0:
            self._each_busy(lambda worker: worker.pipe.send("stop"))
            self._wait(grace_s)
        if self._busy():
            self._each_busy(_hang_up)
            self._backend.abort_everything(ensure_ready=False)
            self._wait(END_SECONDS)
            self._each_busy(lambda worker: os.kill(worker.pid, signal.SIGKILL))
            wait([worker.work.future for worker in self._busy() if worker.work], END_SECONDS)
        self._closed = True
        self._wake_write.send_bytes(b"x")
        self._listener.join()
        self._server.close()
        for pipe in (self._wake_read, self._wake_write, *self._workers):
            pipe.close()
        os.close(self._files[0])
        self._backend.stop_call()

    def _busy(self) -> list[Worker]:
        with self._lock:
            return [worker for worker in self._workers.values() if worker.work]

    def _each_busy(self, act: Callable[[Worker], object]) -> None:
        for worker in self._busy():
            with contextlib.suppress(OSError):
                act(worker)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._busy() and time.monotonic() < end and not self._signals.urgent():
            time.sleep(_WATCH_SECONDS)

    def _post(self) -> None:
        from joblib.parallel import BatchedCalls

        calls = [(serve, (self._address,), dict[str, Any]())]
        batch = BatchedCalls(calls, self._backend.get_nested_backend())
        submit = getattr(self._backend, "submit", None) or self._backend.apply_async
        submit(batch, callback=self._task_ended)

    def _task_ended(self, outcome: Any) -> None:
        """Run in a thread of the backend when a task of it has ended."""
        try:
            if self._backend.supports_retrieve_callback:
                self._backend.retrieve_result_callback(outcome)
        except BaseException as error:  # noqa: BLE001
            self._end_task(error)
        else:
            self._end_task(None)

    def _end_task(self, error: BaseException | None) -> None:
        """Give up the work that no task is left for: a task ended without asking for any."""
        with self._lock:
            self._tasks -= 1
            surplus = len(self._waiting) - self._tasks
            lost = [self._waiting.popleft() for _ in range(surplus)]
            self._breaks += bool(lost)
            excused = isinstance(error, BrokenExecutor) and self._breaks <= MOST_BREAKS
        for work in lost:
            if error is None or isinstance(error, BrokenExecutor):
                why = f": {error}" if error else ""
                self._give_up(
                    work, 0, f"no process of the joblib backend took the job{why}", excused
                )
            else:
                line = f"the joblib backend could not run a job: {type(error).__name__}: {error}"
                text = "".join(traceback.format_exception(error))
                work.future.set_exception(UnpackError(line, text))

    def _give_up(self, work: Submission, pid: int, cause: str, excused: bool) -> None:
        """End work that has lost its process; if `excused`, it is only interrupted."""
        if excused and work.tasks:
            work.future.set_result(Answer([None for _ in work.tasks], pid))
        else:
            work.future.set_exception(WorkerDiedError(pid, cause))

    def _listen(self) -> None:
        """Run in the listening thread."""
        while not self._closed:
            for ready in connection.wait([self._server, self._wake_read, *self._workers]):
                if ready is self._server:
                    self._accept()
                elif ready is not self._wake_read:
                    self._hear(self._workers[ready])  # type: ignore[index]

    def _accept(self) -> None:
        try:
            channel, _ = self._server.accept()
        except OSError:
            # At the limit of open files: the process waits to be heard.
            time.sleep(_WATCH_SECONDS)
            return
        pid, user = _peer(channel)
        pipe: Connection[Any, Any] = Connection(channel.detach())
        with self._lock:
            welcome = user == os.getuid() and pid != os.getpid() and self._waiting
            if not welcome:
                pipe.close()
                return
            work = self._waiting.popleft()
            self._breaks = 0
            worker = Worker(next(self._names), pipe, Heartbeat())
            worker.pid = pid
            worker.assign(work)
            self._workers[pipe] = worker
        try:
            worker.send(work, self._key, self._files)
        except OSError:
            self._lose(worker)

    def _hear(self, worker: Worker) -> None:
        worker.hear()
        if not worker.open or not worker.work:
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        """Close the pipe of a process that has answered, or has ended."""
        with self._lock:
            work = worker.take_work()
            del self._workers[worker.pipe]
        worker.pipe.close()
        if work is not None:
            now = time.monotonic()
            excused = now - self._died_at < SAME_FAULT_SECONDS
            self._died_at = self._died_at if excused else now
            cause = "no answer came from this process of the joblib backend"
            lost = worker.loss(cause, "died")
            if lost.outcome == "oom":
                work.future.set_exception(lost)
            else:
                self._give_up(work, worker.pid, cause, excused)


def _hang_up(worker: Worker) -> None:
    with file_descriptors.as_socket(worker.pipe) as channel:
        channel.shutdown(socket.SHUT_WR)


def _peer(channel: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


# In a process of the backend

_one_at_a_time = threading.Lock()


class _AbandonedError(BaseException):
    """The process of the sweep is gone: its job must not write any more."""


def serve(address: str) -> None:
    """Run one placement of the engine at an address, if it has any left.

    Raises
    ------
    RuntimeError
        The engine is not on this machine, or this is its own process.
    """
    with _one_at_a_time, contextlib.closing(socket.socket(socket.AF_UNIX)) as channel:
        try:
            channel.connect(address)
        except OSError as error:
            raise RuntimeError(
                f"no sweep answers here ({error.strerror}): the processes of the backend must run "
                "on the machine of the sweep, in its network namespace"
            ) from error
        sweep, _ = _peer(channel)
        if sweep == os.getppid():
            _end_with(sweep)
        if sweep == os.getpid():
            raise RuntimeError(
                "the backend runs jobs in threads of the calling process, where all share torch's "
                "settings: use a backend of processes, or engine='serial'"
            )
        with Connection(channel.detach()) as pipe, contextlib.suppress(EOFError, OSError):
            _run(pipe)


@cache
def _end_with(parent: int) -> None:
    """End this process with its parent: nobody else can use the parent's pool of processes."""
    with contextlib.suppress(OSError):
        watched = os.pidfd_open(parent)

        def watch() -> None:
            select.select([watched], [], [])
            os._exit(1)

        threading.Thread(target=watch, name="asynckfold-parent", daemon=True).start()


def _run(pipe: Connection[Any, Any]) -> None:
    from asynckfold.training import seeding
    from asynckfold.training.worker.main import WorkerState

    class Guest(WorkerState):
        """A worker in a process of others: it goes on, whatever user code left behind."""

        ends = False

        def tell(self, event: Any) -> None:
            self.send(event)

    stopping, poller = False, select.poll()
    poller.register(pipe.fileno(), select.POLLIN)

    def stop() -> bool:
        nonlocal stopping
        if not stopping and poller.poll(0):
            try:
                stopping = pipe.recv() == "stop"
            except (EOFError, OSError):
                raise _AbandonedError from None
        return stopping

    with _restored(), seeding.preserved():
        guest = Guest(pipe, stop)
        _, *described = pipe.recv()
        guest.take_bundle(*described)
        _, placement, tasks = pipe.recv()
        answer = guest.run(placement, tasks)
    guest.send_kept()
    pipe.send(answer)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Give the process its folder, arguments, environment, cores and Ctrl-C back afterwards."""
    argv, paths, variables = [*sys.argv], [*sys.path], dict(os.environ)
    cores = sorted(os.sched_getaffinity(0))
    folder = os.open(".", os.O_PATH)
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGINT, handler)
        process.pin(0, cores)
        os.fchdir(folder)
        os.close(folder)
        sys.argv[:], sys.path[:] = argv, paths
        os.environ.clear()
        os.environ.update(variables)
