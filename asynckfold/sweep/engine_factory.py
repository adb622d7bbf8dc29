"""Makes the engine that trains, by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Engine
from asynckfold.jobs.placement import Command, Load, NodeSize, Placement
from asynckfold.scheduling.reservations import emptiest
from asynckfold.sweep.loop import Inbox
from asynckfold.system.machine import Machine, resolve_n_jobs, watched
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.prepare import PreparedData
    from asynckfold.engines.ray_cluster import RayCluster


@dataclass(frozen=True, eq=False)
class Engines:
    """Makes the engine for a bundle.

    `pool` are the workers of the engine "process", `cluster` the nodes of the engine "ray". With
    `is_here`, this process trains, and workers where it loses its GPU.
    """

    name: str
    pool: pools.WorkerPool | None
    data: PreparedData
    machine: Machine
    inbox: Inbox
    signals: Interruption
    n_jobs: int | str | None
    threads: int
    stall_timeout: float | str | None
    max_wait: float | None
    cluster: RayCluster | None = None
    is_here: bool = False

    @contextmanager
    def __call__(self, bundle: Any) -> Iterator[Engine]:
        """Start an engine for a bundle; it is closed with the context."""
        handle = self.data.handle()
        opened: AbstractContextManager[Engine]
        if self.pool is not None and not self.is_here:
            opened = closing(self._workers(bundle, handle, self.pool))
        elif self.cluster is not None:
            from asynckfold.engines.ray_engine import RayEngine

            opened = closing(
                RayEngine(
                    self.cluster,
                    bundle,
                    self.data,
                    self.inbox.put,
                    self.threads,
                    self.signals,
                    self._most_on_all,
                )
            )
        elif self.name == "joblib":
            from asynckfold.engines.joblib_backend import joblib_engine

            count = resolve_n_jobs(self.n_jobs, self.machine.max_cores)
            opened = joblib_engine(
                bundle, handle, self.read_load, self.inbox.put, count, self.signals
            )
        else:
            from asynckfold.engines.serial import SerialEngine, in_this_process

            batches, spare = handle.open(handle.fds), None
            if self.pool is not None:
                spare = partial(self._workers, bundle, handle, self.pool)
            serial = SerialEngine(
                bundle, batches, self.read_load, self.inbox.put, self.signals, spare
            )
            opened = in_this_process(serial)
        with opened as engine:
            yield engine

    def _workers(self, bundle: Any, handle: Any, pool: pools.WorkerPool) -> Engine:
        from asynckfold.engines.process import ProcessEngine

        timeout, signals = self.stall_timeout, self.signals
        return ProcessEngine(
            bundle, handle.fds, self.read_load, self.inbox.put, pool, timeout, signals
        )

    def read_load(self, running: Sequence[Placement], pins: Mapping[int, tuple[int, ...]]) -> Load:
        """Read the load, for the requested number of jobs."""
        count = resolve_n_jobs(self.n_jobs, self.machine.max_cores)
        return self.machine.load(count, running, pins, threads=self.threads)

    @property
    def _most_on_all(self) -> int | None:
        """Number of cores on all nodes together; a negative `n_jobs` is meant for each."""
        is_count = isinstance(self.n_jobs, int) and self.n_jobs > 0
        return int(self.n_jobs or 1) * self.threads if is_count else None

    @property
    def found_nodes(self) -> dict[str, NodeSize]:
        """The nodes of the cluster at this moment by name, whatever `n_jobs`; none without one."""
        return {} if self.cluster is None else self.cluster.sizes

    @property
    def nodes(self) -> tuple[NodeSize, ...]:
        """What the sweep may use of each of them; empty if there is this machine only."""
        sizes, left, each = self.found_nodes, self._most_on_all, []
        for size in sizes.values():
            if left is None:
                count = resolve_n_jobs(self.n_jobs, size.cores)
                most = size.cores if count is None else count * self.threads
            else:
                most = left
                left -= min(most, size.cores)
            each.append(replace(size, cores=min(size.cores, most)))
        return () if sizes.keys() <= {""} else tuple(size for size in each if size.cores)

    @property
    def allotted(self) -> int:
        """Number of cores that the sweep may use at most, idle or busy."""
        most = self.machine.max_cores
        count = resolve_n_jobs(self.n_jobs, most)
        return most if count is None else min(most, count * self.threads)

    def everything(self, command: Command, threads: int) -> Placement:
        """Return a placement on all unreserved cores."""
        return _on(self.machine.unreserved(), command, threads)

    def undisturbed(
        self, command: Command, threads: int, engine: Engine, *, on_gpu: bool = False
    ) -> Placement:
        """Return a placement on the unreserved cores that other processes leave idle, at least one.

        With `on_gpu`, also on the emptiest GPU, if there is one.

        One thread on a busy core delays all threads of its job: up to 80 times slower was measured.
        """
        load = engine.load([])
        if not self.machine.known:
            watched(self.machine)
            load = engine.load([])
        cores = self.machine.unreserved()
        others = load.others if self.machine.known else ()
        free = [core for core in cores if core not in others] or cores[:1]
        placement = _on(free, command, threads)
        if not (on_gpu and load.gpus):
            return placement
        gpu = min(load.gpus, key=lambda gpu: (gpu.busy, *emptiest(gpu)))
        return replace(placement, gpu=gpu.index, gpu_uuid=gpu.uuid)


def _on(cores: Sequence[int], command: Command, threads: int) -> Placement:
    return Placement((), tuple(cores), min(threads, len(cores)), command=command)
