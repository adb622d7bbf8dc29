"""What running placements hold of each node, and the capacity that is left for new ones.

::

    Reservations ── capacities(load) ──► a Capacity for each node ──► Cluster: all of them as one
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse, islice
from typing import NamedTuple

from asynckfold.jobs.placement import FULL_SHARE, Gpu, Load, Placement, Request


class _OnGpu(NamedTuple):
    """What jobs hold of a GPU: bytes, and the share of its time that each of them takes."""

    memory: int = 0
    shares: tuple[float, ...] = ()

    def with_(self, item: Request | Placement) -> _OnGpu:
        return _OnGpu(self.memory + item.gpu_memory, (*self.shares, item.gpu_share))

    def without(self, item: Placement) -> _OnGpu:
        at = self.shares.index(item.gpu_share)
        return _OnGpu(self.memory - item.gpu_memory, (*self.shares[:at], *self.shares[at + 1 :]))

    @property
    def share(self) -> float:
        return math.fsum(self.shares)

    @property
    def is_full(self) -> bool:
        # n shares of 1/n may add up to a little less.
        return self.share >= FULL_SHARE - 1e-9


_EMPTY = _OnGpu()


class Reservations:
    """Cores, memory and GPUs of running placements by node, summed incrementally.

    Parameters
    ----------
    placements : iterable of Placement
        What runs.

    Examples
    --------
    >>> running = Reservations([Placement(("a",), (0,))])
    >>> load = Load(cores=(0, 1), idle=(0, 1), free_memory=1)
    >>> running.on("").free_cores(load)
    [1]
    >>> running.remove(Placement(("a",), (0,)))
    >>> running.on("").free_cores(load)
    [0, 1]
    """

    def __init__(self, placements: Iterable[Placement] = ()) -> None:
        self._nodes: dict[str, NodeReservations] = {}
        self._count = 0
        for placement in placements:
            self.add(placement)

    def __len__(self) -> int:
        return self._count

    def add(self, placement: Placement) -> None:
        """Reserve what a placement holds."""
        self._count += 1
        self.on(placement.node).add(placement)

    def remove(self, placement: Placement) -> None:
        """Free what a placement held, which runs."""
        self._count -= 1
        self.on(placement.node).remove(placement)

    def on(self, node: str) -> NodeReservations:
        """Return what is held on a node, also on one that is not seen any more."""
        held = self._nodes.get(node)
        if held is None:
            held = self._nodes[node] = NodeReservations()
        return held

    def capacities(self, load: Load) -> list[Capacity]:
        """Return what is left on each node on which something may start."""
        nodes = [node for node in load.nodes if not node.blocked]
        capacities = [self.on(node.node).capacity(node) for node in nodes]
        return [capacity for capacity in capacities if capacity is not None]


class NodeReservations:
    """What running placements hold of one node.

    Attributes
    ----------
    jobs, threads, memory, alone : int
        Number of placements, reserved cores, reserved bytes, and the number of placements that must
        run alone.
    """

    def __init__(self) -> None:
        self._cores: Counter[int] = Counter()
        self._gpus: dict[int, _OnGpu] = {}
        self._full: set[int] = set()
        self.jobs = self.threads = self.memory = self.alone = 0

    def add(self, placement: Placement) -> None:
        """Reserve what a placement holds."""
        self._cores.update(placement.cores)
        self._count(placement, 1)
        if (index := placement.gpu) is not None:
            on_gpu = self._gpus[index] = self._gpus.get(index, _EMPTY).with_(placement)
            if on_gpu.is_full:
                self._full.add(index)

    def remove(self, placement: Placement) -> None:
        """Free what a placement held, which runs here."""
        _discount(self._cores, placement.cores)
        self._count(placement, -1)
        if (index := placement.gpu) is not None:
            on_gpu = self._gpus[index] = self._gpus[index].without(placement)
            if not on_gpu.is_full:
                self._full.discard(index)

    def _count(self, placement: Placement, sign: int) -> None:
        self.jobs += sign
        # A placement without pinned cores still occupies one core per thread.
        self.threads += sign * (len(placement.cores) or placement.threads)
        self.memory += sign * placement.memory
        self.alone += sign * placement.alone

    def free_cores(self, load: Load) -> list[int]:
        """Return the cores on which something can start, the idlest first.

        Reserved threads count against the idle cores: all jobs together never take more.
        """
        free = max(0, len(load.idle) - self.threads)
        return [*islice(filterfalse(self._cores.__contains__, load.idle), free)]

    def capacity(self, load: Load) -> Capacity | None:
        """Return what is left for new placements; None if no core is."""
        if self.alone or len(load.idle) <= self.threads:
            return None
        return Capacity(
            load.node,
            self.free_cores(load),
            load.free_memory - self.memory,
            [gpu for gpu in load.gpus if gpu.index not in self._full and not gpu.busy],
            dict(self._gpus),
            self.jobs,
        )


def _discount(counts: Counter[int], keys: Iterable[int]) -> None:
    """Subtract one for each key and drop keys that reach zero."""
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


@dataclass
class Capacity:
    """Idle and unreserved cores, memory and GPUs of a node; every placement reduces it."""

    node: str
    cores: list[int]
    memory: int
    gpus: list[Gpu]
    on_gpu: dict[int, _OnGpu]
    jobs: int  # number of placements there
    alone: bool = False  # for one job that must run alone, and for no other

    def fits(self, request: Request) -> bool:
        """Whether a request can start beside the others."""
        return (
            request.threads <= len(self.cores)
            and request.memory <= self.memory
            and request.alone is self.alone
            and (not request.gpu or any(self._fits_on(gpu, request) for gpu in self.gpus))
        )

    def take(self, request: Request) -> Placement:
        """Place a request that fits on the first cores and the least crowded GPU."""
        gpu = self._least_crowded(request) if request.gpu else None
        if gpu is not None:
            on_gpu = self.on_gpu[gpu.index] = self.on_gpu.get(gpu.index, _EMPTY).with_(request)
            if on_gpu.is_full:
                self.gpus.remove(gpu)
        placement = placed(request, self.cores, gpu, self.node)
        del self.cores[: len(self.cores) if self.alone else request.threads]
        self.memory -= request.memory
        self.jobs += 1
        return placement

    def crowd(self, request: Request) -> tuple[float, ...]:
        """Return how much a request that fits would crowd this node: its GPU, or its cores."""
        if not request.gpu:
            return (-len(self.cores),)
        return self._crowd(self._least_crowded(request))

    def _least_crowded(self, request: Request) -> Gpu:
        fitting = (gpu for gpu in self.gpus if self._fits_on(gpu, request))
        return min(fitting, key=self._crowd)

    def _fits_on(self, gpu: Gpu, request: Request) -> bool:
        on_gpu = self.on_gpu.get(gpu.index, _EMPTY)
        beside = not on_gpu.shares or request.gpu_share < FULL_SHARE
        return beside and request.gpu_memory <= usable(gpu) - on_gpu.memory

    def _crowd(self, gpu: Gpu) -> tuple[float, float, int, int]:
        """Order GPUs by what jobs take of their time, by use, and by the memory that is left."""
        on_gpu = self.on_gpu.get(gpu.index, _EMPTY)
        return on_gpu.share, *emptiest(gpu, on_gpu.memory)


class Cluster:
    """The capacities of several nodes; each request is taken by one of them as a whole.

    A job goes where the most cores are left, a GPU job to the least crowded GPU, ties to the first
    node.

    Parameters
    ----------
    nodes : sequence of Capacity
        In the order in which ties are decided.

    Examples
    --------
    >>> cluster = Cluster([Capacity(name, [0, 1], 1, [], {}, 0) for name in "xy"])
    >>> [cluster.take(Request(job, 1.0)).node for job in "abc"], cluster.cores
    (['x', 'y', 'x'], 1)
    """

    def __init__(self, nodes: Sequence[Capacity]) -> None:
        self._nodes = nodes
        self.cores = sum(len(node.cores) for node in nodes)

    def fits(self, request: Request) -> bool:
        """Whether a request can start on any node."""
        return any(node.fits(request) for node in self._nodes)

    def take(self, request: Request) -> Placement:
        """Place a request that fits."""
        fitting = (node for node in self._nodes if node.fits(request))
        node = min(fitting, key=lambda node: node.crowd(request))
        before = len(node.cores)
        placement = node.take(request)
        self.cores += len(node.cores) - before
        return placement


def emptiest(gpu: Gpu, held: int = 0) -> tuple[float, int, int]:
    """Return the sort key of GPUs, the emptiest first: use in tenths, memory left, index.

    >>> gpus = Gpu(0, 30, 80, use=0.5), Gpu(1, 10, 80, use=0.02), Gpu(2, 20, 80, use=0.04)
    >>> [gpu.index for gpu in sorted(gpus, key=emptiest)]
    [2, 1, 0]
    """
    return round(gpu.use, 1), held - usable(gpu), gpu.index


def usable(gpu: Gpu) -> int:
    """Return the bytes of a GPU that all jobs of this run may use together."""
    return gpu.free + gpu.own


EMPTY_SHARE = 0.9
"""Least usable share of a GPU's memory at which a job starts that needs more than there is."""


def may_hold(gpu: Gpu, request: Request) -> bool:
    """Whether a job may start on a GPU without jobs of this run: it fits, or nobody else is there.

    >>> [may_hold(Gpu(0, free, 80), Request("a", 1.0, gpu_memory=90)) for free in (50, 79)]
    [False, True]
    """
    return usable(gpu) >= min(request.gpu_memory, EMPTY_SHARE * gpu.total)


def within(load: Load, held: Sequence[Placement], most: int) -> Load:
    """Return a load with at most so many cores: those of running placements, then idle ones."""
    running = [core for placement in held for core in placement.cores if core in load.cores]
    kept = list(dict.fromkeys([*running, *load.idle, *load.cores]))[:most]
    idle = tuple(core for core in load.idle if core in kept)
    return replace(load, cores=tuple(sorted(kept)), idle=idle)


def placed(
    request: Request, cores: Sequence[int], gpu: Gpu | None = None, node: str = ""
) -> Placement:
    """Return the placement of a request on the first of these cores and a GPU of a node."""
    return Placement(
        request.jobs or (request.job_id,),
        tuple(cores[: request.threads]),
        request.threads,
        None if gpu is None else gpu.index,
        request.memory,
        request.trainer,
        alone=request.alone,
        gpu_memory=request.gpu_memory,
        gpu_share=request.gpu_share,
        gpu_uuid="" if gpu is None else gpu.uuid,
        node=node,
    )
