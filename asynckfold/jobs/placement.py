"""Values of scheduling: the machine, pending requests, placements, waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from asynckfold.jobs.trainer_params import SEVERAL

GPU_CONTEXT_BYTES = 1 << 29
"""GPU memory of a process besides its tensors: its context and the code of its kernels."""

FULL_SHARE = 0.9
"""Share of a GPU's time in use by jobs at which no further one starts there. A job that takes as
much by itself has the GPU alone, with all its memory."""

WORKER_BYTES = 64 << 20
"""Memory of a worker besides its jobs': 30 to 50 MiB unshared, for nets from a linear one to
convolutions of 4 channels (torch 2.15 on Linux)."""


@dataclass(frozen=True)
class Gpu:
    """One visible GPU; memory in bytes."""

    index: int
    free: int  # unused by anybody right now
    total: int
    use: float = 0.0  # busy share of time, 0 to 1
    own: int = 0  # held by jobs of this run and so missing in `free`; 0: unknown, counted twice
    uuid: str = ""  # names the device for the worker, also a slice (MIG); empty: by its index
    busy: bool = False  # others keep it busy


@dataclass(frozen=True)
class Load:
    """One snapshot of the machine without this run's workers; of a cluster, of its first node."""

    cores: tuple[int, ...]  # allowed: affinity, cgroup quota and ``n_jobs`` applied
    idle: tuple[int, ...]  # of these, without other processes, the idlest first
    free_memory: int  # bytes for all jobs of this run, running ones included
    gpus: tuple[Gpu, ...] = ()  # allowed
    # of each core of the affinity mask by everyone, 0 to 1; empty: unknown
    use: tuple[float, ...] = ()
    own: float = 0.0  # cores' worth of use by this run
    blocked: str = ""  # why not even one job may start; empty: it may
    others: tuple[int, ...] = ()  # cores in use by other processes, also where the run ignores them
    node: str = ""  # its name in the cluster; empty: this machine
    peers: tuple[Load, ...] = ()  # the further nodes of the cluster, each without peers

    @property
    def nodes(self) -> tuple[Load, ...]:
        """The loads of all nodes, this one first."""
        return (self, *self.peers)


@dataclass(frozen=True)
class NodeSize:
    """What a sweep may use of a node of a cluster, whoever uses it at the moment."""

    cores: int
    gpus: int = 0


@dataclass(frozen=True)
class Request:
    """A pending job, or fusion group, as the scheduler sees it."""

    job_id: str  # of the first job of a group
    seconds: float  # expected; only orders the queue
    threads: int = 1  # and cores
    memory: int = 0  # expected bytes
    gpu: bool = False
    alone: bool = False  # nothing else may run meanwhile: it ran out of memory beside others
    gpu_memory: int = 0  # expected bytes
    gpu_share: float = FULL_SHARE  # expected share of a GPU's time, see `FULL_SHARE`
    measures_gpu: bool = False  # whether that is a guess, to be replaced
    jobs: tuple[str, ...] = ()  # of a group; empty: just `job_id`
    trainer: str = "plain"
    stage: int = 0  # of two pending jobs on the same kind of device, the lower one starts first

    @property
    def width(self) -> int:
        """Number of its jobs."""
        return len(self.jobs) or 1


class Command(Enum):
    """What a worker does with a placement."""

    TRAIN = "train"
    DRY_RUN = "dry run"  # of all models, or those of the placement's jobs
    MEASURE = "measure"  # the serial baseline, all of it
    ESTIMATE = "estimate"  # the serial baseline, from some batches of each model
    READ = "read"  # samples of a dataset


@dataclass(frozen=True)
class Placement:
    """Jobs, the cores and GPU chosen for them, and what a worker does with them."""

    jobs: tuple[str, ...]  # job ids; several: a fusion group, or a batch of short jobs done in turn
    cores: tuple[int, ...]  # to pin the worker to; empty: no pinning
    threads: int = 1  # inside the worker
    gpu: int | None = None  # index, for people
    memory: int = 0  # bytes reserved
    trainer: str = "plain"
    command: Command = Command.TRAIN
    alone: bool = False  # nothing else may run meanwhile
    gpu_memory: int = 0  # bytes reserved on the GPU
    gpu_share: float = FULL_SHARE  # of the GPU's time, as expected or measured
    gpu_uuid: str = ""  # which GPU; empty: the one of that index
    node: str = ""  # where it runs, by name; empty: this machine

    @property
    def is_job_batch(self) -> bool:
        """Whether its jobs run one after another."""
        is_plain = self.command is Command.TRAIN and self.trainer == "plain"
        return is_plain and len(self.jobs) > 1

    def wants_new_worker(self, has_gpu: bool) -> bool:
        """Return whether it needs a new worker, which ends afterwards.

        It forks processes and hides GPUs from them, see
        `asynckfold.training.process_group.gpu_handoff`.
        """
        return self.trainer in SEVERAL and (has_gpu or self.gpu is not None)


def fused(requests: Sequence[Request], left: Sequence[str]) -> Request:
    """Return the request of a fusion group: seconds and memory of all its jobs, in one process.

    Named by the first job. Finished jobs stay in the group and count; `left` are the others. On a
    GPU a group runs alone.

    >>> requests = [Request(name, 1.5, memory=WORKER_BYTES + 3) for name in "ab"]
    >>> group = fused(requests, ["b"])
    >>> group.job_id, group.jobs, group.seconds, group.memory - WORKER_BYTES, group.trainer
    ('a', ('b',), 3.0, 6, 'fused')
    """
    return replace(
        requests[0],
        seconds=math.fsum(request.seconds for request in requests),
        memory=_in_one_process([request.memory for request in requests], WORKER_BYTES),
        alone=any(request.alone for request in requests if request.job_id in left),
        gpu_memory=_in_one_process(
            [request.gpu_memory for request in requests if request.gpu], GPU_CONTEXT_BYTES
        ),
        gpu_share=1.0,
        jobs=tuple(left),
        trainer="fused",
    )


def _in_one_process(sizes: Sequence[int], process: int) -> int:
    """Return the memory of jobs that share a process, from what each needs with its own.

    >>> _in_one_process([100 + 3, 100 + 4], process=100)
    107
    """
    jobs = sum(max(0, size - process) for size in sizes)
    return jobs + process if sizes else 0


def units(requests: Mapping[str, Request], groups: Iterable[tuple[str, ...]]) -> dict[str, Request]:
    """Return requests by name: each group, and each job in none.

    >>> requests = {name: Request(name, 1.0) for name in "abc"}
    >>> [(name, unit.seconds) for name, unit in units(requests, [("a", "c")]).items()]
    [('a', 2.0), ('b', 1.0)]
    """
    by_name = dict(requests)
    for group in groups:
        by_name[group[0]] = fused([requests[name] for name in group], group)
        for name in group[1:]:
            del by_name[name]
    return by_name


@dataclass(frozen=True)
class Wait:
    """How long a job waited for one thing."""

    seconds: float  # in total
    kind: str  # of obstacle, see `asynckfold.scheduling.wait_reasons`; or ``"pause"``
    text: str  # the latest

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s for {self.text}"
