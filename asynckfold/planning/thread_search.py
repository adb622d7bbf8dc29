"""How many threads each model's jobs get, and so how many of them run at a time: pure.

Threads touch bits, so the same sweep must get the same threads on an idle and on a busy machine.
The decision follows a rule over what does not vary: floating-point operations of a step, number and
length of the jobs, allotted cores. Timings overturn it only by a large margin, `OVERTURN`.

The rule knows seconds of a step by its operations from `POINTS`, and from the speed-up with two
threads the share of a step that threads divide, by Amdahl's law (Amdahl 1967). With these seconds
every way to give threads is simulated to the end of the sweep, its tail included, with the very
function that will place the jobs. All threads for one job at a time, the best serial way, is always
among the ways. Where the last jobs leave cores idle, more threads for them are simulated as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from asynckfold.jobs.cost import Cost, Work, at
from asynckfold.jobs.placement import Request
from asynckfold.scheduling.simulate import Simulation, VirtualMachine, simulate


@dataclass(frozen=True)
class Point:
    """One measured model: what a step takes, and its speed-up with two threads.

    Parameters
    ----------
    flops : float
        Operations of a step.
    seconds : float
        With one thread.
    two_threads : float
        How many times faster it is with two.
    products : int
        Convolutions and products of matrices among which the operations are divided.
    """

    flops: float
    seconds: float
    two_threads: float
    products: int


POINTS = (
    Point(1.29e6, 0.00033, 1.00, 5),
    Point(1.31e7, 0.00082, 1.14, 5),
    Point(7.25e7, 0.0039, 1.36, 15),
    Point(1.03e8, 0.0039, 1.39, 15),
    Point(1.87e9, 0.020, 1.66, 27),
    Point(2.92e10, 0.260, 1.72, 27),
)
"""An MLP on digits (64-128-10), an MLP on MNIST (784-128-10), LeNet5 on MNIST, LeNet on CIFAR-10,
VGG11 of a quarter of the width, VGG11: batches of 32, float32, Adam, medians on two cores of a Xeon
with AVX-512 and torch 2.15. More than two threads are not measured but extrapolated.

Threads meet at the end of each product, so that how much they save depends on the operations of a
product. MobileNet of half the width has as many operations as a VGG11 of a quarter, in 84 products
of 2.8e7 in place of 27 of 6.9e7. On two cores of an AMD EPYC a sweep of 5 folds of it took 11.9 s
with one thread for each of two jobs, and 14.4 s with two threads a job (medians of 2, in turns),
where operations alone said that both take equally long."""

TIE = 1.05
"""Ways to give threads that differ by no more than this ratio are equal; fewer threads win."""

OVERTURN = 1.3
"""How many times longer the rule's choice must take than the best, by the probe, to be overturned.

Six times the margin of `TIE`: no more than a clear gain is worth other bits than the rule's."""

FEW_JOBS = 400
"""Up to so many jobs, models are given different threads by trial; each trial is a simulation."""

LAST_OF_FEW = 100
"""Up to so many jobs, the last are given more threads by trial; of many, they hardly matter."""


@dataclass(frozen=True)
class Model:
    """What is to be decided for: a model, the work of each of its jobs, and what it costs."""

    name: str
    jobs: tuple[Work, ...]
    cost: Cost
    last_apart: bool = False
    """Whether its last jobs may have more threads than the others: none is trained with others."""


@dataclass(frozen=True)
class LastJobs:
    """The last jobs of a model, for which cores become idle.

    Parameters
    ----------
    model : str
        Whose jobs.
    jobs, threads : int
        How many of them, the shortest, and the threads of each.
    """

    model: str
    jobs: int
    threads: int


@dataclass(frozen=True)
class Decision:
    """Threads for each model, and why.

    Parameters
    ----------
    threads : Mapping of str to int
        By model.
    why : Mapping of str to str
        A sentence by model, with the numbers that were compared.
    overturned : bool
        Whether timings overturned the rule.
    last : LastJobs or None
        Which jobs have more threads than their model.
    """

    threads: Mapping[str, int]
    why: Mapping[str, str]
    overturned: bool = False
    last: LastJobs | None = None


@dataclass(frozen=True)
class Prediction:
    """What a sweep should take: seconds, and the seconds below which no order of its jobs can stay.

    Parameters
    ----------
    makespan, lower_bound, longest : float
        Seconds: of the whole sweep, of core-seconds / cores or the longest job, of that job.
    """

    makespan: float
    lower_bound: float
    longest: float

    @classmethod
    def of(cls, found: Simulation) -> Prediction:
        """Read it from the sweep in virtual time."""
        longest = max((span.end - span.start for span in found.spans), default=0.0)
        return cls(found.makespan, found.lower_bound, longest)


def rule_cost(flops: int, cores: int, eval_ratio: float = 1.0, products: int | None = None) -> Cost:
    """Return what a model costs by the rule.

    Parameters
    ----------
    flops : int
        Floating-point operations of a training step.
    cores : int
        Allotted cores: the most threads.
    eval_ratio : float
        Samples of an evaluation batch / samples of a training step.
    products : int, optional
        Among how many products the operations of a training step are divided; without it, as many
        as measured models have.

    Examples
    --------
    >>> cost = rule_cost(29_200_000_000, cores=2)
    >>> round(cost.step_seconds[1] / cost.step_seconds[2], 2)
    1.72
    >>> divided = rule_cost(29_200_000_000, cores=2, products=260)
    >>> round(divided.step_seconds[1] / divided.step_seconds[2], 2)
    1.67
    """
    # Of the three products of a layer (outputs, gradients of inputs, of weights) one is evaluation.
    evaluation = flops * eval_ratio / 3
    each = None if products is None else flops / max(1, products)
    counts = thread_counts(cores)
    return Cost(
        {count: _seconds(flops, count, each) for count in counts},
        {count: _seconds(evaluation, count, each and each * eval_ratio) for count in counts},
        flops,
    )


def _seconds(flops: float, threads: int, each: float | None) -> float:
    """Seconds by Amdahl's law, between the measured points; at both ends as at the last point.

    What threads divide is known by the operations of a product (`each`), or else of a step.
    """
    logs = [math.log(point.flops) for point in POINTS]
    own = math.log(max(flops, POINTS[0].flops))
    alone = math.exp(_between(logs, [math.log(point.seconds) for point in POINTS], own))
    shares = [2 * (1 - 1 / point.two_threads) for point in POINTS]
    if each is None:
        share = _between(logs, shares, own)
    else:
        sizes = [math.log(point.flops / point.products) for point in POINTS]
        share = _between(sizes, shares, max(math.log(max(1.0, each)), sizes[0]))
    beyond = max(1.0, flops / POINTS[-1].flops)
    return alone * beyond * (1 - share + share / threads)


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    for (left, low), (right, high) in pairwise(zip(xs, ys, strict=True)):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return ys[-1]


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the numbers of threads worth a look: an equal share of the cores for some jobs each.

    >>> thread_counts(16)
    (1, 2, 3, 4, 5, 8, 16)
    """
    return tuple(sorted({cores // jobs for jobs in range(1, cores + 1)}))


def decide(
    models: Sequence[Model], cores: int, measured: Mapping[str, Cost] | None = None
) -> Decision:
    """Choose the threads of each model's jobs.

    Of all ways whose simulated makespan is within `TIE` of the best and no longer than one job at a
    time with all threads, the one with the fewest threads. Where the sweep is shorter by more than
    `TIE` if the last jobs of a model have more threads, they have: five jobs on four cores are four
    with one thread, and one with four.

    Parameters
    ----------
    models : sequence of Model
        With the costs of the rule; their order does not matter.
    cores : int
        Allotted cores, whoever uses them now.
    measured : Mapping of str to Cost, optional
        What a probe found, by model. Where it says that the rule's choice takes `OVERTURN` times
        longer than the best, it is followed.

    Returns
    -------
    Decision

    Examples
    --------
    >>> five = (Work(1000, 10),) * 5
    >>> big = Model("VGG", five, rule_cost(30_000_000_000, 2))
    >>> small = Model("M", five, rule_cost(1_000_000, 2))
    >>> print(decide([big], 2).why["VGG"])
    2 threads × 1 job beat 1 thread × 2 jobs: 779 s against 804 s for the sweep, 155 ms \
against 134 ms per step
    >>> decide([big, small], 2).threads
    {'M': 1, 'VGG': 2}
    >>> found = decide([Model("VGG", five, big.cost, last_apart=True)], 2)
    >>> found.threads, found.last
    ({'VGG': 1}, LastJobs(model='VGG', jobs=1, threads=2))
    >>> print(found.why["VGG"])
    1 thread × 2 jobs, and 2 threads for the last, beat 2 threads × 1 job throughout: 692 s \
against 779 s for the sweep
    """
    rule = _Ways(models, cores)
    chosen = rule.best()
    if not measured:
        return _told(rule, chosen)
    timed = _Ways(
        [Model(item.name, item.jobs, measured.get(item.name, item.cost)) for item in models], cores
    )
    fastest = timed.best()
    ratio = timed.makespan(chosen) / (timed.makespan(fastest) or math.inf)
    if ratio < OVERTURN:
        return _told(rule, chosen)
    ruled = ", ".join(f"{name} {count}" for name, count in zip(rule.names, chosen, strict=True))
    measure = f"; measured here: the rule's threads ({ruled}) take {ratio:.2f} times as long"
    return _told(timed, fastest, measure)


def jobs_per_gpu(cost: Cost) -> tuple[int, str]:
    """Return how many jobs of a model share a GPU, and why.

    One after another is the rule: processes take turns on a GPU, and several on one were measured
    slower. Two share it where a probe says that they take `OVERTURN` times as many steps together.

    Parameters
    ----------
    cost : Cost
        As a probe measured it, alone and two side by side.

    Examples
    --------
    >>> jobs_per_gpu(Cost({1: 0.004}, {1: 0.001}, pair_seconds=0.005))
    (2, '2 jobs on a GPU beat 1: 2.5 ms against 4 ms per step')
    >>> jobs_per_gpu(Cost({1: 0.004}, {1: 0.001}, pair_seconds=0.007))
    (1, '1 job on a GPU: 4 ms per step, 3.5 ms with 2, and less than 1.3 times faster is no gain')
    """
    if not cost.pair_seconds:
        return 1, "1 job on a GPU: 2 at once could not be timed"
    alone, shared = cost.step_seconds[1], cost.pair_seconds / 2
    one, two = f"{1000 * alone:.3g} ms", f"{1000 * shared:.3g} ms"
    if alone >= OVERTURN * shared:
        return 2, f"2 jobs on a GPU beat 1: {two} against {one} per step"
    return 1, (
        f"1 job on a GPU: {one} per step, {two} with 2, and less than {OVERTURN} times faster is "
        "no gain"
    )


def predict(
    models: Sequence[Model],
    threads: Mapping[str, int],
    cores: int,
    gpus: int = 0,
    per_gpu: Mapping[str, int] | None = None,
) -> Prediction:
    """Return what the sweep takes with these threads, and the least it could take.

    With `gpus`, each job needs one of them, for itself or with as many others as `per_gpu` says.
    """
    ways = _Ways(models, cores, gpus, per_gpu)
    counts = tuple(threads[name] for name in ways.names)
    return Prediction.of(ways.simulation(counts))


_Counts = tuple[int, ...]
"""Threads of each model, in the order of their names."""


class _Ways:
    """The ways to give threads to models, and what the sweep takes with each."""

    def __init__(
        self,
        models: Sequence[Model],
        cores: int,
        gpus: int = 0,
        per_gpu: Mapping[str, int] | None = None,
    ) -> None:
        self.models = sorted(models, key=lambda model: model.name)
        self.names = [model.name for model in self.models]
        self.cores, self.gpus, self.per_gpu = cores, gpus, per_gpu or {}
        # A way is asked for several times: by the choice, and by the sentences about it.
        self.simulation: Callable[..., Simulation] = cache(self._simulate)

    def makespan(self, counts: _Counts, last: LastJobs | None = None) -> float:
        return self.simulation(counts, last).makespan

    def best(self) -> _Counts:
        """The fewest threads that take no longer than a tie with the best."""
        ones = self._equal(1)
        if self.filled:
            return ones
        tried = [self._equal(count) for count in thread_counts(self.cores)]
        counts = self._fewest(tried)
        few = sum(len(model.jobs) for model in self.models) <= FEW_JOBS
        for index in self._by_work() if few and len(self.models) > 1 else ():
            tried += self.others(counts, index)
            counts = self._fewest(tried)
        return counts

    def with_last(self, counts: _Counts) -> tuple[_Counts, LastJobs | None]:
        """A way whose last jobs have more threads, where it is clearly shorter than this one."""
        jobs = sum(len(model.jobs) for model in self.models)
        if self.filled or jobs > LAST_OF_FEW:
            return counts, None
        heads = [counts]
        if len(self.models) == 1:
            heads = [self._equal(count) for count in thread_counts(self.cores)]
        ways = [(head, last) for head in heads for last in self._lasts(head)]
        if not ways:
            return counts, None
        best = min(ways, key=lambda way: (self.makespan(*way), way[0], way[1].jobs))
        return best if TIE * self.makespan(*best) < self.makespan(counts) else (counts, None)

    def _lasts(self, counts: _Counts) -> Iterator[LastJobs]:
        """Yield what the last jobs may have that fit beside each other: of the last one's model."""
        spans = self.simulation(counts).spans
        if not spans:
            return
        index = self.names.index(spans[-1].job.rpartition("/")[0])
        model = self.models[index]
        for jobs in range(1, min(self.cores, len(model.jobs))) if model.last_apart else ():
            if self.cores // jobs > counts[index]:
                yield LastJobs(model.name, jobs, self.cores // jobs)

    @cached_property
    def filled(self) -> bool:
        """Whether jobs with one thread fill the cores, so that nothing else need be tried.

        Where threads save no core-seconds, no way is shorter than the core-seconds with one thread
        / cores; and longest first is longer by the longest job at most (Graham 1969).
        """
        jobs = [model.cost.seconds(work, 1) for model in self.models for work in model.jobs]
        saves = any(
            count * at(model.cost.step_seconds, count) < at(model.cost.step_seconds, 1)
            for model in self.models
            for count in thread_counts(self.cores)
        )
        share = math.fsum(jobs) / self.cores
        most = share + (1 - 1 / self.cores) * max(jobs, default=0.0)
        return not saves and most <= min(TIE * share, self._serial())

    def _serial(self) -> float:
        """Seconds of the best serial way: all threads, one job at a time."""
        return math.fsum(
            model.cost.seconds(work, self.cores) for model in self.models for work in model.jobs
        )

    def _simulate(self, counts: _Counts, last: LastJobs | None = None) -> Simulation:
        def threads(model: Model, count: int, number: int) -> int:
            mine = last is not None and last.model == model.name and number < last.jobs
            return last.threads if last is not None and mine else count

        requests = [
            Request(
                f"{model.name}/{number:06}",
                model.cost.shared(self.per_gpu.get(model.name, 1)).seconds(work, own),
                own,
                gpu=self.gpus > 0,
                jobs_per_gpu=self.per_gpu.get(model.name, 1),
            )
            for model, count in zip(self.models, counts, strict=True)
            for number, work in enumerate(sorted(model.jobs, key=size_of))
            for own in (threads(model, count, number),)
        ]
        return simulate(requests, VirtualMachine(self.cores, self.gpus))

    def _equal(self, count: int) -> _Counts:
        return (count,) * len(self.models)

    def _fewest(self, ways: Sequence[_Counts]) -> _Counts:
        """The fewest threads that are a tie with the best and no longer than the serial way."""
        serial = self.makespan(self._equal(self.cores))
        limit = min(serial, TIE * min(map(self.makespan, ways)))
        return min((way for way in ways if self.makespan(way) <= limit), key=self._order)

    def _order(self, counts: _Counts) -> tuple[int, float, _Counts]:
        threads = sum(
            count * len(model.jobs) for model, count in zip(self.models, counts, strict=True)
        )
        return threads, self.makespan(counts), counts

    def _by_work(self) -> list[int]:
        """Where the models stand, those with the most work first."""
        work = [
            math.fsum(model.cost.seconds(item, 1) for item in model.jobs) for model in self.models
        ]
        return sorted(range(len(self.models)), key=lambda index: (-work[index], index))

    def others(self, counts: _Counts, index: int) -> list[_Counts]:
        """Return the ways that differ in the threads of one model only."""
        return [
            (*counts[:index], count, *counts[index + 1 :])
            for count in thread_counts(self.cores)
            if count != counts[index]
        ]


def _told(ways: _Ways, whole: _Counts, overturned: str = "") -> Decision:
    """Say what was chosen, or the same with more threads for the last jobs."""
    chosen, last = ways.with_last(whole)
    threads = dict(zip(ways.names, chosen, strict=True))
    why = {name: _sentence(ways, whole, index) for index, name in enumerate(ways.names)}
    if last is not None:
        why[last.model] = _of_last(ways, whole, chosen, last)
    return Decision(threads, {name: why[name] + overturned for name in why}, bool(overturned), last)


def _of_last(ways: _Ways, whole: _Counts, chosen: _Counts, last: LastJobs) -> str:
    index = ways.names.index(last.model)
    model = ways.models[index]
    mine, theirs = (_way(model, counts[index], ways.cores) for counts in (chosen, whole))
    here, there = ways.makespan(chosen, last), ways.makespan(whole)
    which = "the last" if last.jobs == 1 else f"each of the last {last.jobs}"
    return (
        f"{mine}, and {last.threads} threads for {which}, beat {theirs} throughout: {here:.3g} s "
        f"against {there:.3g} s for the sweep"
    )


def _sentence(ways: _Ways, chosen: _Counts, index: int) -> str:
    """Compare what was chosen for a model with its best other threads."""
    model, count = ways.models[index], chosen[index]
    if ways.cores == 1:
        return "1 thread: there is 1 core"
    if not model.jobs:
        return "1 thread: there is no job"
    if ways.filled:
        return _filled(ways, model)
    near = [way for way in ways.others(chosen, index) if _is_next(way[index], count, ways.cores)]
    other = min(near, key=lambda way: (ways.makespan(way), way))
    here, there = ways.makespan(chosen), ways.makespan(other)
    verdict = "beat" if here < there else "equal, within 5 %,"
    mine, theirs = (_way(model, number, ways.cores) for number in (count, other[index]))
    steps = [_per_step(model, number, ways.cores) for number in (count, other[index])]
    return (
        f"{mine} {verdict} {theirs}: {here:.3g} s against {there:.3g} s for the sweep, "
        f"{1000 * steps[0]:.3g} ms against {1000 * steps[1]:.3g} ms per step"
    )


def _filled(ways: _Ways, model: Model) -> str:
    one, more = 1, thread_counts(ways.cores)[1]
    mine, theirs = (_way(model, count, ways.cores) for count in (one, more))
    steps = [_per_step(model, count, ways.cores) for count in (one, more)]
    return (
        f"{mine}: the jobs of the sweep fill the cores, and threads cost core-seconds: "
        f"{1000 * steps[0]:.3g} ms per step against {1000 * steps[1]:.3g} ms with {theirs}"
    )


def _is_next(other: int, count: int, cores: int) -> bool:
    counts = thread_counts(cores)
    return abs(counts.index(other) - counts.index(count)) == 1


def _way(model: Model, count: int, cores: int) -> str:
    jobs = _at_once(model, count, cores)
    return (
        f"{count} {'thread' if count == 1 else 'threads'} × {jobs} {'job' if jobs == 1 else 'jobs'}"
    )


def _at_once(model: Model, count: int, cores: int) -> int:
    return min(cores // count, len(model.jobs))


def _per_step(model: Model, count: int, cores: int) -> float:
    """Seconds between two ends of a step, of whichever job."""
    return at(model.cost.step_seconds, count) / _at_once(model, count, cores)


def size_of(work: Work) -> tuple[int, int]:
    """Return what jobs of one model are ordered by: the last ones are the smallest."""
    return work.steps, work.evaluations
