"""The process engine: placements run in warm worker processes, pinned to their cores."""

from __future__ import annotations

import mmap
import os
import pickletools
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from asynckfold.engines.engine import Answer, ReadLoad, Tell
from asynckfold.engines.pool import Submission, Worker, WorkerPool
from asynckfold.engines.server_process import start_failure
from asynckfold.errors import StorageError
from asynckfold.jobs.messages import Note, Task
from asynckfold.jobs.placement import Command, Load, Placement
from asynckfold.jobs.recipe import pack
from asynckfold.scheduling.stall_detection import StallAction, StallDetector, Step
from asynckfold.system import file_descriptors
from asynckfold.system.heartbeat import STACKS_SIGNAL
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.training.bundle import Bundle


CHECK_SECONDS = 0.05
"""Interval between checks for signals while jobs save themselves."""


@dataclass(frozen=True)
class PackedBundle:
    """A bundle that another process has packed, and the folder that its jobs write to."""

    content: bytes
    root: Path


class ProcessEngine:
    """Executes placements in worker processes.

    A worker without a finished batch for `stall_timeout` seconds is killed; its future then ends
    with a `WorkerDiedError` of outcome ``"hang"``. A second signal ends the wait for jobs that save
    themselves.
    """

    runs_in_submit = False
    batch_seconds: float | None = None

    def __init__(
        self,
        bundle: Bundle | PackedBundle,
        files: Sequence[int],
        read_load: ReadLoad,
        tell: Tell,
        pool: WorkerPool,
        stall_timeout: float | str | None = "auto",
        signals: Interruption | None = None,
    ) -> None:
        self._key = os.urandom(8).hex()
        packed = bundle.content if isinstance(bundle, PackedBundle) else pack(bundle)
        self._packed = file_descriptors.nameless_file(packed)
        self._files = [self._packed, *files]
        self._read_load = read_load
        self._tell = tell
        self._pool = pool
        self._signals = signals or Interruption()
        self._submitted: dict[Future[Answer], Submission] = {}
        self._waiting: list[tuple[Submission, int]] = []
        self._shortage_reported = False
        self._hung = HungWorkers(pool, bundle.root, stall_timeout)

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the machine's load without these workers; handle hung and refused ones."""
        self._forget_done()
        self._hung.end(worker for worker, _ in self._busy())
        self._run_refused()
        pinned = self._pool.processes
        pinned |= {worker.pid: item.cores for worker, item in self._busy() if worker.pid}
        load = self._read_load(running, pinned)
        if not self._waiting:
            return load
        # Work that waits for a worker comes first: no idle core is offered for anything new.
        held = {core for placement in running for core in placement.cores}
        return replace(load, idle=tuple(core for core in load.idle if core in held))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Send the placement to an idle worker, starting one if there is none."""
        if not self._pool.healthy:
            self._pool.restart()
        work = Submission(placement, tasks, self._tell)
        work.future.set_running_or_notify_cancel()
        self._submitted[work.future] = work
        self._run(work)
        return work.future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Pin the worker of a placement to other cores and resume it, or ask it to pause."""
        work = self._submitted.get(future)
        if work is None or work.worker is None or work.worker.work is not work:
            return  # it has just ended
        if cores:
            self._pool.server.pin(work.worker.name, cores)
            work.cores = tuple(cores)
        work.worker.heartbeat.ask(not cores)

    def kill(self, future: Future[Answer]) -> None:
        """Kill the worker of a placement."""
        work = self._submitted.get(future)
        if work is not None and work.worker is not None and work.worker.work is work:
            self._pool.kill(work.worker)

    def _run(self, work: Submission) -> None:
        work.worker = self._pool.run(work, self._key, self._files)

    def _run_refused(self) -> None:
        """Run refused work on a worker that became idle; fail it if none will."""
        waiting, self._waiting = [*self._waiting, *self._pool.refused(self._submitted)], []
        for work, number in waiting:
            if self._pool.idle_worker(self._key, work.placement) is not None:
                self._run(work)
            elif any(worker.alive and worker.busy for worker in list(self._pool.workers)):
                self._waiting.append((work, number))
                if not self._shortage_reported:
                    text = f"fewer workers: {start_failure(number)}"
                    self._tell(Note(None, "workers", text))
                self._shortage_reported = True
            else:
                work.future.set_exception(StorageError(number, start_failure(number)))

    def _busy(self) -> list[tuple[Worker, Submission]]:
        """Return the workers that execute work of this engine."""
        works = self._submitted.values()
        return [(it.worker, it) for it in works if it.worker and it.worker.work is it]

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, kill what is left; the pool stays warm."""
        for work, _ in [*self._waiting, *self._pool.refused(self._submitted)]:
            work.future.set_result(Answer([None for _ in work.tasks], 0))
        self._waiting = []
        self._forget_done()
        if grace_s > 0:
            for worker, _ in self._busy():
                self._pool.server.signal(worker.name, signal.SIGTERM)
            end = time.monotonic() + grace_s
            while time.monotonic() < end and not self._signals.urgent():
                if not wait(list(self._submitted), timeout=CHECK_SECONDS).not_done:
                    break
        self._forget_done()
        for worker, _ in self._busy():
            self._pool.kill(worker)
        wait(list(self._submitted), timeout=5)
        for worker, _ in self._busy():
            self._pool.abandon(worker)
        self._submitted.clear()
        if self._packed >= 0:
            os.close(self._packed)
            self._packed = -1

    def _forget_done(self) -> None:
        self._submitted = {
            future: item for future, item in self._submitted.items() if not future.done()
        }


def preloads(bundle: Bundle, *, streams: bool) -> list[str]:
    """Return the large libraries that a server should import once for all workers.

    Parameters
    ----------
    bundle : Bundle
        The sweep.
    streams : bool
        Whether workers read the samples one by one from the user's dataset.

    Returns
    -------
    list of str
        Libraries that this process has imported and that the packed bundle, or a module it refers
        to, uses. Importing one that nobody uses would cost a second.
    """
    here = [name for name in _LARGE if name in sys.modules]
    if streams or not here:
        return here
    words = _words(pack((bundle.recipe, bundle.data)))
    # Objects of __main__ are packed by value, with all they refer to.
    modules = [vars(sys.modules[word]) for word in words - {"__main__"} if word in sys.modules]
    owners = {_owner(value) for scope in modules for value in scope.values()}
    owners |= {word.partition(".")[0] for word in words}
    return [name for name in here if name in owners]


def named(packed: int) -> list[str]:
    """Return the large libraries, imported here, that the pickle in this open file names."""
    here = [name for name in _LARGE if name in sys.modules]
    with mmap.mmap(packed, 0, access=mmap.ACCESS_READ) as content:
        return [name for name in here if content.find(name.encode()) >= 0]


_LARGE = ("torchvision", "sklearn")


def _words(packed: bytes) -> set[str]:
    """Return all strings in a pickle, including those of code packed by value."""
    return {argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)}


def _owner(value: object) -> str:
    """Return the library of a module, class or function."""
    # issubclass of the type, since isinstance may run code of a proxy.
    if issubclass(type(value), ModuleType):
        return str(vars(value).get("__name__", "")).partition(".")[0]
    if issubclass(type(value), (type, FunctionType)):
        return str(getattr(value, "__module__", "")).partition(".")[0]
    return ""


UNWATCHED = (Command.MEASURE, Command.ESTIMATE)
"""What is timed: the loops run as outside, without heartbeats."""


class HungWorkers:
    """Watches the workers of one engine."""

    def __init__(self, pool: WorkerPool, root: Path, timeout: float | str | None) -> None:
        self._pool = pool
        self._root = root
        self._detector: StallDetector = StallDetector(timeout)

    def end(self, workers: Iterable[Worker]) -> None:
        """Take the next step against each worker that hangs; never waits."""
        watched = {
            worker.work.future: worker
            for worker in workers
            if worker.work is not None and worker.work.placement.command not in UNWATCHED
        }
        # While the server imports torch it starts no worker, so silence means nothing.
        heartbeats = {key: worker.heartbeat.value for key, worker in watched.items()}
        paused = {key for key, worker in watched.items() if worker.heartbeat.paused}
        observed = heartbeats if self._pool.server.serving else {}
        for verdict in self._detector.look(time.monotonic(), observed, paused):
            worker = watched[verdict.key]
            if verdict.step is Step.STACKS:
                self._pool.server.signal(worker.name, STACKS_SIGNAL)
            elif verdict.step is Step.KILL:
                self._pool.kill(worker, self._cause(worker, verdict))
            else:
                self._pool.abandon(worker)

    def _cause(self, worker: Worker, verdict: StallAction) -> str:
        text = f"hang, no batch was finished for {verdict.silent_seconds:.1f} s"
        if worker.work is None or not worker.work.tasks:
            return text
        from asynckfold.training.job_log import log_path

        path = log_path(self._root, worker.work.tasks[0].job).relative_to(self._root)
        return f"{text}; its stacks, if it could give them, are in {path}"
