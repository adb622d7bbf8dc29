"""One node of a Ray cluster: its process engine, its load, its files. Ray itself is not imported.

::

    driver (`ray_cluster`)            this process, one actor per node         the node
      begin(recipe, data) ──────────►   fork server, process engine
      expect(number, placement) ────►   waits until Ray has granted the cores
                 Ray ── task ──────────►  `hold` connects: the placement starts ──► worker
      poll() ◄── load, events, files ◄─   checkpoints and log lines are read from ◄── scratch
      shift, stop, hurry ───────────►     the scratch folder when they are written     folder

The task of a placement computes nothing. It holds the cores, memory and GPU that Ray has granted,
and its end ends the placement, as when Ray cancels it or kills it for want of memory. Workers are
those of the process engine: forked in milliseconds, pinned, watched by their heartbeats.

The driver's run folder is not needed here. What workers write goes to a scratch folder and from
there to the driver, in the order of the events that tell of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import selectors
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.engines.engine import Answer
from asynckfold.engines.keeper import Keeper
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import PackedBundle, ProcessEngine
from asynckfold.engines.ray_arrays import files_of
from asynckfold.engines.ray_groups import RecentLoad, gathered
from asynckfold.engines.ray_pieces import pieces_of, write_pieces
from asynckfold.engines.ray_warm import installed
from asynckfold.errors import StorageError, UnpackError, WorkerDiedError
from asynckfold.jobs.messages import (
    CheckpointWritten,
    RunEvent,
    Task,
)
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.plan import Job
from asynckfold.store.layout import FINAL
from asynckfold.system.machine import Machine, resolve_n_jobs
from asynckfold.system.signals import Interruption
from asynckfold.training.job_log import LOG_BYTES, log_path

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asynckfold.data.batches import Batches, DataHandle

SCRATCH = "ASYNCKFOLD_SCRATCH"
"""Variable with the folder that workers of this node write to."""

_NUMBER = struct.Struct("q")

_TAKEN = b"t"
"""The answer to a task whose placement starts."""


class ScratchFolder:
    """Becomes the scratch folder of the node where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], Path], tuple[()]]:
        return _scratch, ()


def _scratch() -> Path:
    return Path(os.environ[SCRATCH])


@dataclass(frozen=True, eq=False)
class NodeData:
    """Stands for a `DataHandle`: where the arrays begin in their files is known on the node only.

    The first descriptor is a file with these offsets, in JSON.
    """

    handle: DataHandle

    def open(self, fds: Sequence[int]) -> Batches:
        """Map the arrays."""
        offsets = json.loads(os.pread(fds[0], 1 << 20, 0))
        specs = tuple(
            replace(spec, offset=offset)
            for spec, offset in zip(self.handle.specs, offsets, strict=True)
        )
        return replace(self.handle, specs=specs).open(fds[1:])


@dataclass(eq=False)
class _Held:
    """A placement, the connection of the Ray task that holds its cores, and how it goes on."""

    number: int
    placement: Placement
    tasks: Sequence[Task]
    channel: socket.socket | None = None
    future: Future[Answer] | None = None
    is_paused: bool = False
    log_sizes: dict[str, int] = field(default_factory=dict)


class RayNode:
    """Executes the placements of one node.

    Its methods are called by the driver, from several threads.

    Parameters
    ----------
    make_machine : callable
        Returns the machine as far as the run may use it.
    n_jobs : int, "auto" or None
        As `AsyncKFold` has it.
    nice : int
        Niceness of the workers.
    stall_timeout : float, "auto" or None
        As for `ProcessEngine`.
    argv : sequence of str
        The driver's: a model may read them.
    variables : Mapping
        Environment variables of the driver that bits depend on.
    """

    def __init__(
        self,
        make_machine: Callable[[], Machine],
        n_jobs: int | str | None,
        nice: int,
        stall_timeout: float | str | None,
        argv: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        self._raylet = os.getppid()
        os.environ.update(variables)
        self.folder = Path(tempfile.mkdtemp(prefix="asynckfold-"))
        self._keeper = Keeper(self.folder)
        os.environ[SCRATCH] = str(self.folder / "run")
        (self.folder / "run").mkdir()
        self._is_installed_still = installed()
        self._pool = WorkerPool(nice=nice)
        self._engine: ProcessEngine | None = None
        self._threads = 1
        self._data: tuple[Any, ...] = ()
        self._files: list[int] = []
        self._held: dict[int, _Held] = {}
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._polled = b""
        self._signals = Interruption()
        self._is_closing, self._is_ready = False, True
        self._lock = threading.RLock()
        self._take_up(make_machine, n_jobs, stall_timeout, argv)
        # Abstract: nothing is left behind, and only processes of this node can reach it.
        self.address = f"asynckfold-{os.urandom(16).hex()}"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"\0{self.address}")
        self._server.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        threading.Thread(target=self._listen, name="asynckfold-node", daemon=True).start()

    def _take_up(
        self,
        make_machine: Callable[[], Machine],
        n_jobs: int | str | None,
        stall_timeout: float | str | None,
        argv: Sequence[str],
    ) -> None:
        sys.argv[:] = argv
        self._machine = make_machine()
        self._recent = RecentLoad(self._load)
        self._count = resolve_n_jobs(n_jobs, self._machine.max_cores)
        self._stall_timeout = stall_timeout

    def where(self) -> tuple[str, int, Load]:
        """Return where tasks connect, the cores that a run may use here, and the load."""
        with self._lock:
            return self.address, self._machine.max_cores, self._load()

    def rest(self) -> None:
        """Keep nothing but the fork server: no worker, no data, no file."""
        self._is_ready = False
        self.end()
        # They have imported the user's code, which may be another at the next call.
        for worker in [*self._pool.workers]:
            self._pool.kill(worker, "its sweep ended")
        for descriptor in self._files:
            os.close(descriptor)
        self._files, self._data = [], ()
        # A poll that still waits keeps the old queue.
        waiting, self._messages = self._messages, queue.SimpleQueue()
        waiting.put(())
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        self._is_ready = True

    def renew(
        self,
        make_machine: Callable[[], Machine],
        n_jobs: int | str | None,
        nice: int,
        stall_timeout: float | str | None,
        argv: Sequence[str],
        variables: Mapping[str, str],
    ) -> tuple[str, int, Load] | None:
        """Take up the settings of the next call after `rest`; None if a new actor is needed."""
        is_same = (
            self._is_ready
            and nice == self._pool.nice
            and {**os.environ, **variables} == {**os.environ}
        )
        if not (is_same and self._pool.healthy and self._is_installed_still()):
            return None
        (self.folder / "run").mkdir(exist_ok=True)
        self._take_up(make_machine, n_jobs, stall_timeout, argv)
        return self.where()

    # What the driver asks for

    def begin(self, threads: int, packed: npt.NDArray[np.uint8], *arrays: npt.NDArray[Any]) -> None:
        """Take up a bundle; without arrays, with the data of the one before."""
        self.end()
        if arrays:
            for descriptor in self._files:
                os.close(descriptor)
            # As long as they are referred to here, Ray keeps them in its shared memory.
            self._data = arrays
            self._files = files_of(arrays)
        with self._lock:
            self._threads, self._is_closing = threads, False
            self._signals = Interruption()
            self._engine = ProcessEngine(
                PackedBundle(packed.tobytes(), self.folder / "run"),
                self._files,
                self._read_load,
                self._tell,
                self._pool,
                self._stall_timeout,
                self._signals,
            )

    def expect(
        self,
        number: int,
        placement: Placement,
        tasks: Sequence[Task],
        *before: object,
    ) -> None:
        """Prepare a placement, which starts when Ray has granted its cores.

        `before` are the answers of `begin` and of `receive` for its files.
        """
        root = self.folder / "run"
        sizes = {}
        for task in tasks:
            path = log_path(root, task.job)
            sizes[task.job.id] = path.stat().st_size if path.exists() else 0
        with self._lock:
            self._held[number] = _Held(number, placement, tasks, log_sizes=sizes)

    def forget(self, number: int) -> None:
        """Drop a placement that Ray will not start."""
        with self._lock:
            held = self._held.get(number)
            if held is not None and held.future is None:
                del self._held[number]

    def kill(self, number: int) -> None:
        """End a placement, whether it has begun or not."""
        self.forget(number)
        with self._lock:
            held = self._held.get(number)
            if held is not None and held.future is not None and self._engine is not None:
                self._engine.kill(held.future)

    def shift(self, number: int, cores: Sequence[int], after: object = None) -> None:
        """Move or pause a placement, or let it go on; `after` is the answer of `expect`."""
        with self._lock:
            held = self._held.get(number)
            if held is None:
                return
            held.is_paused = not cores
            if cores:
                held.placement = replace(held.placement, cores=tuple(cores))
            if held.future is not None and self._engine is not None:
                self._engine.shift(held.future, cores)

    def poll(self, seconds: float) -> bytes:
        """Return the load, and all messages, for the first of which it waits up to `seconds`."""
        messages = gathered(self._messages, seconds)
        with self._lock:
            for held in self._held.values():
                messages += self._log_lines(held)
            began = [(one.number, one.placement.cores) for one in self._held.values() if one.future]
            load = self._recent.get(began)
        self._polled = pickle.dumps((load, messages))
        return self._polled

    def again(self, start: int) -> tuple[bytes, ...]:
        """Return some of what the last poll returned, in pieces that need no shared memory."""
        return pieces_of(self._polled, start)

    def receive(self, name: str, size: int, start: int, *pieces: bytes) -> None:
        """Take a part of a file of an earlier attempt, for `expect`."""
        write_pieces(self.folder / "run", name, size, start, pieces)

    def stop(self, grace_s: float) -> None:
        """End all placements; with `grace_s`, let them save themselves."""
        with self._lock:
            engine, self._is_closing = self._engine, True
        if engine is not None:
            engine.close(grace_s)

    def hurry(self) -> None:
        """Stop waiting for placements that save themselves."""
        self._signals.count = 2

    def end(self) -> None:
        """End the engine; the workers stay warm for the next."""
        self.stop(0.0)
        with self._lock:
            self._engine = None
            self._held.clear()
            self._recent = RecentLoad(self._load)

    def quit(self) -> None:
        """Leave nothing behind."""
        self.end()
        self._messages.put(())
        self._pool.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._keeper.close()

    # The load

    def _load(self) -> Load:
        running = [held.placement for held in self._held.values() if held.future is not None]
        if self._engine is None or self._is_closing:
            return self._read_load(running, {})
        return self._engine.load(running)

    def _read_load(self, running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
        return self._machine.load(self._count, running, own, threads=self._threads)

    # The tasks of Ray

    def _listen(self) -> None:
        """Run in the listening thread."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._hang_up(key.fileobj, key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        channel, _ = self._server.accept()
        # A task sends this at once; another process might not.
        channel.settimeout(1.0)
        try:
            (number,) = _NUMBER.unpack(channel.recv(_NUMBER.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            channel.close()
            return
        with self._lock:
            held = self._held.get(number)
            if held is None or held.future is not None or self._is_closing:
                channel.close()
                return
            held.channel = channel
            self._selector.register(channel, selectors.EVENT_READ, number)
            channel.sendall(_TAKEN)
            self._start(held)

    def _start(self, held: _Held) -> None:
        assert self._engine is not None
        self._messages.put(("begun", held.number))
        held.future = self._engine.submit(held.placement, held.tasks)
        if held.is_paused:
            self._engine.shift(held.future, ())
        held.future.add_done_callback(lambda future: self._done(held, future))

    def _hang_up(self, channel: socket.socket, number: int) -> None:
        """Forget a task that has ended; if its placement still runs, that ends as well."""
        self._selector.unregister(channel)
        channel.close()
        with self._lock:
            held = self._held.get(number)
            # All end with the node, this process too: then the jobs are not to blame.
            is_node_lost = os.getppid() != self._raylet
            if held is None or held.future is None or self._engine is None or is_node_lost:
                return
            self._engine.kill(held.future)

    def _done(self, held: _Held, future: Future[Answer]) -> None:
        with self._lock:
            for message in self._log_lines(held):
                self._messages.put(message)
            self._held.pop(held.number, None)
        self._messages.put(("answer", held.number, encoded(future)))
        if held.channel is not None:
            with contextlib.suppress(OSError):
                # The task ends, which frees its cores; the listening thread closes this.
                held.channel.shutdown(socket.SHUT_RDWR)

    # What workers write

    def _tell(self, event: RunEvent) -> None:
        """Pass an event on, and before it the files that it tells of."""
        files = []
        if isinstance(event, CheckpointWritten):
            path = self.folder / "run" / event.ref.file
            for item in (path.with_name(FINAL), path):
                with contextlib.suppress(FileNotFoundError):
                    name = item.relative_to(self.folder / "run").as_posix()
                    files.append((name, item.read_bytes()))
                    # Sent back with the next attempt, if there is one.
                    item.unlink()
        self._messages.put(("event", event, files))

    def _log_lines(self, held: _Held) -> list[tuple[str, Job, bytes]]:
        """Return what has been written to the logs of a placement since the last look."""
        found = []
        for task in held.tasks:
            path, seen = log_path(self.folder / "run", task.job), held.log_sizes[task.job.id]
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < seen:
                    # Its middle was cut out.
                    seen = min(size, LOG_BYTES // 2)
                if size > seen:
                    file.seek(seen)
                    found.append(("log", task.job, file.read(size - seen)))
                held.log_sizes[task.job.id] = max(size, seen)
        return found


def hold(address: str, number: int, ready: object = None) -> None:
    """Hold what Ray has granted until a placement has ended; runs as a task of Ray on its node.

    Raises
    ------
    RuntimeError
        The node does not know the placement.
    """
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(f"\0{address}")
        channel.sendall(_NUMBER.pack(number))
        if channel.recv(1) != _TAKEN:
            raise RuntimeError("the node does not know the placement")
        channel.recv(1)


def encoded(future: Future[Answer]) -> tuple[Any, ...]:
    """Return the outcome of a placement as plain values; some exceptions cannot be pickled."""
    error = future.exception()
    if error is None:
        answer = future.result()
        return ("results", answer.results, answer.pid, answer.peak_memory)
    if isinstance(error, WorkerDiedError):
        return ("died", error.pid, error.cause, error.outcome, error.peak_memory)
    if isinstance(error, UnpackError):
        return ("unpack", error.line, error.trace)
    number = error.errno if isinstance(error, StorageError) else None
    return ("storage", number or 5, getattr(error, "strerror", None) or str(error))


def settle(future: Future[Answer], outcome: Sequence[Any]) -> None:
    """Complete a future by what `encoded` returned."""
    kind, *content = outcome
    if kind == "results":
        future.set_result(Answer(*content))
    elif kind == "died":
        future.set_exception(WorkerDiedError(*content))
    elif kind == "unpack":
        future.set_exception(UnpackError(*content))
    else:
        future.set_exception(StorageError(*content))
