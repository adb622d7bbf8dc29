"""Forecasts a sweep: its jobs in virtual time, placed by the function that places real ones.

::

    backlog ── place(pending, running, load) ──► running ──► time jumps to the end of the next job

A job takes the same seconds wherever it runs; nobody else uses the machine, and memory suffices.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.placement import FULL_SHARE, Gpu, Load, NodeSize, Placement, Request, units
from asynckfold.jobs.plan import Plan
from asynckfold.planning.fusion_groups import Grouping
from asynckfold.planning.workload import Choice, TimeEstimate, Workload, requests
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.reservations import Reservations


@dataclass(frozen=True)
class Span:
    """When a job runs, in seconds from the start, on which cores and GPU of which node."""

    job: str
    start: float
    end: float
    cores: tuple[int, ...]
    gpu: int | None = None
    node: str = ""


@dataclass(frozen=True)
class Simulation:
    """A simulated sweep."""

    nodes: tuple[NodeSize, ...]  # where it ran
    spans: tuple[Span, ...]  # in the order of their starts
    # on the makespan of any schedule, in seconds: the longest job, core-seconds / cores, or
    # GPU-seconds / GPUs, where one of the most jobs that may share a GPU, n, counts with 1 / n
    lower_bound: float

    @property
    def makespan(self) -> float:
        """Seconds until the last job ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes; empty for a single machine."""
        return names_of(self.nodes)


def names_of(nodes: Sequence[NodeSize]) -> tuple[str, ...]:
    """Return names for the nodes of a cluster.

    >>> names_of([NodeSize(4), NodeSize(4)]), names_of([NodeSize(4)])
    (('node-0', 'node-1'), ('',))
    """
    if len(nodes) == 1:
        return ("",)
    digits = len(str(len(nodes) - 1))
    return tuple(f"node-{number:0{digits}}" for number in range(len(nodes)))


def simulate(requests: Sequence[Request], nodes: Sequence[NodeSize]) -> Simulation:
    """Run jobs on idle nodes, placed by `place`.

    Raises
    ------
    InputError
        A GPU job, and no GPU.

    Examples
    --------
    >>> jobs = [Request("a", 3.0), Request("b", 2.0), Request("c", 2.0)]
    >>> simulation = simulate(jobs, [NodeSize(cores=2)])
    >>> simulation.makespan, simulation.lower_bound
    (4.0, 3.5)
    >>> simulation.spans[-1]
    Span(job='c', start=2.0, end=4.0, cores=(1,), gpu=None, node='')
    """
    gpus = sum(node.gpus for node in nodes)
    if lost := [item.job_id for item in requests if item.gpu and not gpus]:
        rule, remedy = "a GPU job needs a machine with GPUs", "Pass devices='auto'."
        refuse([Problem(rule, f"{lost[0]!r}, and no GPU", remedy)])
    # A fusion group counts as one job here.
    pending = Backlog(replace(item, jobs=()) for item in requests)
    first, *peers = (
        _idle_load(name, node) for name, node in zip(names_of(nodes), nodes, strict=True)
    )
    smallest = min((item.gpu_share for item in requests if item.gpu), default=1.0)
    most = max(1, math.ceil(FULL_SHARE / smallest - 1e-9))
    load, running = replace(first, peers=tuple(peers)), Reservations()
    ends: list[tuple[float, int, Placement]] = []
    spans: list[Span] = []
    work: defaultdict[str, list[float]] = defaultdict(list)
    now = 0.0
    while pending or ends:
        for placement in place(pending, running, load):
            (job,) = placement.jobs
            seconds = pending.remove(job).seconds
            running.add(placement)
            heapq.heappush(ends, (now + seconds, len(spans), placement))
            cores, gpu = placement.cores, placement.gpu
            spans.append(Span(job, now, now + seconds, cores, gpu, placement.node))
            work["cores"].append(seconds * len(cores))
            parts = most if placement.gpu_share < FULL_SHARE else 1
            work["gpus"].append(0.0 if gpu is None else seconds / parts)
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            running.remove(heapq.heappop(ends)[-1])
    bound = max(
        math.fsum(work["cores"]) / sum(node.cores for node in nodes),
        math.fsum(work["gpus"]) / max(1, gpus),
        max((span.end - span.start for span in spans), default=0.0),
    )
    return Simulation(tuple(nodes), tuple(spans), bound)


def _idle_load(name: str, node: NodeSize) -> Load:
    cores = tuple(range(node.cores))
    # Jobs use no more GPU memory than they reserved, so the free memory never changes.
    gpus = (Gpu(index, sys.maxsize, sys.maxsize) for index in range(node.gpus))
    return Load(cores, cores, sys.maxsize, tuple(gpus), node=name)


@dataclass(frozen=True)
class Forecast:
    """What a call would do."""

    plan: Plan  # its jobs, with their threads and groups
    folds: tuple[Fold, ...]
    choice: Choice  # threads of each model, why, and the expected seconds of the sweep
    requests: Mapping[str, Request]  # by job id: expected seconds, threads and bytes of memory
    units: Mapping[str, Request]  # the same for a fusion group, by its first job, or a single job
    fusing: Mapping[str, str]  # by model its groups, or why none; empty if none was requested
    simulation: Simulation  # on all allotted cores, with unlimited memory and no other processes
    # last line of the traceback, by candidate whose dry run failed
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # of the dry run, which forbid nothing


def forecast(work: Workload, choice: Choice, grouping: Grouping | None = None) -> Forecast:
    """Return the forecast of a sweep with these decisions."""
    grouping = grouping or Grouping()
    each = requests(choice, work, grouping.groups)
    placed = units(each, grouping.groups)
    nodes = choice.nodes or [NodeSize(choice.cores, work.gpus)]
    simulation = simulate(list(placed.values()), nodes)
    return Forecast(
        replace(
            work.plan.with_threads(choice.threads, choice.last_threads), groups=grouping.groups
        ),
        tuple(work.folds),
        choice,
        each,
        placed,
        grouping.why,
        simulation,
        {name: trace.strip().splitlines()[-1] for name, trace in work.facts.failures.items()},
        work.facts.notes,
    )


def seconds_in_turn(work: Workload, choice: Choice, grouping: Grouping) -> float:
    """Return the predicted seconds of all jobs, one after another."""
    each = requests(choice, work, grouping.groups)
    return math.fsum(item.seconds for item in units(each, grouping.groups).values())


def predicted(work: Workload, choice: Choice, grouping: Grouping) -> Choice:
    """Return the choice with the prediction of the whole sweep."""
    simulation = forecast(work, choice, grouping).simulation
    longest = max((span.end - span.start for span in simulation.spans), default=0.0)
    prediction = TimeEstimate(simulation.makespan, simulation.lower_bound, longest)
    return replace(choice, prediction=prediction)
