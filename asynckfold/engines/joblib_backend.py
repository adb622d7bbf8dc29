"""The joblib engine: placements run in the processes of a registered joblib backend.

::

    submit ──► backend.submit(serve) ──► a process of the backend connects, and speaks the pipe
    a thread for each listens ◄──────────  protocol of `worker.main`

Data arrive as open files over a Unix socket, so the processes must be on this machine. A process
ends its task between two batches when it is asked to, or when this process is gone. It runs one
placement at a time, since the threads of a process share torch's settings, and gets its environment
back. What a backend cannot do: detect a hung job, move a running one, replace a process that user
code changed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace
from functools import cache, partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
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
"""How often in a row a backend may break before one of its processes connects."""

_WATCH_SECONDS = 0.05


def checked() -> tuple[list[Problem], list[str]]:
    """Return why the active backend cannot train, and what a run notes."""
    from joblib.parallel import get_active_backend

    name = type(get_active_backend()[0]).__name__
    if name == "MultiprocessingBackend":
        # By name: Ray's backend derives from this class, and does not fork.
        rule = "engine='joblib' needs a backend that does not fork this process: torch has threads"
        remedy = "Use joblib.parallel_config(backend='loky'), or engine='process'."
        return [Problem(rule, name, remedy)], []
    return [], [
        f"jobs run in the processes of the joblib backend {name}: hung jobs are not detected, and "
        "running jobs are not moved; with n_jobs=1, or a backend of threads, joblib has no "
        "processes, and jobs run one after another in this process"
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
    from joblib.parallel import get_active_backend

    count = n_jobs or get_active_backend()[1] or -1
    with joblib.Parallel(n_jobs=count) as parallel:
        if getattr(parallel._backend, "uses_threads", False):
            yield SerialEngine(bundle, data.open(data.fds), read_load, tell, signals)
            return
        engine = JoblibEngine(bundle, data.fds, read_load, tell, parallel, signals)
        try:
            yield engine
        finally:
            engine.close()


class JoblibEngine:
    """Executes placements in the processes of the backend of an entered `joblib.Parallel`."""

    runs_in_submit = False
    batch_seconds: float | None = None

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
        self._files = [file_descriptors.nameless_file(pack(bundle)), *files]
        # Abstract, so that nothing is left behind; without the key nobody is heard.
        self._address, key = f"\0asynckfold-{secrets.token_hex(16)}", secrets.token_bytes(16)
        self._call = serve, (self._address, key, os.getpid())
        self._listener = Listener(self._address, "AF_UNIX", backlog=64, authkey=key)
        self._numbers = itertools.count()
        self._waiting: dict[int, Submission] = {}
        self._workers: dict[Worker, threading.Thread] = {}
        self._breaks, self._died_at = 0, -SAME_FAULT_SECONDS
        self._closed = False
        self._slots = self._backend.effective_n_jobs(parallel.n_jobs)
        self._backend.start_call()
        self._accepting = threading.Thread(
            target=self._accept, name="asynckfold-joblib", daemon=True
        )
        self._accepting.start()

    @property
    def _backend(self) -> Any:
        return self._parallel._backend

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the machine's load; nothing is idle while all processes have work."""
        workers = [(worker.pid, worker.work) for worker in [*self._workers]]
        load = self._read_load(running, {pid: it.placement.cores for pid, it in workers if it})
        if len(workers) + len(self._waiting) < self._slots:
            return load
        held = {core for placement in running for core in placement.cores}
        return replace(load, idle=tuple(core for core in load.idle if core in held))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Ask the backend for a process."""
        work, number = Submission(placement, tasks, self._tell), next(self._numbers)
        work.future.set_running_or_notify_cancel()
        self._waiting[number] = work
        try:
            self._post(number)
        except Exception:  # noqa: BLE001 - a foreign backend may raise anything
            # A broken pool of processes is replaced when the backend is entered again.
            self._parallel.__exit__(None, None, None)
            self._parallel.__enter__()
            self._backend.start_call()
            try:
                self._post(number)
            except Exception as error:  # noqa: BLE001
                self._give_up(number, error)
        return work.future

    def _post(self, number: int) -> None:
        from joblib.parallel import BatchedCalls

        function, arguments = self._call
        calls = [(function, (*arguments, number), dict[str, Any]())]
        batch = BatchedCalls(calls, self._backend.get_nested_backend())
        submit = getattr(self._backend, "submit", None) or self._backend.apply_async
        submit(batch, callback=partial(self._task_ended, number))

    def _task_ended(self, number: int, outcome: Any) -> None:
        """Run in a thread of the backend."""
        error: BaseException | None = None
        try:
            if self._backend.supports_retrieve_callback:
                self._backend.retrieve_result_callback(outcome)
        except BaseException as raised:  # noqa: BLE001
            error = raised
        self._give_up(number, error)

    def _accept(self) -> None:
        """Run in a thread: have one attend to each process that asks for its placement."""
        while not self._closed:
            try:
                pipe = self._listener.accept()
                number, pid = pipe.recv()
            except (AuthenticationError, EOFError, OSError):
                # Also at the limit of open files: the process waits to be heard.
                time.sleep(_WATCH_SECONDS)
                continue
            work = self._waiting.pop(number, None)
            if work is None:
                pipe.close()
                continue
            self._breaks = 0
            worker = Worker(0, pipe, Heartbeat())
            worker.pid = pid
            worker.assign(work)
            thread = threading.Thread(target=self._attend, args=(worker, work), daemon=True)
            self._workers[worker] = thread
            thread.start()

    def _attend(self, worker: Worker, work: Submission) -> None:
        """Run in a thread of a placement, until it has ended."""
        with worker.pipe:
            with contextlib.suppress(OSError):
                worker.send(work, "sent", self._files)
            while worker.open and worker.work is not None:
                worker.hear()
            if worker.take_work() is not None:
                now = time.monotonic()
                excused = now - self._died_at < SAME_FAULT_SECONDS
                self._died_at = self._died_at if excused else now
                lost = worker.loss("no answer came from this process of the joblib backend", "died")
                _end(work, lost, excused and lost.outcome == "died")
        del self._workers[worker]

    def _give_up(self, number: int, error: BaseException | None) -> None:
        """Give up a placement unless a process has taken it: its task has ended."""
        work = self._waiting.pop(number, None)
        if work is None:
            return
        self._breaks += 1
        if error is None or isinstance(error, BrokenExecutor):
            why = f": {error}" if error else ""
            lost = WorkerDiedError(0, f"no process of the joblib backend took the job{why}")
            _end(work, lost, error is not None and self._breaks <= MOST_BREAKS)
        else:
            line = f"the joblib backend could not run a job: {type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error))
            work.future.set_exception(UnpackError(line, trace))

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """A backend does not say how to move its processes."""

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, end what is left; the backend stays as it was."""
        if self._closed:
            return
        for number in [*self._waiting]:
            self._breaks = 0
            self._give_up(number, BrokenExecutor("the engine closes"))
        if grace_s > 0:
            self._each(lambda worker: worker.pipe.send("stop"))
            self._wait(grace_s)
        if self._workers:
            self._each(_hang_up)
            self._backend.abort_everything(ensure_ready=False)
            self._wait(END_SECONDS)
            self._each(lambda worker: os.kill(worker.pid, signal.SIGKILL))
        for thread in [*self._workers.values()]:
            thread.join(END_SECONDS)
        self._closed = True
        with contextlib.suppress(OSError):
            # Nobody is let in any more.
            Client(self._address).close()
        self._accepting.join(END_SECONDS)
        self._listener.close()
        os.close(self._files[0])
        self._backend.stop_call()

    def _each(self, act: Callable[[Worker], object]) -> None:
        for worker in [*self._workers]:
            with contextlib.suppress(OSError):
                act(worker)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._workers and time.monotonic() < end and not self._signals.urgent():
            time.sleep(_WATCH_SECONDS)


def _end(work: Submission, lost: WorkerDiedError, excused: bool) -> None:
    """End work that has lost its process; if `excused`, it is only interrupted."""
    if excused and work.tasks:
        work.future.set_result(Answer([None for _ in work.tasks], lost.pid))
    else:
        work.future.set_exception(lost)


def _hang_up(worker: Worker) -> None:
    with file_descriptors.as_socket(worker.pipe) as channel:
        channel.shutdown(socket.SHUT_WR)


# In a process of the backend

_one_at_a_time = threading.Lock()

_pid = os.getpid


class _AbandonedError(BaseException):
    """The process of the sweep is gone: its job must not write any more."""


def serve(address: str, key: bytes, sweep: int, number: int) -> None:
    """Run a placement of the engine in process `sweep`, which listens at an address.

    Raises
    ------
    RuntimeError
        The engine is not on this machine, or this is its process.
    """
    if _pid() == sweep:
        raise RuntimeError(
            "the backend runs jobs in threads of the calling process, where all share torch's "
            "settings: use a backend of processes, or engine='serial'"
        )
    if os.getppid() == sweep:
        _end_with(sweep)
    with _one_at_a_time:
        try:
            pipe: Any = Client(address, authkey=key)
        except OSError as error:
            raise RuntimeError(
                f"no sweep answers here ({error.strerror}): the processes of the backend must run "
                "on the machine of the sweep, in its network namespace"
            ) from error
        with pipe, contextlib.suppress(EOFError, OSError):
            pipe.send((number, _pid()))
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
