"""Makes the engine that trains: worker processes, or this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Engine
from asynckfold.engines.process import ProcessEngine
from asynckfold.engines.serial import SerialEngine
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.reservations import usable
from asynckfold.sweep.loop import Inbox
from asynckfold.system.machine import Machine, resolve_n_jobs, watched
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.prepare import Prepared


@dataclass(frozen=True, eq=False)
class Engines:
    """Makes the engine for a bundle: worker processes, or this process."""

    pool: pools.WorkerPool | None
    data: Prepared
    machine: Machine
    inbox: Inbox
    signals: Interruption
    n_jobs: int | str
    threads: int
    stall_timeout: float | str | None
    max_wait: float | None

    @contextmanager
    def __call__(self, bundle: Any) -> Iterator[Engine]:
        """Start an engine for a bundle; it is closed with the context."""
        handle = self.data.handle()
        engine: Engine
        if self.pool is None:
            batches = handle.open(handle.fds)
            engine = SerialEngine(bundle, batches, self.look, self.inbox.put, self.signals)
        else:
            engine = ProcessEngine(
                bundle,
                handle.fds,
                self.look,
                self.inbox.put,
                self.pool,
                self.stall_timeout,
                self.signals,
            )
        try:
            yield engine
        finally:
            engine.close()

    def look(self, running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
        """Read the load, for the number of jobs that the caller asked for."""
        count = resolve_n_jobs(self.n_jobs, self.machine.max_cores)
        return self.machine.load(count, running, own, threads=self.threads)

    @property
    def allotted(self) -> int:
        """Number of cores that the sweep may use at most, idle or busy."""
        most = self.machine.max_cores
        count = resolve_n_jobs(self.n_jobs, most)
        return most if count is None else min(most, count * self.threads)

    def everything(self, trainer: str, threads: int) -> Placement:
        """Return a placement on all unreserved cores."""
        return _on(self.machine.unreserved(), trainer, threads)

    def undisturbed(
        self, trainer: str, threads: int, engine: Engine, *, on_gpu: bool = False
    ) -> Placement:
        """Return a placement on the unreserved cores that other processes leave idle, at least one.

        With `on_gpu`, also on the GPU with the most free memory, if there is one.

        One thread on a busy core delays all threads of its job: up to 80 times slower was measured.
        """
        load = engine.load([])
        if not self.machine.known:
            watched(self.machine)
            load = engine.load([])
        cores = self.machine.unreserved()
        others = load.others if self.machine.known else ()
        free = [core for core in cores if core not in others] or cores[:1]
        gpu = max(load.gpus, key=usable).index if on_gpu and load.gpus else None
        return replace(_on(free, trainer, threads), gpu=gpu)


def _on(cores: Sequence[int], trainer: str, threads: int) -> Placement:
    return Placement((), tuple(cores), min(threads, len(cores)), trainer=trainer)
