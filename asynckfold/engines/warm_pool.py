"""The pool of this process that stays warm between two sweeps."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.server_process import library_variables

IDLE_SECONDS = 300.0
"""How long workers stay warm after a sweep: long enough for a notebook's next cell."""


class _Warm:
    """The waiting pool and the timer that ends it."""

    def __init__(self) -> None:
        self.pool: WorkerPool | None = None
        self.timer: threading.Timer | None = None
        self.lock = threading.Lock()

    def pop(self) -> WorkerPool | None:
        with self.lock:
            pool, self.pool = self.pool, None
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None
        return pool


_warm = _Warm()


def take(nice: int = 0, modules: Sequence[str] = ()) -> WorkerPool:
    """Return the warm pool of this process, or a new one if it does not suit.

    Parameters
    ----------
    nice : int
        Lowest niceness of the workers; a running pool cannot lower it.
    modules : sequence of str
        The user's modules that workers import; an edit of their files makes the pool stale.
    """
    pool = _warm.pop()
    if pool is not None and pool.owner == os.getpid() and pool.healthy:
        same = pool.nice == nice and pool.server.libraries == library_variables()
        if same and pool.knows(modules):
            return pool
        pool.close()
    pool = WorkerPool(nice=nice)
    pool.knows(modules)
    return pool


def give_back(pool: WorkerPool, idle_s: float = IDLE_SECONDS) -> None:
    """Keep a pool warm until the next sweep or the idle timeout."""
    with _warm.lock:
        if _warm.pool is None and pool.healthy and idle_s > 0:
            timer = threading.Timer(idle_s, close_warm)
            timer.daemon = True
            # Without a thread for the timer nobody would end the pool.
            with contextlib.suppress(RuntimeError):
                timer.start()
                _warm.pool, _warm.timer = pool, timer
                return
    pool.close()


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


def close_warm() -> None:
    """End the warm pool, if there is one."""
    pool = _warm.pop()
    if pool is not None:
        pool.close()


atexit.register(close_warm)
