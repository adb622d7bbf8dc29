"""Waiting until something may run, running what belongs to no job, and noting the use meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import wait
from typing import Any

from asynckfold.engines.engine import Engine
from asynckfold.errors import NoRoomError
from asynckfold.jobs.placement import Load, Placement
from asynckfold.store import RunStore
from asynckfold.system.signals import Interruption

TICK_SECONDS = 0.25
"""Longest wait before the load is looked at again."""

GAP_SECONDS = 1.0
"""Most of the time between two looks that counts as waiting: this process may have been stopped."""


class Patience:
    """How long nothing could start at all.

    Parameters
    ----------
    max_wait : float or None
        Seconds after which that is told as an error; None: never.
    """

    def __init__(self, max_wait: float | None) -> None:
        self._max_wait = max_wait
        self._waited: float | None = None
        self._looked = 0.0

    def look(self, now: float, obstacle: str) -> bool:
        """Return whether waiting begins now.

        Parameters
        ----------
        now : float
            Seconds of a monotonic clock.
        obstacle : str
            Why nothing can start; empty where it can.

        Raises
        ------
        NoRoomError
            It was too long.
        """
        passed, self._looked = now - self._looked, now
        if not obstacle:
            self._waited = None
            return False
        begins = self._waited is None
        self._waited = 0.0 if self._waited is None else self._waited + min(passed, GAP_SECONDS)
        if self._max_wait is not None and self._waited >= self._max_wait:
            raise NoRoomError(
                f"nothing could start for {self._waited:.0f} s (max_wait): {obstacle}; what was "
                "finished stays, and the same call continues"
            )
        return begins


def room(engine: Engine, max_wait: float | None, signals: Interruption | None = None) -> Load:
    """Wait until something may start, and return the load.

    Raises
    ------
    NoRoomError
        That took too long.
    """
    patience = Patience(max_wait)
    while (load := engine.load([])).blocked:
        patience.look(time.monotonic(), load.blocked)
        time.sleep(TICK_SECONDS)
        if signals is not None:
            signals.check()
    return load


class Sampler:
    """Notes the CPU use, often at first and seldom in a long run.

    Parameters
    ----------
    store : RunStore
        Where it is noted.
    phase : {"packed", "serial"}
        What is running.
    """

    def __init__(self, store: RunStore, phase: str) -> None:
        self._store = store
        self._phase = phase
        self._started = time.monotonic()
        self._next = 0.0

    def look(self, load: Load) -> None:
        """Note the use in `load` when it is time."""
        passed = time.monotonic() - self._started
        if load.use and passed >= self._next:
            self._store.sample(self._phase, sum(load.use), load.own, load.use)
            self._next = passed + max(TICK_SECONDS, passed / 400)


def ask(
    engine: Engine,
    placement: Placement,
    max_wait: float | None = None,
    sampler: Sampler | None = None,
    signals: Interruption | None = None,
) -> Any:
    """Run a placement that belongs to no job (a preflight, a baseline); return its finding.

    Parameters
    ----------
    engine : Engine
        Executes.
    placement : Placement
        With the trainer that answers.
    max_wait : float or None
        Seconds to wait where nothing may start.
    sampler : Sampler, optional
        Notes the CPU use meanwhile.
    signals : Interruption, optional
        Looked at meanwhile.

    Raises
    ------
    WorkerDiedError
        The process ended without an answer.
    NoRoomError
        It could not start for too long.
    """
    room(engine, max_wait, signals)
    future = engine.submit(placement, [])
    while not wait([future], timeout=TICK_SECONDS).done:
        if signals is not None:
            signals.check()
        load = engine.load([placement])
        if sampler is not None:
            sampler.look(load)
    return future.result().results[0]
