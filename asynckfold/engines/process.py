"""The process engine: placements run in warm worker processes, pinned to their cores."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Answer, Look, Tell
from asynckfold.interruption import Interruption
from asynckfold.messages import Task
from asynckfold.placement import Load, Placement
from asynckfold.recipe import pack

if TYPE_CHECKING:
    from asynckfold.training.bundle import Bundle


LOOK_SECONDS = 0.05
"""Between two looks at the signals while jobs save themselves."""


class ProcessEngine:
    """Executes placements in worker processes.

    Parameters
    ----------
    bundle : Bundle
        The sweep; packed once, by value.
    descriptors : sequence of int
        Of the shared arrays, passed to every worker beside the bundle.
    look : callable
        Reads the load.
    tell : callable
        Receives the news, from another thread.
    pool : WorkerPool
        Where the workers come from; stays with its owner.
    signals : Interruption, optional
        Looked at while jobs save themselves: the second ends the wait.
    """

    def __init__(
        self,
        bundle: Bundle,
        descriptors: Sequence[int],
        look: Look,
        tell: Tell,
        pool: pools.WorkerPool,
        signals: Interruption | None = None,
    ) -> None:
        self._key = os.urandom(8).hex()
        self._packed = _anonymous_file(pack(bundle))
        self._descriptors = [self._packed, *descriptors]
        self._look = look
        self._tell = tell
        self._pool = pool
        self._signals = signals or Interruption()
        self._running: dict[Future[Answer], tuple[pools.Worker, Placement]] = {}

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the machine's load, own workers subtracted."""
        self._forget_ended()
        own: dict[int, tuple[int, ...]] = {
            worker.pid: () for worker in self._pool.workers if worker.pid
        }
        own |= {worker.pid: placed.cores for worker, placed in self._running.values() if worker.pid}
        own[self._pool.server_pid] = ()
        return self._look(running, own)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Send the placement to an idle worker, starting one if there is none."""
        if not self._pool.healthy:
            self._pool.restart()
        worker = self._pool.idle_worker(self._key)
        self._pool.give(worker, self._key, self._descriptors)
        future = self._pool.run(worker, placement, tasks, self._tell)
        self._running[future] = (worker, placement)
        return future

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, kill what is left; the pool stays warm."""
        self._forget_ended()
        if grace_s > 0:
            for worker, _ in self._running.values():
                self._pool.signal(worker, signal.SIGTERM)
            self._wait(grace_s)
        self._forget_ended()
        for worker, _ in self._running.values():
            self._pool.kill(worker)
        wait(list(self._running), timeout=5)
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


def _anonymous_file(data: bytes) -> int:
    """Return the descriptor of a file without a name that holds `data`: nothing to clean up."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("asynckfold", os.MFD_CLOEXEC)
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    return descriptor


def preloads() -> list[str]:
    """Return what a new server imports besides torch: what the caller's code surely needs."""
    return [name for name in ("torchvision", "sklearn") if name in sys.modules]
