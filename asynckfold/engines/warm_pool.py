"""The pool of workers that stays warm in this process between two calls."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.server_process import library_variables

IDLE_SECONDS = 300.0
"""How long workers stay warm after a sweep: long enough for a notebook's next cell."""


class Warm:
    """Keeps a pool until the next call takes it, the idle timeout, or the end of the process."""

    def __init__(self) -> None:
        self.kept: WorkerPool | None = None
        self._owner = 0
        self.timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def take(self) -> WorkerPool | None:
        """Return what is kept, which is then the caller's; None in a forked process."""
        with self._lock:
            kept, self.kept = self.kept, None
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None
        return kept if self._owner == os.getpid() else None

    def give_back(self, item: WorkerPool, idle_s: float) -> None:
        """Keep a pool for the next call; close it if one is kept already."""
        with self._lock:
            if self.kept is None and idle_s > 0:
                self.kept, self._owner = item, os.getpid()
                self.timer = threading.Timer(idle_s, self.close)
                self.timer.daemon = True
                self.timer.start()
                # Anew each time: what a library has registered since must run later.
                atexit.unregister(self.close)
                atexit.register(self.close)
                return
        item.close()

    def close(self) -> None:
        """End what is kept, if anything is."""
        kept = self.take()
        if kept is not None:
            kept.close()


_warm = Warm()

close_warm = _warm.close


def take(nice: int = 0, modules: Sequence[str] = ()) -> WorkerPool:
    """Return the warm pool of this process, or a new one if it does not suit.

    Parameters
    ----------
    nice : int
        Lowest niceness of the workers; a running pool cannot lower it.
    modules : sequence of str
        The user's modules that workers import; an edit of their files makes the pool stale.
    """
    pool = _warm.take()
    if pool is not None and pool.healthy:
        same = pool.nice == nice and pool.server.libraries == library_variables()
        if same and pool.knows(modules):
            return pool
    if pool is not None:
        pool.close()
    pool = WorkerPool(nice=nice)
    pool.knows(modules)
    return pool


def give_back(pool: WorkerPool, idle_s: float = IDLE_SECONDS) -> None:
    """Keep a pool warm until the next sweep or the idle timeout."""
    _warm.give_back(pool, idle_s if pool.healthy else 0.0)


@contextmanager
def lent(nice: int, modules: Sequence[str] = ()) -> Iterator[WorkerPool]:
    """Yield the warm pool; keep it warm afterwards unless something was raised."""
    pool = take(nice, modules)
    try:
        yield pool
    except BaseException:
        pool.close()
        raise
    give_back(pool)


def start_early(preload: Sequence[str] = (), nice: int = 0) -> None:
    """Start a server that imports torch while this process does, for a sweep that comes soon."""
    pool = take(nice)
    pool.preload(preload)
    give_back(pool)
