"""The words of a placement: the machine, what is pending, what starts, what is placed as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from asynckfold.jobs.trainer_params import SEVERAL


@dataclass(frozen=True)
class Gpu:
    """One visible GPU.

    Parameters
    ----------
    index : int
        Its number.
    free, total : int
        Bytes of its memory: what nobody holds right now, and all.
    use : float
        Share of time that it is busy, 0 to 1.
    own : int
        Bytes that jobs of this run hold, and that `free` therefore lacks. 0 where that cannot be
        read: then what they hold is subtracted twice, and fewer of them share the GPU than could.
    """

    index: int
    free: int
    total: int
    use: float = 0.0
    own: int = 0


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
    blocked : str
        Why nothing may start now, not even the one job that always runs; empty where it may.
    others : tuple of int
        Cores that others use, also where the run takes its number of cores whoever is there.
    """

    cores: tuple[int, ...]
    idle: tuple[int, ...]
    free_memory: int
    gpus: tuple[Gpu, ...] = ()
    use: tuple[float, ...] = ()
    own: float = 0.0
    blocked: str = ""
    others: tuple[int, ...] = ()


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
    gpu_memory : int
        Expected bytes of memory on the GPU.
    jobs_per_gpu : int
        How many jobs may be on its GPU at once, itself included. One by default: several processes
        on one GPU were measured slower than one after another.
    jobs : tuple of str
        All jobs that it asks a place for, where that is not just one; `job_id` then only names it.
    trainer : str
        Which trainer runs them.
    """

    job_id: str
    seconds: float
    threads: int = 1
    memory: int = 0
    gpu: bool = False
    alone: bool = False
    gpu_memory: int = 0
    jobs_per_gpu: int = 1
    jobs: tuple[str, ...] = ()
    trainer: str = "plain"

    @property
    def width(self) -> int:
        """For how many jobs it asks."""
        return len(self.jobs) or 1


@dataclass(frozen=True)
class Placement:
    """Jobs, the cores and GPU chosen for them, and the trainer that runs them.

    Parameters
    ----------
    jobs : tuple of str
        Job ids; more than one where jobs are trained as one, or are a row: short ones that the same
        worker does one after another.
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
    gpu_memory : int
        Bytes of memory reserved on the GPU.
    jobs_per_gpu : int
        How many placements may be on the GPU at once, this one included.
    """

    jobs: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int = 1
    gpu: int | None = None
    memory: int = 0
    trainer: str = "plain"
    alone: bool = False
    gpu_memory: int = 0
    jobs_per_gpu: int = 1

    @property
    def is_job_batch(self) -> bool:
        """Whether its jobs are done one after another."""
        return self.trainer == "plain" and len(self.jobs) > 1

    def wants_new_worker(self, has_gpu: bool) -> bool:
        """Return whether its worker is to be a new one, which ends afterwards.

        It forks processes, from which it keeps the GPUs that torch would find on this machine: see
        `asynckfold.training.process_group.gpu_handoff`.
        """
        return self.trainer in SEVERAL and (has_gpu or self.gpu is not None)


def fused(requests: Sequence[Request], left: Sequence[str]) -> Request:
    """Return the request of jobs that are trained as one: the seconds and the memory of all.

    It is named by the first job. Those that have a result go along, so that they count, too.

    Parameters
    ----------
    requests : sequence of Request
        Of all jobs of the group.
    left : sequence of str
        The jobs that have no result yet.

    Examples
    --------
    >>> found = fused([Request("a", 2.0, memory=3), Request("b", 1.0, memory=4)], ["b"])
    >>> found.job_id, found.jobs, found.seconds, found.memory, found.trainer
    ('a', ('b',), 3.0, 7, 'fused')
    """
    return replace(
        requests[0],
        seconds=math.fsum(request.seconds for request in requests),
        memory=sum(request.memory for request in requests),
        alone=any(request.alone for request in requests if request.job_id in left),
        jobs=tuple(left),
        trainer="fused",
    )


def units(requests: Mapping[str, Request], groups: Iterable[tuple[str, ...]]) -> dict[str, Request]:
    """Return what is placed as one, by name: each group, and each job that is in none.

    Examples
    --------
    >>> asked = {name: Request(name, 1.0) for name in "abc"}
    >>> [(name, unit.seconds) for name, unit in units(asked, [("a", "c")]).items()]
    [('a', 2.0), ('b', 1.0)]
    """
    found = dict(requests)
    for group in groups:
        found[group[0]] = fused([requests[name] for name in group], group)
        for name in group[1:]:
            del found[name]
    return found


@dataclass(frozen=True)
class Wait:
    """How long a job waited for one thing.

    Parameters
    ----------
    seconds : float
        In all, in however many pieces.
    kind : str
        Of the obstacle, see `asynckfold.scheduling.wait_reasons`, or ``"pause"`` after an attempt
        whose worker died.
    text : str
        As it was last.
    """

    seconds: float
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s for {self.text}"
