"""Which running jobs take cores that became free, and give them back: a pure function.

::

    an idle core that nothing pending can use ──► lent to the jobs that end last, where that pays
    something could start on a lent core ───────► given back after the batch, then it starts there
    others came to a core of the job ───────────► given back after the batch

    the job is slower with it ──────────────────► given back, and it takes none again

A job never has fewer threads than it is planned with, and none takes a core from another. What is
decided here settles: on the same load nothing more changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asynckfold.jobs.cost import Cost, at
from asynckfold.jobs.placement import Load
from asynckfold.planning.thread_search import TIE


@dataclass(frozen=True)
class Elastic:
    """A running job that may have more threads than it is planned with.

    Parameters
    ----------
    cores : tuple of int
        That it holds now, one for each thread.
    threads : int
        That it is planned with; the cores beyond are lent to it.
    steps : sequence of float
        Seconds of a step with 1, 2, … threads, up to the most that it may have.
    settled : bool
        Whether it is not to grow now: it gave cores back too often lately, say.
    slower : bool
        Whether its batches take longer with the lent cores than they took without, or did once.
    """

    cores: tuple[int, ...]
    threads: int
    steps: Sequence[float]
    settled: bool = False
    slower: bool = False


PACE_SECONDS = 1.0
"""How long a job is watched with a number of threads before its pace is known."""


@dataclass(frozen=True)
class Pace:
    """How fast a job is with one number of threads: when it had how many batches behind it.

    Parameters
    ----------
    since, until : float
        Seconds of a monotonic clock: when that was seen first and last.
    first, last : int
        Batches that were behind it then.

    Examples
    --------
    >>> Pace(1.0, 3.0, 10, 14).seconds, Pace(1.0, 1.5, 10, 11).seconds
    (0.5, None)
    """

    since: float
    until: float
    first: int
    last: int

    @property
    def seconds(self) -> float | None:
        """Seconds of a batch; None as long as it is not known."""
        count, passed = self.last - self.first, self.until - self.since
        return passed / count if count > 0 and passed >= PACE_SECONDS else None


def steps_of(cost: Cost, cores: int) -> tuple[float, ...]:
    """Return the seconds of a step with 1, 2, … threads, up to one for each of the cores.

    Examples
    --------
    >>> [round(step, 1) for step in steps_of(Cost({1: 8.0, 4: 2.0}, {1: 1.0, 4: 1.0}), 4)]
    [8.0, 4.0, 2.7, 2.0]
    """
    return tuple(at(cost.step_seconds, count) for count in range(1, cores + 1))


def worth(steps: Sequence[float], threads: int, most: int) -> int:
    """Return how many threads a job should have that may have from `threads` to `most`.

    The fewest with which a step takes no longer than `TIE` times the shortest: where more bring
    nothing clear, there are no more.

    Examples
    --------
    >>> worth([8.0, 4.0, 3.9], 1, 3), worth([8.0, 4.0, 3.9, 2.0], 2, 4), worth([8.0, 7.9], 1, 2)
    (2, 4, 1)
    """
    ways = steps[threads - 1 : most]
    limit = TIE * min(ways, default=math.inf)
    return next((count for count, step in enumerate(ways, threads) if step <= limit), threads)


Key = TypeVar("Key")


def stretched(
    running: Mapping[Key, Elastic],
    load: Load,
    free: Sequence[int],
    wanted: Collection[int] = (),
) -> dict[Key, tuple[int, ...]]:
    """Return the cores of each job for which they change.

    A job that gives cores back keeps those on which it goes on first. Free cores are shared
    equally; who comes first has the larger share.

    Parameters
    ----------
    running : Mapping of key to Elastic
        What can be changed, those that end last first.
    load : Load
        The machine now.
    free : sequence of int
        Idle cores that nobody holds, and that nothing pending can use.
    wanted : collection of int
        Cores on which something pending would start, were they not lent.

    Examples
    --------
    >>> load = Load(cores=(0, 1, 2), idle=(0, 1, 2), free_memory=1)
    >>> job = Elastic((0,), 1, [8.0, 4.0, 2.7])
    >>> stretched({"a": job}, load, free=(1, 2))
    {'a': (0, 1, 2)}
    >>> stretched({"a": job, "b": Elastic((1,), 1, [0.1, 0.1, 0.1])}, load, free=(2,))
    {'a': (0, 2)}
    >>> stretched({"a": Elastic((0, 1, 2), 1, job.steps)}, load, free=(), wanted=(1,))
    {'a': (0, 2)}
    """
    good = {core for core in load.idle if core not in wanted}
    back = {
        key: _kept(job, good)
        for key, job in running.items()
        if len(job.cores) > job.threads and (job.slower or not good.issuperset(job.cores))
    }
    calm = {key: job for key, job in running.items() if key not in back and _may_grow(job, good)}
    return back | _shared(calm, [core for core in free if core in good])


def _may_grow(job: Elastic, good: Collection[int]) -> bool:
    return not (job.settled or job.slower) and {*job.cores} <= {*good}


def _kept(job: Elastic, good: Collection[int]) -> tuple[int, ...]:
    """The cores with which a job goes on that gives some back."""
    order = sorted(job.cores, key=lambda core: core not in good)
    if job.slower:
        return tuple(order[: job.threads])
    count = worth(job.steps, job.threads, sum(core in good for core in order))
    return tuple(order[: max(job.threads, count)])


def _shared(jobs: Mapping[Key, Elastic], free: Sequence[int]) -> dict[Key, tuple[int, ...]]:
    """Share free cores among the jobs that pay for them, until no job would take one more."""
    held, rest = {key: job.cores for key, job in jobs.items()}, list(free)

    def growth(key: Key, most: int) -> int:
        count = len(held[key])
        return worth(jobs[key].steps, count, count + most) - count

    while takers := [key for key in jobs if growth(key, len(rest)) > 0]:
        share, before = math.ceil(len(rest) / len(takers)), len(rest)
        for key in takers:
            taken = growth(key, min(share, len(rest)))
            held[key], rest = (*held[key], *rest[:taken]), rest[taken:]
        if len(rest) == before:
            # A share alone brings nothing to anyone.
            taken = growth(takers[0], len(rest))
            held[takers[0]], rest = (*held[takers[0]], *rest[:taken]), rest[taken:]
    return {key: cores for key, cores in held.items() if cores != jobs[key].cores}
