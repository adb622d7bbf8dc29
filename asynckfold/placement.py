"""Which pending jobs start now, and where: a pure function of what is pending, running and idle.

No clock, no randomness, no input or output: the engines bring the load, the sweep carries out the
placements, and a simulator can drive the very same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter


@dataclass(frozen=True)
class Gpu:
    """One visible GPU: its index, free and total bytes, and the share of time it is busy."""

    index: int
    free: int
    total: int
    use: float = 0.0


@dataclass(frozen=True)
class Load:
    """One snapshot of the machine, own workers subtracted.

    Parameters
    ----------
    cores : tuple of int
        Cores this run may use: affinity, cgroup quota and ``n_jobs`` applied.
    idle : tuple of int
        Those of them that nobody else uses right now, the idlest first; cores on which only own
        jobs run are among them.
    free_memory : int
        Bytes of memory that jobs of this run may take in all, running ones included.
    gpus : tuple of Gpu
        GPUs this run may use.
    use : tuple of float
        Use of each core of the affinity mask by everyone, 0 to 1; empty when unknown.
    own : float
        Cores' worth of use by this run.
    """

    cores: tuple[int, ...]
    idle: tuple[int, ...]
    free_memory: int
    gpus: tuple[Gpu, ...] = ()
    use: tuple[float, ...] = ()
    own: float = 0.0


@dataclass(frozen=True)
class Request:
    """A pending job as the placement sees it.

    Parameters
    ----------
    job_id : str
        Whose request it is.
    seconds : float
        Expected duration; only orders the queue.
    threads : int
        Threads, and so cores, that the job is planned with.
    memory : int
        Expected bytes of memory.
    gpu : bool
        Whether it must run on a GPU.
    alone : bool
        Whether nothing else may run meanwhile: it was short of memory beside others.
    """

    job_id: str
    seconds: float
    threads: int = 1
    memory: int = 0
    gpu: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Placement:
    """Jobs, the cores and GPU chosen for them, and the trainer that runs them.

    Parameters
    ----------
    jobs : tuple of str
        Job ids; more than one where jobs are trained together.
    cores : tuple of int
        Cores to pin the worker to; empty for no pinning.
    threads : int
        Threads inside the worker.
    gpu : int or None
        Index of the GPU.
    memory : int
        Bytes of memory reserved.
    trainer : str
        Which trainer runs the jobs.
    alone : bool
        Whether nothing else may run meanwhile.
    """

    jobs: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int = 1
    gpu: int | None = None
    memory: int = 0
    trainer: str = "plain"
    alone: bool = False


def place(pending: Sequence[Request], running: Sequence[Placement], load: Load) -> list[Placement]:
    """Choose what starts now.

    Longest expected job first (Graham 1969), ties by job id, so that the order of `pending` does
    not matter. Cores of running jobs are reserved; of the others only idle ones are taken, and
    never more at once than the machine has cores that others leave alone. A request that does not
    fit lets shorter ones pass. One job always runs: with nothing running and nothing that fits, the
    first request whose device is there starts all the same.

    A request that must be alone starts when nothing runs and no other can start, and nothing starts
    beside it: it goes last, so that no core waits for it.

    Parameters
    ----------
    pending : sequence of Request
        Jobs without a result that are not running.
    running : sequence of Placement
        What runs now.
    load : Load
        The machine now.

    Returns
    -------
    list of Placement
        To be started, in this order.

    Examples
    --------
    >>> load = Load(cores=(0, 1), idle=(0, 1), free_memory=1)
    >>> [placement.cores for placement in place([Request("a", 2), Request("b", 3)], [], load)]
    [(0,), (1,)]
    >>> place([Request("a", 2), Request("b", 3)], [], load)[0].jobs
    ('b',)
    """
    if any(placement.alone for placement in running):
        return []
    placed: list[Placement] = []
    rest = _rest(running, load)
    # Nothing idle is the usual answer while jobs run: it costs no look at the queue.
    for request in _longest_first(pending) if rest.cores else ():
        chosen = None if request.alone else _fit(request, rest)
        if chosen is not None:
            placed.append(chosen)
            rest = _rest([*running, *placed], load)
        if not rest.cores:
            break
    return placed if placed or running else _force(pending, load)


def _longest_first(pending: Sequence[Request]) -> Iterator[Request]:
    """Requests by falling seconds, then by job id; only as far as it is read.

    A queue that is in this order already is read in linear time.
    """
    by_seconds = sorted(pending, key=attrgetter("seconds"), reverse=True)
    for _, equals in groupby(by_seconds, key=attrgetter("seconds")):
        yield from sorted(equals, key=attrgetter("job_id"))


@dataclass(frozen=True)
class _Rest:
    """What nobody uses and nothing was promised to: cores, bytes of memory, GPUs."""

    cores: tuple[int, ...]
    memory: int
    gpus: tuple[Gpu, ...]


def _rest(active: Sequence[Placement], load: Load) -> _Rest:
    """What `active` jobs leave: never more cores at once than others leave alone."""
    reserved = {core for placement in active for core in placement.cores}
    room = len(load.idle) - sum(len(item.cores) or item.threads for item in active)
    free = [core for core in load.idle if core not in reserved]
    taken = {placement.gpu for placement in active}
    return _Rest(
        tuple(free[: max(0, room)]),
        load.free_memory - sum(placement.memory for placement in active),
        tuple(gpu for gpu in load.gpus if gpu.index not in taken),
    )


def _fit(request: Request, rest: _Rest) -> Placement | None:
    if len(rest.cores) < request.threads or request.memory > rest.memory:
        return None
    if request.gpu and not rest.gpus:
        return None
    return _placed(request, rest.cores, rest.gpus)


def _force(pending: Sequence[Request], load: Load) -> list[Placement]:
    """At least one job runs, however busy the machine is: the longest that has its device.

    Those that must be alone come after all others.
    """
    order = (*load.idle, *(core for core in load.cores if core not in load.idle))
    for alone in (False, True):
        for request in _longest_first(pending):
            if request.alone is alone and (load.gpus or not request.gpu):
                return [_placed(request, order, load.gpus)]
    return []


def _placed(request: Request, cores: Sequence[int], gpus: Sequence[Gpu]) -> Placement:
    """Put a request on the first of these cores and the GPU with the most free memory.

    One job per GPU: several processes on one GPU were measured slower than one after another.
    """
    gpu = max(gpus, key=lambda gpu: (gpu.free, -gpu.index)).index if request.gpu else None
    return Placement(
        (request.job_id,),
        tuple(cores[: request.threads]),
        request.threads,
        gpu,
        request.memory,
        alone=request.alone,
    )
