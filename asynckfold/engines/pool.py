"""Warm worker processes: started cheaply by a clean server, kept between sweeps.

::

    this process                       server (torch imported, nothing run)
      control ────── fork, kill ──────►  fork ──► worker ──► worker …
         ◄─────────── exited ──────────          │
      one pipe for each worker ◄─────────────────┘   no lock or queue is shared

A thread listens to all pipes and ends the futures. Nothing is imported again from ``__main__``, so
scripts without a guard, notebooks and ``python -`` work. When this process ends, however it ends,
the control pipe closes, and the server takes all workers along. Nothing here waits without bound:
neither for a worker that cannot be killed nor for a server that does not obey.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
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
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asynckfold.engines.engine import Answer, Tell
from asynckfold.errors import StorageError, UnpackError, WorkerDiedError
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.reproducibility import VARIABLES
from asynckfold.system import file_descriptors, process
from asynckfold.system.heartbeat import Heartbeat, Heartbeats
from asynckfold.system.limits import oom_kills, was_short_of_memory
from asynckfold.system.units import gibibytes

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


_CLOSE_SECONDS = 5.0
"""What each step of closing may take."""


@dataclass(frozen=True, eq=False)
class Work:
    """A placement on its way to its answer."""

    placement: Placement
    tasks: Sequence[Task]
    tell: Tell
    future: Future[Answer] = field(default_factory=Future)


class Worker:
    """One worker process as seen from here."""

    def __init__(self, name: int, pipe: Connection[Any, Any], heartbeat: Heartbeat) -> None:
        self.name = name
        self.pipe = pipe
        self.heartbeat = heartbeat
        self.pid = 0
        self.bundle = ""
        self.used = False
        self.work: Work | None = None
        self.open = True
        self.status: int | None = None
        self.unborn = 0
        self.oom_kills: int | None = None
        self.peak_memory = 0
        self.hang = ""
        self.killed = False

    @property
    def busy(self) -> bool:
        """Whether a placement runs in it."""
        return self.work is not None

    @property
    def alive(self) -> bool:
        """Whether it may take a placement."""
        return self.open and self.status is None and not self.hang


class WorkerPool:
    """A server and its workers.

    Parameters
    ----------
    preload : sequence of str
        What the server imports besides torch.
    nice : int
        Least level of the workers and of what they start.

    Raises
    ------
    StorageError
        The machine refuses a further process, thread or open file.
    """

    def __init__(self, preload: Sequence[str] = (), nice: int = 0) -> None:
        self.owner = os.getpid()
        self.nice = nice
        self.workers: list[Worker] = []
        self._refused: list[tuple[Work, int]] = []
        self._preload = list(preload)
        self._names = itertools.count()
        self._stamps: dict[str, tuple[Any, ...]] = {}
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._closing = self._lost = False
        self.serving = False
        self.libraries = _variables_of_libraries()
        try:
            self._wake_read, self._wake_write = multiprocessing.Pipe(duplex=False)
            file = file_descriptors.nameless_file(size=Heartbeats.SIZE)
            self._heartbeats = Heartbeats(file)
            self._server, self._control = _start_server(file, self._preload, self.nice)
            os.close(file)
            self._listener = threading.Thread(
                target=self._listen, name="asynckfold-listener", daemon=True
            )
            self._listener.start()
        except (OSError, RuntimeError) as error:
            # A thread that cannot be started is told as a RuntimeError, without a number.
            number = getattr(error, "errno", None) or errno.EAGAIN
            raise StorageError(number, refusal(number)) from error

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
        # A server that is dying hangs up before it can be waited for.
        return not (self._closing or self._lost) and self._server.poll() is None

    def knows(self, modules: Sequence[str]) -> bool:
        """Whether no file of these modules was edited since workers may have imported it."""
        stamps = {name: _stamp(name) for name in modules}
        is_same = all(self._stamps.get(name, stamp) == stamp for name, stamp in stamps.items())
        self._stamps.update(stamps)
        return is_same

    def idle_worker(self, bundle: str, placement: Placement) -> Worker | None:
        """Return a worker without work, one that knows the bundle if there is one."""
        with self._lock:
            free = [worker for worker in self.workers if worker.alive and not worker.busy]
        if placement.wants_new_worker(process.has_gpu()):
            free = [worker for worker in free if not worker.used]
        known = [worker for worker in free if worker.bundle == bundle]
        return next(iter(known or free), None)

    def run(self, work: Work, bundle: str, files: Sequence[int]) -> Worker | None:
        """Send work to an idle worker, or a new one; its future ends with its answer or with it.

        Parameters
        ----------
        work : Work
            What to do.
        bundle : str
            Names the bundle, which a worker keeps.
        files : sequence of int
            Descriptors of the bundle and of the shared arrays.

        Returns
        -------
        Worker or None
            None where no further process or file can be opened; the work is then in `refused`, as
            it is later where the server cannot fork.
        """
        try:
            worker = self.idle_worker(bundle, work.placement) or self._start_worker()
        except OSError as error:
            self._refused.append((work, error.errno or errno.EAGAIN))
            return None
        worker.heartbeat.ask(False)
        worker.heartbeat.aside()
        worker.used = True
        with self._lock:
            worker.work = work
            worker.oom_kills = oom_kills()
            gone = worker.status is not None
        try:
            self._give(worker, bundle, files)
            worker.pipe.send(("run", work.placement, list(work.tasks)))
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                self._refuse(worker, error.errno)
                return None
            # It died just now; the server's word ends the future, unless it came before.
            gone = gone or not self.healthy
        if gone:
            self._finish(worker)
        return worker

    def preload(self, names: Sequence[str]) -> None:
        """Let the server import modules, unless it has, for the workers that it forks later."""
        wanted = [name for name in names if name not in self._preload]
        if wanted:
            self._preload += wanted
            self._command(("import", None, wanted))

    def refused(self) -> list[tuple[Work, int]]:
        """Return the work for which no worker could be started, each with the errno, once."""
        with self._lock:
            found, self._refused = self._refused, []
        return found

    def signal(self, worker: Worker, number: int) -> None:
        """Send a signal through the server, which cannot mistake the process."""
        self._command(("signal", worker.name, number))

    def pin(self, worker: Worker, cores: Sequence[int]) -> None:
        """Let all threads of a worker run on these cores only, through the server as well."""
        self._command(("pin", worker.name, tuple(cores)))

    def kill(self, worker: Worker, hang: str = "") -> None:
        """Kill a worker and everything that it started; `hang` says why, where it hangs."""
        worker.hang = hang or worker.hang
        self._command(("kill", worker.name))

    def abandon(self, worker: Worker) -> None:
        """Go on without a worker that does not end though it was to be killed."""
        if worker.killed:
            reason = worker.hang or "its sweep ended"
            worker.hang = f"{reason}; it cannot be killed (stuck in the kernel) and is left behind"
        else:
            # It is the server that does not obey. With it end its workers; a new one starts.
            self._server.kill()
        with contextlib.suppress(OSError), file_descriptors.as_socket(worker.pipe) as channel:
            # The listener may wait for the rest of a message.
            channel.shutdown(socket.SHUT_RDWR)
        self._end(worker)

    def close(self) -> None:
        """End the server, and with it all workers."""
        if self._closing or os.getpid() != self.owner:
            return
        self._closing = True
        self._wake()
        self._listener.join(_CLOSE_SECONDS)
        self._control.close()
        if not self.serving:
            # It is still importing, and has nothing to take along.
            self._server.kill()
        try:
            self._server.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(_CLOSE_SECONDS)
        if self._server.returncode != 0:
            self._kill_groups()
        for worker in list(self.workers):
            self._finish(worker)
        self._wake_read.close()
        self._wake_write.close()

    def _kill_groups(self) -> None:
        """Take along what the workers of a dead server started; they themselves died with it."""
        for worker in list(self.workers):
            # A worker leads its group, whose number is nobody else's while it has members.
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)

    def _wake(self) -> None:
        self._wake_write.send_bytes(b"x")

    def _start_worker(self) -> Worker:
        here, there = multiprocessing.Pipe()
        name = next(self._names)
        worker = Worker(name, here, self._heartbeats[name])
        try:
            with self._lock:
                file_descriptors.send(self._control, ("fork", name), [there.fileno()])
                self.workers.append(worker)
            self._wake()
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                here.close()
                raise
            # The server is gone.
            self._lost = True
            worker.open, worker.status = False, -signal.SIGKILL
        finally:
            there.close()
        return worker

    def _give(self, worker: Worker, bundle: str, files: Sequence[int]) -> None:
        """Send a bundle and the shared arrays, unless the worker has them."""
        if worker.bundle != bundle:
            environment = _environment(os.environ)
            folder = str(Path.cwd())
            message = ("bundle", sys.argv, sys.path, folder, environment, len(files))
            file_descriptors.send(worker.pipe, message, files)
            worker.bundle = bundle

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
            what, name, detail = self._control.recv()
        except (EOFError, OSError):
            self._lost = True
            self._kill_groups()
            for worker in list(self.workers):
                worker.status = worker.status if worker.status is not None else -signal.SIGKILL
                self._finish(worker)
            return False
        self.serving = True
        with self._lock:
            # The word of its end may come before `_start_worker` has noted it.
            meant = [worker for worker in self.workers if worker.name == name]
        for worker in meant:
            if what == "killed":
                worker.killed = True
            elif what == "unborn":
                worker.unborn, worker.status = detail, 0
                self._finish(worker)
            else:
                worker.status, worker.peak_memory = detail
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
        elif kind == "event":
            if worker.work is not None:
                worker.work.tell(content[0])
        else:
            self._answer(worker, kind, content)

    def _answer(self, worker: Worker, kind: str, content: list[Any]) -> None:
        work = self._take_work(worker)
        if work is None:
            return
        ends = kind == "answer" and content[2]
        if ends or work.placement.wants_new_worker(process.has_gpu()):
            # As after "lost": it ends by itself.
            worker.open = False
        if kind == "answer":
            work.future.set_result(Answer(content[0], worker.pid, content[1]))
        elif kind == "storage":
            work.future.set_exception(StorageError(content[0], content[1]))
        elif kind == "lost":
            # It ends by itself; until that is known here, it must not be given anything.
            worker.open = False
            work.future.set_exception(_lost(worker, *content))
        else:
            work.future.set_exception(UnpackError(content[0], content[1]))

    # Both threads

    def _take_work(self, worker: Worker) -> Work | None:
        """Return a worker's work, to whoever comes first."""
        with self._lock:
            work, worker.work = worker.work, None
        return work

    def _refuse(self, worker: Worker, number: int) -> None:
        work = self._take_work(worker)
        if work is not None:
            with self._lock:
                self._refused.append((work, number))

    def _finish(self, worker: Worker) -> None:
        """The worker is gone: end what it was working on."""
        self._end(worker)
        worker.open = False
        worker.pipe.close()

    def _end(self, worker: Worker) -> None:
        with self._lock:
            if worker in self.workers:
                self.workers.remove(worker)
        work = self._take_work(worker)
        if work is not None and worker.unborn:
            # Also where that was heard before it had its work.
            with self._lock:
                self._refused.append((work, worker.unborn))
        elif work is not None:
            work.future.set_exception(_death(worker))


def _death(worker: Worker) -> WorkerDiedError:
    cause, peak = _cause(worker.status), worker.peak_memory
    if worker.hang:
        return WorkerDiedError(worker.pid, worker.hang, "hang", peak)
    if worker.status != -signal.SIGKILL or not was_short_of_memory(worker.oom_kills, peak):
        return WorkerDiedError(worker.pid, cause, peak_memory=peak)
    text = f"{cause}, out of memory at a peak of {gibibytes(peak)}"
    return WorkerDiedError(worker.pid, text, "oom", peak)


def _lost(worker: Worker, cause: str, outcome: str) -> WorkerDiedError:
    """What a worker says itself that cannot go on: a process of its job was killed, say."""
    if outcome == "died" and was_short_of_memory(worker.oom_kills, 0):
        return WorkerDiedError(worker.pid, f"{cause}, out of memory", "oom")
    return WorkerDiedError(worker.pid, cause, outcome)


_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


def refusal(number: int) -> str:
    """Return what it means that the machine starts no worker, and what to do."""
    remedy = (
        "Raise the limit of processes (ulimit -u, or pids.max of the container) or of open files "
        "(ulimit -n), or free memory"
    )
    if number == errno.EFBIG:
        remedy = "Raise the limit of the size of a file (ulimit -f)"
    what = f"no further worker process could be started: {os.strerror(number)}"
    return f"{what}. {remedy}; the same call continues"


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
    heartbeats: int, preload: Sequence[str], nice: int
) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    here, there = multiprocessing.Pipe()
    code = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
        f"from asynckfold.training.worker.fork_server import serve; "
        f"serve({there.fileno()}, {heartbeats}, {json.dumps(list(preload))}, {nice})"
    )
    with there:
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno(), heartbeats],
            env=_environment(os.environ),
            start_new_session=True,
        )
    return server, here


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """One thread while libraries are imported: pools that exist would make a fork unsafe.

    Nor must code of the user's that asks torch whether there is a GPU use CUDA by that, before
    another process is forked to use it.
    """
    return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **given, **_ONE_THREAD}


def _stamp(name: str) -> tuple[Any, ...]:
    """Return what is another after the file of a module was edited."""
    file = getattr(sys.modules.get(name), "__file__", None)
    with contextlib.suppress(OSError, TypeError, ValueError):
        found = Path(file or "").stat()
        return file, found.st_mtime_ns, found.st_size
    return (file,)


def _variables_of_libraries() -> dict[str, str]:
    """Return what libraries read once, when they are loaded: a server has it from its start."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


class _Warm:
    """The pool that waits for the next sweep of this process."""

    def __init__(self) -> None:
        self.pool: WorkerPool | None = None
        self.timer: threading.Timer | None = None
        self.lock = threading.Lock()


_warm = _Warm()


def take(nice: int = 0, modules: Sequence[str] = ()) -> WorkerPool:
    """Return the warm pool of this process, or start one: its level can only be raised.

    Parameters
    ----------
    nice : int
        Least level of the workers.
    modules : sequence of str
        Modules of the user's own that the workers import. Where the file of one was edited since
        workers of the pool did, new ones are started.
    """
    with _warm.lock:
        pool, _warm.pool = _warm.pool, None
        if _warm.timer is not None:
            _warm.timer.cancel()
            _warm.timer = None
    if pool is not None and pool.owner == os.getpid() and pool.healthy:
        same = pool.nice == nice and pool.libraries == _variables_of_libraries()
        if same and pool.knows(modules):
            return pool
        pool.close()
    pool = WorkerPool(nice=nice)
    pool.knows(modules)
    return pool


def start_early(preload: Sequence[str] = (), nice: int = 0) -> None:
    """Let the server import torch and more while this process does, for a sweep that comes soon."""
    pool = take(nice)
    pool.preload(preload)
    give_back(pool)


def give_back(pool: WorkerPool, idle_s: float = IDLE_SECONDS) -> None:
    """Keep a pool warm until the next sweep or the idle timeout."""
    with _warm.lock:
        if _warm.pool is None and pool.healthy and idle_s > 0:
            timer = threading.Timer(idle_s, close_warm)
            timer.daemon = True
            # Where no further thread can be started, nobody would end the pool.
            with contextlib.suppress(RuntimeError):
                timer.start()
                _warm.pool, _warm.timer = pool, timer
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
