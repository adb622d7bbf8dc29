"""The rule for threads: how many each job has on cores. Pure.

The number of threads changes bits, so the same sweep must get the same threads on an idle and on a
busy machine. The rule knows floating-point operations of a step, number and length of the jobs, and
allotted cores::

    1, 2, 3 … threads for all ───────────────────────┐
    1, 2, 3 … for models with most work, else 1 ─────┼─► seconds of the sweep ─► the fewest threads
    more for the jobs that the cores have left over ─┘   by `flop_model`         within 5 % of the
                                                                                 fastest
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asynckfold.jobs.cost import Cost, Work
from asynckfold.jobs.placement import NodeSize
from asynckfold.planning.flop_model import thread_counts

TIE = 1.05
"""Assignments within this ratio of the best are equal; the fewest threads win."""

FEW_JOBS = 400
"""Largest number of jobs for which models may get different threads."""


@dataclass(frozen=True)
class Model:
    """A model with the work of each of its jobs and its cost.

    Its jobs may differ in their threads (`last_apart`) if none of them is fused.
    """

    name: str
    jobs: tuple[Work, ...]
    cost: Cost
    last_apart: bool = False


@dataclass(frozen=True)
class LastJobs:
    """The last and shortest jobs of a model, their number, and the threads of each."""

    model: str
    jobs: int
    threads: int


@dataclass(frozen=True)
class Threads:
    """Threads of the jobs of each model, of its last jobs, and a sentence by model."""

    counts: Mapping[str, int]
    why: Mapping[str, str]
    last: LastJobs | None = None


def decide(models: Sequence[Model], cores: int, nodes: Sequence[NodeSize] = ()) -> Threads:
    """Choose the threads of each model's jobs.

    The fewest threads whose sweep takes no more than `TIE` times the shortest and no longer than
    one job at a time with all threads, the best serial way. The jobs that are left over when the
    others fill the cores get more threads if that shortens the sweep by more than `TIE`: five jobs
    on four cores are four with one thread, then one with four.

    `cores` are allotted, used by other processes or not, and the most threads of a job, which runs
    on one of the `nodes` of a cluster.

    Examples
    --------
    >>> from asynckfold.planning.flop_model import rule_cost
    >>> five = (Work(1000, 10),) * 5
    >>> big = Model("VGG", five, rule_cost(30_000_000_000, 2))
    >>> small = Model("M", five, rule_cost(1_000_000, 2))
    >>> print(decide([big], 2).why["VGG"])
    2 threads: 779 s predicted for the sweep, 804 s with the best other numbers of threads
    >>> decide([big, small], 2).counts
    {'M': 1, 'VGG': 2}
    >>> divided = decide([Model("VGG", five, big.cost, last_apart=True)], 2)
    >>> divided.counts, divided.last
    ({'VGG': 1}, LastJobs(model='VGG', jobs=1, threads=2))
    """
    models = sorted(models, key=lambda model: model.name)
    sizes = [node.cores for node in nodes] or [cores]
    ways = _ways(models, cores)
    seconds = [_sweep_seconds(models, way, sizes) for way in ways]
    serial = _sweep_seconds(models, (cores,) * len(models), sizes)
    limit = min(serial, TIE * min(seconds))
    best = min(
        (index for index in range(len(ways)) if seconds[index] <= limit),
        key=lambda index: (_size(models, ways[index]), seconds[index]),
    )
    chosen, last, shortest = ways[best], None, seconds[best] / TIE
    for way in ways if len(models) == 1 else [ways[best]]:
        rest = _left_over(models, way, sizes)
        shorter = shortest if rest is None else _sweep_seconds(models, way, sizes, rest)
        if shorter < shortest:
            chosen, last, shortest = way, rest, shorter
    names = [model.name for model in models]
    counts = dict(zip(names, chosen, strict=True))
    others = [time for time, way in zip(seconds, ways, strict=True) if last or way != chosen]
    text = f"{shortest if last else seconds[best]:.3g} s predicted for the sweep"
    text += f", {min(others):.3g} s with the best other numbers of threads" if others else ""
    text += f"; the last jobs of {last.model}, {last.jobs}, have {last.threads}" if last else ""
    return Threads(counts, {name: f"{count_text(counts[name])}: {text}" for name in names}, last)


def count_text(threads: int) -> str:
    """Return a number of threads in words."""
    return f"{threads} {'thread' if threads == 1 else 'threads'}"


_Counts = tuple[int, ...]
"""Threads of each model, in the order of their names."""


def _ways(models: Sequence[Model], cores: int) -> list[_Counts]:
    """Return the assignments among which the rule chooses: equal, or one thread for less work."""
    work = [math.fsum(item.cost.seconds(job, 1) for job in item.jobs) for item in models]
    few = sum(len(item.jobs) for item in models) <= FEW_JOBS
    least = sorted({0.0, *work}) if few else [0.0]
    return list(
        dict.fromkeys(
            tuple(count if mine >= limit else 1 for mine in work)
            for limit in least
            for count in thread_counts(cores)
        )
    )


def _size(models: Sequence[Model], way: _Counts) -> int:
    return sum(count * len(item.jobs) for item, count in zip(models, way, strict=True))


def _sweep_seconds(
    models: Sequence[Model], way: _Counts, sizes: Sequence[int], last: LastJobs | None = None
) -> float:
    """Return the seconds of the sweep: longest job first, each where cores are free first."""
    free = [[0.0] * cores for cores in sizes]
    jobs = []
    for model, count in zip(models, way, strict=True):
        works = sorted(model.jobs, key=size_of)
        few = last.jobs if last is not None and last.model == model.name else 0
        for number, work in enumerate(works):
            threads = last.threads if last is not None and number < few else count
            jobs.append((number < few, -model.cost.seconds(work, threads), threads))
    for _, seconds, threads in sorted(jobs):
        node = min((item for item in free if len(item) >= threads), key=lambda c: c[threads - 1])
        node[:threads] = [node[threads - 1] - seconds] * threads
        node.sort()
    return max(map(max, free))


def _left_over(models: Sequence[Model], way: _Counts, sizes: Sequence[int]) -> LastJobs | None:
    """Return the jobs that are left over when the others fill the cores, with all cores."""
    longest = [
        max((item.cost.seconds(job, 1) for job in item.jobs), default=math.inf) for item in models
    ]
    index = longest.index(min(longest))
    model, count = models[index], way[index]
    slots = sum(cores // count for cores in sizes)
    jobs = sum(len(item.jobs) for item in models) % slots
    if not (model.last_apart and 0 < jobs < len(model.jobs)):
        return None
    for threads in range(max(sizes), count, -1):
        if sum(cores // threads for cores in sizes) >= jobs:
            return LastJobs(model.name, jobs, min(threads, min(sizes)))
    return None


def size_of(work: Work) -> tuple[int, int]:
    """Return the sort key of the jobs of one model: the last ones are the smallest."""
    return work.steps, work.evaluations
