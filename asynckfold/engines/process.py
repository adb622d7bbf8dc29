"""The process engine: placements run in warm worker processes, pinned to their cores."""

from __future__ import annotations

import math
import mmap
import os
import pickletools
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Answer, Look, Tell
from asynckfold.engines.hung_workers import Hangs
from asynckfold.errors import StorageError
from asynckfold.jobs.messages import Noted, Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.recipe import pack
from asynckfold.system import file_descriptors
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.training.bundle import Bundle


LOOK_SECONDS = 0.05
"""Between two looks at the signals while jobs save themselves."""

ROOM_SECONDS = 10.0
"""What workers may take to end, and to be reaped, that make room for a new one."""

ROOM_TRIES = 3
"""How often a new one is then tried."""


class ProcessEngine:
    """Executes placements in worker processes.

    Parameters
    ----------
    bundle : Bundle
        The sweep; packed once, by value.
    files : sequence of int
        Descriptors of the shared arrays, passed to every worker beside the bundle.
    look : callable
        Reads the load.
    tell : callable
        Receives the news, from another thread.
    pool : WorkerPool
        Where the workers come from; stays with its owner.
    stall_timeout : float, "auto" or None
        Seconds without a finished batch after which a worker hangs: it is killed, and its future
        ends with `WorkerDiedError` of the outcome ``"hang"``.
    signals : Interruption, optional
        Looked at while jobs save themselves: the second ends the wait.
    """

    def __init__(
        self,
        bundle: Bundle,
        files: Sequence[int],
        look: Look,
        tell: Tell,
        pool: pools.WorkerPool,
        stall_timeout: float | str | None = "auto",
        signals: Interruption | None = None,
    ) -> None:
        self._key = os.urandom(8).hex()
        self._packed = file_descriptors.nameless_file(pack(bundle))
        self._files = [self._packed, *files]
        self._look = look
        self._tell = tell
        self._pool = pool
        self._signals = signals or Interruption()
        self._running: dict[Future[Answer], tuple[pools.Worker | None, pools.Work]] = {}
        self._cores: dict[Future[Answer], tuple[int, ...]] = {}
        self._waiting: list[tuple[pools.Work, int]] = []
        self._room_at: dict[Future[Answer], float] = {}
        self._told = False
        self._hangs = Hangs(pool, bundle.root, stall_timeout)

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the machine's load, own workers subtracted; see after the workers meanwhile."""
        self._forget_ended()
        self._hangs.end(worker for worker, _ in self._working())
        self._run_refused()
        own: dict[int, tuple[int, ...]] = {
            worker.pid: () for worker in self._pool.workers if worker.pid
        }
        own |= {
            worker.pid: self._cores.get(work.future, work.placement.cores)
            for worker, work in self._working()
            if worker.pid
        }
        own[self._pool.server_pid] = ()
        load = self._look(running, own)
        if not self._waiting:
            return load
        # What waits for a worker comes first: no core is left for anything new.
        held = {core for placement in running for core in placement.cores}
        return replace(load, idle=tuple(core for core in load.idle if core in held))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Send the placement to an idle worker, starting one if there is none."""
        if not self._pool.healthy:
            self._pool.restart()
        work = pools.Work(placement, tasks, self._tell)
        work.future.set_running_or_notify_cancel()
        self._run(work)
        return work.future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Pin the worker of a placement anew and let it go on, or ask it to pause."""
        worker, work = self._running.get(future, (None, None))
        if worker is None or worker.work is not work:
            return  # it ended just now
        if cores:
            self._pool.pin(worker, cores)
            self._cores[future] = tuple(cores)
        worker.heartbeat.ask(not cores)

    def _run(self, work: pools.Work) -> None:
        self._running[work.future] = (self._pool.run(work, self._key, self._files), work)

    def _working(self) -> list[tuple[pools.Worker, pools.Work]]:
        """The workers that have work of this engine in hand."""
        entries = self._running.values()
        return [(worker, work) for worker, work in entries if worker and worker.work is work]

    def _run_refused(self) -> None:
        """Give work for which no worker could be started to one that became idle, or try again."""
        waiting, self._waiting = [*self._waiting, *self._pool.refused()], []
        for work, number in waiting:
            if work.future not in self._running:
                continue  # of an engine that was closed
            if self._pool.idle_worker(self._key, work.placement) is not None:
                self._run(work)
            elif self._is_to_wait(work):
                self._waiting.append((work, number))
                self._tell_once(f"fewer workers: {pools.refusal(number)}")
            elif time.monotonic() < self._room_at.get(work.future, 0.0):
                # One that ended counts as a process until it is reaped.
                self._room_at[work.future] -= ROOM_SECONDS / ROOM_TRIES
                self._run(work)
            else:
                work.future.set_exception(StorageError(number, pools.refusal(number)))

    def _is_to_wait(self, work: pools.Work) -> bool:
        """Whether a worker may become idle, or is about to make room for a new one by its end.

        Where none works, those that are idle, and of no use to this work, are ended; when they are
        gone, it is tried again, `ROOM_TRIES` times at most.
        """
        workers = list(self._pool.workers)
        if any(worker.alive and worker.busy for worker in workers):
            self._room_at[work.future] = math.inf
            return True
        for worker in workers:
            if worker.alive:
                self._pool.kill(worker, "made room for a new worker")
        now = time.monotonic()
        # Where nobody was there to be waited for, nobody will end.
        until = self._room_at.get(work.future, math.inf if workers else 0.0)
        self._room_at[work.future] = min(until, now + ROOM_SECONDS)
        return bool(workers) and now < self._room_at[work.future]

    def _tell_once(self, text: str) -> None:
        if not self._told:
            self._tell(Noted(None, "workers", text))
        self._told = True

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, kill what is left; the pool stays warm."""
        for work, _ in [*self._waiting, *self._pool.refused()]:
            work.future.set_result(Answer([None for _ in work.tasks], 0))
        self._waiting = []
        self._forget_ended()
        if grace_s > 0:
            for worker, _ in self._working():
                self._pool.signal(worker, signal.SIGTERM)
            self._wait(grace_s)
        self._forget_ended()
        for worker, _ in self._working():
            self._pool.kill(worker)
        wait(list(self._running), timeout=5)
        for worker, _ in self._working():
            self._pool.abandon(worker)
        self._running.clear()
        if self._packed >= 0:
            os.close(self._packed)
            self._packed = -1

    def _wait(self, grace_s: float) -> None:
        end = time.monotonic() + grace_s
        while time.monotonic() < end and not self._signals.urgent():
            if not wait(list(self._running), timeout=LOOK_SECONDS).not_done:
                return

    def _forget_ended(self) -> None:
        self._running = {
            future: entry for future, entry in self._running.items() if not future.done()
        }
        self._cores = {future: self._cores[future] for future in self._cores if not future.done()}
        self._room_at = {
            future: moment for future, moment in self._room_at.items() if not future.done()
        }


def preloads(bundle: Bundle, *, streams: bool) -> list[str]:
    """Return what a server should import besides torch, so that not every worker has to.

    Parameters
    ----------
    bundle : Bundle
        The sweep.
    streams : bool
        Whether workers read the samples one by one, as the user's data set does.

    Returns
    -------
    list of str
        Those of the large libraries that this process has and the workers will want: by what is
        packed for them, or imported by a module to which that refers. A second each would be lost
        by importing what nobody uses.
    """
    here = [name for name in _LARGE if name in sys.modules]
    if streams or not here:
        return here
    words = _words(pack((bundle.recipe, bundle.data)))
    # What stands in __main__ travels by value, with what it refers to.
    modules = [vars(sys.modules[word]) for word in words - {"__main__"} if word in sys.modules]
    owners = {_owner(value) for scope in modules for value in scope.values()}
    owners |= {word.partition(".")[0] for word in words}
    return [name for name in here if name in owners]


def named(packed: int) -> list[str]:
    """Return those of the large libraries that this process has and a packed object names.

    Parameters
    ----------
    packed : int
        Descriptor of a file with a pickle, of any size.
    """
    here = [name for name in _LARGE if name in sys.modules]
    with mmap.mmap(packed, 0, access=mmap.ACCESS_READ) as content:
        return [name for name in here if content.find(name.encode()) >= 0]


_LARGE = ("torchvision", "sklearn")


def _words(packed: bytes) -> set[str]:
    """Names and texts in a pickle, code that travels by value included."""
    return {argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)}


def _owner(value: object) -> str:
    """Return the library that a module, class or function is of."""
    # Of the type: a proxy may raise whatever it is asked.
    if issubclass(type(value), ModuleType):
        return str(vars(value).get("__name__", "")).partition(".")[0]
    if issubclass(type(value), (type, FunctionType)):
        return str(getattr(value, "__module__", "")).partition(".")[0]
    return ""
