"""Runs a single task that belongs to no job, waits until it may start, and samples the CPU use."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from itertools import chain
from typing import Any

from asynckfold.engines.engine import Engine
from asynckfold.errors import NoRoomError
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.wait_reasons import blocked_everywhere
from asynckfold.store import RunStore
from asynckfold.system.signals import Interruption

TICK_SECONDS = 0.25
"""Longest interval between readings of the load."""


class Patience:
    """Limits the time during which nothing can start; None: no limit."""

    def __init__(self, max_wait: float | None) -> None:
        self._max_wait = max_wait
        self._since: float | None = None

    def look(self, now: float, obstacle: str) -> bool:
        """Return whether waiting begins now; `obstacle` is empty if something can start.

        Raises
        ------
        NoRoomError
            The time is over.
        """
        begins = self._since is None
        if not obstacle:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        if self._max_wait is not None and now - self._since >= self._max_wait:
            raise NoRoomError(
                f"nothing could start for {now - self._since:.0f} s (max_wait): {obstacle}; "
                "finished jobs are kept, and the same call continues"
            )
        return begins


def room(engine: Engine, max_wait: float | None, signals: Interruption) -> Load:
    """Wait until something may start, and return the load of a node where it may.

    Raises `NoRoomError` after `max_wait`.
    """
    patience = Patience(max_wait)
    while obstacle := blocked_everywhere(load := engine.load([])):
        patience.look(time.monotonic(), obstacle)
        time.sleep(TICK_SECONDS)
        signals.check()
    return next(node for node in load.nodes if not node.blocked)


class Sampler:
    """Records the use of cores and GPUs in a phase: the longer it is, the less often.

    The phase is ``"packed"`` or ``"serial"``; only the first uses GPUs.
    """

    def __init__(self, store: RunStore, phase: str) -> None:
        self._store = store
        self._phase = phase
        self._started = time.monotonic()
        self._next = 0.0

    def look(self, load: Load, *, at_end: bool = False) -> None:
        """Record the use in `load` if a sample is due, or the phase ends."""
        passed = time.monotonic() - self._started
        use = tuple(chain.from_iterable(node.use for node in load.nodes))
        if use and (at_end or passed >= self._next):
            mine = sum(node.own for node in load.nodes)
            self._store.sample(self._phase, sum(use), mine, use)
            if load.gpus and self._phase == "packed":
                use_of = {gpu.index: gpu.use for gpu in load.gpus}
                by_index = [use_of.get(index, -1.0) for index in range(max(use_of) + 1)]
                self._store.sample("gpu", sum(use_of.values()), 0.0, by_index)
            self._next = passed + max(TICK_SECONDS, passed / 400)


def ask(
    engine: Engine,
    placement: Placement,
    max_wait: float | None,
    signals: Interruption,
    sampler: Sampler | None = None,
    tick: Callable[[], None] | None = None,
) -> Any:
    """Run a placement that belongs to no job (a dry run, a baseline); return its finding.

    Meanwhile `tick` is called now and then.

    Raises
    ------
    WorkerDiedError
        The process ended without an answer.
    NoRoomError
        It could not start within `max_wait` seconds.
    """
    node = room(engine, max_wait, signals)
    if node.node and not placement.node:
        # The cores were chosen for this machine.
        placement = replace(placement, node=node.node, cores=node.cores)
    future = engine.submit(placement, [])
    while not wait([future], timeout=TICK_SECONDS).done:
        signals.check()
        load = engine.load([placement])
        if sampler is not None:
            sampler.look(load)
        if tick is not None:
            tick()
    if sampler is not None:
        # An engine in this process returned only now.
        sampler.look(engine.load([placement]), at_end=True)
    return future.result().results[0]
