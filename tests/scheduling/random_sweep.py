"""A random large sweep for the simulator: uneven jobs, wrong estimates, other load, failures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from asynckfold.jobs.placement import Request
from asynckfold.scheduling.simulate import (
    Failure,
    OtherProcess,
    Simulation,
    VirtualMachine,
    simulate,
)
from asynckfold.system.units import GIB

MEDIAN_SECONDS, SKEW = 60.0, 1.0
"""Lognormal durations: the longest of 100,000 jobs takes some seventy times the median."""

ERROR = 0.3
"""Standard deviation of log(actual / expected seconds)."""

THREADS = {1: 0.7, 2: 0.15, 4: 0.1, 8: 0.05}
"""Threads: share of the jobs."""

MEMORY = {GIB // 2: 0.4, GIB: 0.3, 2 * GIB: 0.2, 8 * GIB: 0.1}
"""Memory: share of the jobs, on a machine with 2 GiB per core."""

GPU_KINDS = {(40 * GIB, 1): 0.5, (20 * GIB, 2): 0.3, (10 * GIB, 4): 0.2}
"""(memory, jobs per GPU): share of the GPU jobs, on GPUs of 80 GiB."""

OTHERS_SHARE, STAY_SECONDS = 0.05, 600.0
"""Share of the cores used by other processes, and their mean duration."""

FAILURES, OOM_SHARE = 0.02, 0.001
"""Share of the jobs whose first attempt dies, and the share of these that runs out of memory."""


@dataclass(frozen=True)
class Scenario:
    """The arguments of `simulate`."""

    requests: tuple[Request, ...]
    machine: VirtualMachine
    seconds: Mapping[str, float]
    others: tuple[OtherProcess, ...]
    failures: Mapping[str, tuple[Failure, ...]]

    def simulate(self) -> Simulation:
        """Simulate it."""
        return simulate(
            self.requests,
            self.machine,
            self.seconds,
            others=self.others,
            failures=self.failures,
        )


def draw_scenario(
    jobs: int, cores: int, gpus: int, seed: int, nodes: int = 1, data_seconds: float = 0.0
) -> Scenario:
    """Draw a sweep on a machine, or equal nodes, that other processes use as well.

    The number of GPU jobs keeps the GPUs busy for about half the time of the cores. The jobs are
    the same on any number of nodes.
    """
    random = Random(seed)
    machine = VirtualMachine(cores, gpus, max(16, 2 * cores) * GIB, 80 * GIB, nodes, data_seconds)
    threads = sum(number * share for number, share in THREADS.items())
    on_gpu = min(0.5, 0.5 * threads * gpus / cores)
    requests = tuple(_request(random, number, machine, on_gpu) for number in range(jobs))
    seconds = {item.job_id: item.seconds * random.lognormvariate(0, ERROR) for item in requests}
    failures = {
        job: (Failure(length * random.random(), "oom" if random.random() < OOM_SHARE else "died"),)
        for job, length in seconds.items()
        if random.random() < FAILURES
    }
    work = math.fsum(item.threads * seconds[item.job_id] for item in requests)
    most = max(work / (cores * nodes), max(seconds.values(), default=0.0))
    others = tuple(_others(random, machine, 1.5 * most))
    return Scenario(requests, machine, seconds, others, failures)


def _request(random: Random, number: int, machine: VirtualMachine, on_gpu: float) -> Request:
    seconds = random.lognormvariate(math.log(MEDIAN_SECONDS), SKEW)
    (threads,) = random.choices([*THREADS], [*THREADS.values()])
    (memory,) = random.choices([*MEMORY], [*MEMORY.values()])
    (kind,) = random.choices([*GPU_KINDS], [*GPU_KINDS.values()])
    gpu = random.random() < on_gpu
    gpu_memory, jobs_per_gpu = kind if gpu else (0, 1)
    return Request(
        f"job-{number}",
        seconds,
        min(threads, machine.cores),
        memory,
        gpu,
        gpu_memory=gpu_memory,
        jobs_per_gpu=jobs_per_gpu,
    )


def _others(random: Random, machine: VirtualMachine, horizon: float) -> Iterator[OtherProcess]:
    """Other processes: Poisson arrivals, exponential durations."""
    now, cores = 0.0, machine.cores * machine.nodes
    while True:
        now += random.expovariate(OTHERS_SHARE * cores / STAY_SECONDS)
        if now > horizon:
            return
        node, core = divmod(random.randrange(cores), machine.cores)
        yield OtherProcess(core, now, now + random.expovariate(1 / STAY_SECONDS), node=node)
