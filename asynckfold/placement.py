"""Which pending jobs start now, and where: a pure function of what is pending, running and idle.

No clock, no randomness, no input or output: the engines bring the load, the sweep carries out the
placements, and a simulator can drive the very same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
        Use of each of `cores` by everyone, 0 to 1; empty when unknown.
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
    """

    job_id: str
    seconds: float
    threads: int = 1
    memory: int = 0
    gpu: bool = False


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
    """

    jobs: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int = 1
    gpu: int | None = None
    memory: int = 0
    trainer: str = "plain"


def place(pending: Sequence[Request], running: Sequence[Placement], load: Load) -> list[Placement]:
    """Choose what starts now.

    Longest expected job first (Graham 1969), ties by job id, so that the order of `pending` does
    not matter. Cores of running jobs are reserved; of the others only idle ones are taken, and
    never more at once than the machine has cores that others leave alone. One job always runs: with
    nothing running and nothing idle, the first request gets the first cores.

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
    queue = sorted(pending, key=lambda request: (-request.seconds, request.job_id))
    placed: list[Placement] = []
    for request in queue:
        active = [*running, *placed]
        chosen = _fit(request, active, load)
        if chosen is None and not active:
            chosen = _force(request, load)
        if chosen is not None:
            placed.append(chosen)
        elif _room(active, load) <= 0:
            break
    return placed


def _room(active: Sequence[Placement], load: Load) -> int:
    """Cores that others leave alone, less those that running jobs need."""
    return len(load.idle) - sum(len(placement.cores) for placement in active)


def _fit(request: Request, active: Sequence[Placement], load: Load) -> Placement | None:
    reserved = {core for placement in active for core in placement.cores}
    free = [core for core in load.idle if core not in reserved]
    if len(free) < request.threads or _room(active, load) < request.threads:
        return None
    if request.memory > load.free_memory - sum(placement.memory for placement in active):
        return None
    gpu = _gpu(active, load) if request.gpu else None
    if request.gpu and gpu is None:
        return None
    return Placement(
        (request.job_id,), tuple(free[: request.threads]), request.threads, gpu, request.memory
    )


def _gpu(active: Sequence[Placement], load: Load) -> int | None:
    """The GPU with the most free memory among those that no job of ours uses.

    One job per GPU: several processes on one GPU were measured slower than one after another.
    """
    taken = {placement.gpu for placement in active}
    free = [gpu for gpu in load.gpus if gpu.index not in taken]
    return max(free, key=lambda gpu: (gpu.free, -gpu.index)).index if free else None


def _force(request: Request, load: Load) -> Placement | None:
    """At least one job runs, however busy the machine is."""
    order = [*load.idle, *(core for core in load.cores if core not in load.idle)]
    gpu = _gpu((), load) if request.gpu else None
    if request.gpu and gpu is None:
        return None
    cores = tuple(order[: request.threads])
    return Placement((request.job_id,), cores, request.threads, gpu, request.memory)
