"""One node of a Ray cluster: an actor with a process engine. Ray itself is not imported here.

::

    driver (`ray_engine`)             this process, one actor per node         the node
      begin(recipe, data) ──────────►   fork server, process engine
      expect(number, placement) ────►   makes a file of the placement
             Ray ── task `hold` ────►   start(number) ────────────────────────► worker
                      └─ waits until the file is gone: the placement has ended
      poll() ◄── load, events, files ◄─ checkpoints, and logs at the end, are ◄─ scratch
      kill, stop ───────────────────►   read from the scratch folder             folder

The task of a placement computes nothing: it holds the cores, memory and GPU that Ray has granted.
Workers are those of the process engine: forked in milliseconds, pinned, watched by their
heartbeats. What they write goes to a scratch folder, and from there to the driver, in the order of
the events that announce it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import PackedBundle, ProcessEngine
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import NewCheckpoint, RunEvent, Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.reproducibility import CPU, VARIABLES
from asynckfold.store.layout import FINAL
from asynckfold.system import file_descriptors
from asynckfold.system.machine import Machine, resolve_n_jobs
from asynckfold.system.signals import Interruption
from asynckfold.training.job_log import log_path

if TYPE_CHECKING:
    import numpy.typing as npt

SCRATCH = "ASYNCKFOLD_SCRATCH"
"""Variable with the folder that workers of this node write to."""

GATHER_SECONDS = 0.005
"""How long a message waits for others: each poll costs both processes some milliseconds."""

LOAD_SECONDS = 0.1
"""Age at which the load is read again: reading it costs more than sending events."""


class ScratchFolder:
    """Becomes the scratch folder of the node where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], Path], tuple[()]]:
        return _scratch, ()


def _scratch() -> Path:
    return Path(os.environ[SCRATCH])


def _removed_with_this_process(folder: Path) -> IO[bytes]:
    """Let a shell remove a folder once this process has ended, or has closed what is returned.

    It is no child of this process: Ray kills the children of some.
    """
    words = ["sh", "-c", 'exec 3<&0; { cat <&3 >/dev/null; rm -rf "$0"; } &', str(folder)]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file:
        silent = subprocess.DEVNULL
        subprocess.run(words, stdin=file, stdout=silent, stderr=silent, start_new_session=True)
    return os.fdopen(writing, "wb")


@dataclass(frozen=True, eq=False)
class NodeSettings:
    """What a call asks of each node."""

    make_machine: Callable[[], Machine]  # returns the machine as far as the run may use it
    n_jobs: int | str | None  # as `AsyncKFold` has it
    nice: int  # of the workers
    stall_timeout: float | str | None  # as for `ProcessEngine`
    argv: tuple[str, ...]  # the driver's: a model may read them
    variables: Mapping[str, str] = field(  # of the driver, that bits depend on
        default_factory=lambda: {name: os.environ[name] for name in VARIABLES if name in os.environ}
    )


@dataclass(frozen=True)
class Description:
    """A node as its actor describes it."""

    folder: str  # of the actor's files
    cores: int  # that the run may use here
    load: Load
    versions: tuple[str, str]
    processor: str  # kind of it; empty if nobody asked


def versions() -> tuple[str, str]:
    """Return the installed versions of asynckfold and torch."""
    return version("asynckfold"), version("torch")


@dataclass(eq=False)
class _NodePlacement:
    """A placement of this node."""

    number: int
    placement: Placement
    tasks: Sequence[Task]
    future: Future[Answer] | None = None


HOLD_SECONDS = 0.02
"""Interval at which a task of Ray looks whether its placement has ended."""


def hold(actor: Any, path: str, number: int, expected: object = None) -> None:
    """Start a placement, and hold what Ray has granted until it has ended; a task of Ray.

    Waiting by `ray.get` would give the cores back. `expected` is the answer of `RayNode.expect`.
    """
    actor.start.remote(number)
    # The file goes with the folder, too, where the actor has died.
    while Path(path).exists():
        time.sleep(HOLD_SECONDS)


class RayNode:
    """Executes the placements of one node; the driver calls its methods from several threads."""

    def __init__(self, settings: NodeSettings, several: bool) -> None:
        """Start a fork server; the driver has `several` nodes to compare, or this one."""
        os.environ.update(settings.variables)
        sys.argv[:] = settings.argv
        self.folder = Path(tempfile.mkdtemp(prefix="asynckfold-"))
        self._end_of_pipe = _removed_with_this_process(self.folder)
        self._root = self.folder / "run"
        self._root.mkdir()
        os.environ[SCRATCH] = str(self._root)
        self._settings, self._several = settings, several
        self._pool = WorkerPool(nice=settings.nice)
        self._machine = settings.make_machine()
        self._engine: ProcessEngine | None = None
        self._threads = 1
        self._files: list[int] = []
        self._held: dict[int, _NodePlacement] = {}
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._read: tuple[float, Load] | None = None
        self._signals = Interruption()
        self._is_closing = False
        self._lock = threading.RLock()

    def describe(self) -> Description:
        """Return what the driver needs to know of this node."""
        processor = ""
        if self._several:
            # This takes an import of torch.
            from asynckfold.training.software import software

            processor = software(1)[CPU]
        with self._lock:
            cores, load = self._machine.max_cores, self._load()
        return Description(str(self.folder), cores, load, versions(), processor)

    def quit(self) -> None:
        """Leave nothing behind."""
        self.end()
        self._pool.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._end_of_pipe.close()

    def _store(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Keep these arrays, and no others, in files that all workers map."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files = [
            file_descriptors.nameless_file(array.tobytes(), max(1, array.nbytes))
            for array in arrays
        ]

    # Placements

    def begin(self, threads: int, packed: bytes, *arrays: npt.NDArray[Any]) -> None:
        """Start an engine for a bundle; without arrays, with the data of the one before."""
        self.end()
        if arrays:
            self._store(arrays)
        with self._lock:
            self._threads, self._is_closing = threads, False
            self._signals = Interruption()
            bundle, stall = PackedBundle(packed, self._root), self._settings.stall_timeout
            self._engine = ProcessEngine(
                *(bundle, self._files, self._read_load, self._tell, self._pool, stall),
                self._signals,
            )

    def expect(
        self,
        number: int,
        placement: Placement,
        tasks: Sequence[Task],
        files: Mapping[str, bytes],
        begun: object = None,
    ) -> None:
        """Prepare a placement, which starts when Ray has granted its cores.

        `files` are those of earlier attempts, `begun` is the answer of `begin`.
        """
        for name, data in files.items():
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        with self._lock:
            (self.folder / str(number)).touch()
            self._held[number] = _NodePlacement(number, placement, tasks)

    def start(self, number: int) -> None:
        """Start a placement, whose cores Ray has granted."""
        with self._lock:
            held = self._held.get(number)
            if held is not None and held.future is None and self._engine is not None:
                held.future = self._engine.submit(held.placement, held.tasks)
                held.future.add_done_callback(lambda future: self._done(held, future))

    def kill(self, number: int) -> None:
        """End a placement, whether it has started or not."""
        with self._lock:
            held = self._held.get(number)
            if held is not None and held.future is None:
                self._answer(held, WorkerDiedError(0, "it was killed"))
            elif held is not None and held.future is not None and self._engine is not None:
                self._engine.kill(held.future)

    def stop(self, grace_s: float) -> None:
        """End all placements; with `grace_s`, let them save themselves. Ends an earlier wait."""
        with self._lock:
            engine, self._is_closing = self._engine, True
            self._signals.count = 0 if grace_s else 2
            for held in [*self._held.values()]:
                if held.future is None:
                    self._answer(held, Answer([None for _ in held.tasks], 0))
        if engine is not None:
            engine.close(grace_s)

    def _answer(self, held: _NodePlacement, outcome: Answer | BaseException) -> None:
        """Tell how a placement has ended, forget it, and let its task of Ray end."""
        self._messages.put(("answer", held.number, outcome))
        self._held.pop(held.number, None)
        (self.folder / str(held.number)).unlink(missing_ok=True)

    def end(self) -> None:
        """End the engine; its workers stay for the next one."""
        self.stop(0.0)
        with self._lock:
            self._engine = None
            # Nothing is left for the next engine to hear.
            waiting, self._messages = self._messages, queue.SimpleQueue()
        waiting.put(())

    # What the driver hears

    def poll(self, seconds: float) -> tuple[Load, list[tuple[Any, ...]]]:
        """Return the load, and all messages, for the first of which it waits up to `seconds`."""
        messages = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._messages.get(seconds > 1e-3, seconds))
            time.sleep(GATHER_SECONDS)
            while True:
                messages.append(self._messages.get_nowait())
        with self._lock:
            return self._load(), [message for message in messages if message]

    def _load(self) -> Load:
        """Return the load, read again when it is old."""
        if self._read is not None and time.monotonic() - self._read[0] <= LOAD_SECONDS:
            return self._read[1]
        running = [held.placement for held in self._held.values() if held.future is not None]
        if self._engine is None or self._is_closing:
            load = self._read_load(running, {})
        else:
            load = self._engine.load(running)
        self._read = time.monotonic(), load
        return load

    def _read_load(self, running: Sequence[Placement], pins: Mapping[int, tuple[int, ...]]) -> Load:
        count = resolve_n_jobs(self._settings.n_jobs, self._machine.max_cores)
        return self._machine.load(count, running, pins, threads=self._threads)

    def _done(self, held: _NodePlacement, future: Future[Answer]) -> None:
        with self._lock:
            for task in held.tasks:
                for log in self._taken(log_path(self._root, task.job)).values():
                    self._messages.put(("log", task.job, log))
            self._answer(held, future.exception() or future.result())

    def _tell(self, event: RunEvent) -> None:
        """Pass an event on with the files that it announces."""
        files = {}
        if isinstance(event, NewCheckpoint):
            path = self._root / event.ref.file
            files = self._taken(path.with_name(FINAL), path)
        self._messages.put(("event", event, files))

    def _taken(self, *paths: Path) -> dict[str, bytes]:
        """Remove files, and return their content; the next attempt gets checkpoints back."""
        files = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                files[path.relative_to(self._root).as_posix()] = path.read_bytes()
                path.unlink()
        return files
