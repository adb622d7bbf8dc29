"""Searches the number of threads of each model's jobs; pure.

The number of threads changes bits, so the same sweep must get the same threads on an idle and on a
busy machine. The decision follows a rule over what does not vary: floating-point operations of a
step, number and length of the jobs, allotted cores. Timings overturn it only by a large margin.

With the step times of `flop_model`, each assignment of threads is simulated to the end of the
sweep with the function that will place its jobs. All threads for one job at a time, the best serial
execution, is always among the candidates. If the last jobs leave cores idle, more threads for them
are simulated as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from asynckfold.jobs.cost import Cost, Work, at
from asynckfold.jobs.placement import NodeSize, Request
from asynckfold.planning.flop_model import OVERTURN, thread_counts
from asynckfold.scheduling.simulate import Simulation, VirtualMachine, simulate

TIE = 1.05
"""Assignments within this ratio of the best are equal; the fewest threads win."""

FEW_JOBS = 400
"""Largest number of jobs for which models may get different threads; each trial is simulated."""

LAST_OF_FEW = 100
"""Largest number of jobs for which the last ones may get more threads."""


@dataclass(frozen=True)
class Model:
    """A model with the work of each of its jobs and its cost."""

    name: str
    jobs: tuple[Work, ...]
    cost: Cost
    last_apart: bool = False
    """Whether its last jobs may have more threads than the others: none of them is fused."""


@dataclass(frozen=True)
class LastJobs:
    """The last and shortest jobs of a model, their number, and the threads of each."""

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
        Jobs that have more threads than their model.
    """

    threads: Mapping[str, int]
    why: Mapping[str, str]
    overturned: bool = False
    last: LastJobs | None = None


@dataclass(frozen=True)
class Prediction:
    """Expected seconds of the whole sweep, their lower bound, and those of the longest job."""

    makespan: float
    lower_bound: float
    longest: float

    @classmethod
    def of(cls, found: Simulation) -> Prediction:
        """Return the prediction of a simulation."""
        longest = max((span.end - span.start for span in found.spans), default=0.0)
        return cls(found.makespan, found.lower_bound, longest)


def decide(
    models: Sequence[Model],
    cores: int,
    measured: Mapping[str, Cost] | None = None,
    nodes: Sequence[NodeSize] = (),
) -> Decision:
    """Choose the threads of each model's jobs.

    The choice is the fewest threads among all assignments whose simulated makespan is within `TIE`
    of the best and no longer than one job at a time with all threads. The last jobs of a model get
    more threads if that shortens the sweep by more than `TIE`: five jobs on four cores are four
    with one thread, then one with four.

    Parameters
    ----------
    models : sequence of Model
        With the costs of the rule; their order does not matter.
    cores : int
        Allotted cores, used by other processes or not; the most threads of a job.
    measured : Mapping of str to Cost, optional
        Costs by model from a probe. They are followed if the rule's choice takes `OVERTURN` times
        longer than the best.
    nodes : sequence of NodeSize, optional
        The nodes of a cluster. A job has no more threads than `cores` and runs on one of them.

    Returns
    -------
    Decision

    Examples
    --------
    >>> from asynckfold.planning.flop_model import rule_cost
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
    rule = _Assignments(models, cores, nodes=nodes)
    chosen = rule.best()
    if not measured:
        return _decision(rule, chosen)
    timed = _Assignments(
        [Model(item.name, item.jobs, measured.get(item.name, item.cost)) for item in models],
        cores,
        nodes=nodes,
    )
    fastest = timed.best()
    ratio = timed.makespan(chosen) / (timed.makespan(fastest) or math.inf)
    if ratio < OVERTURN:
        return _decision(rule, chosen)
    ruled = ", ".join(f"{name} {count}" for name, count in zip(rule.names, chosen, strict=True))
    measure = f"; measured here: the rule's threads ({ruled}) take {ratio:.2f} times as long"
    return _decision(timed, fastest, measure)


def predict(
    models: Sequence[Model],
    threads: Mapping[str, int],
    cores: int,
    gpus: int = 0,
    per_gpu: Mapping[str, int] | None = None,
    nodes: Sequence[NodeSize] = (),
) -> Prediction:
    """Predict the makespan of a sweep with these threads.

    With `gpus`, each job needs one, which `per_gpu` jobs of its model share. `nodes` are those of a
    cluster, with cores and GPUs of their own.
    """
    ways = _Assignments(models, cores, gpus, per_gpu, nodes)
    counts = tuple(threads[name] for name in ways.names)
    return Prediction.of(ways.simulation(counts))


_Counts = tuple[int, ...]
"""Threads of each model, in the order of their names."""


class _Assignments:
    """The assignments of threads to models, and the simulated sweep with each."""

    def __init__(
        self,
        models: Sequence[Model],
        cores: int,
        gpus: int = 0,
        per_gpu: Mapping[str, int] | None = None,
        nodes: Sequence[NodeSize] = (),
    ) -> None:
        self.models = sorted(models, key=lambda model: model.name)
        self.names = [model.name for model in self.models]
        self.cores, self.per_gpu = cores, per_gpu or {}
        self.machine = VirtualMachine.of(nodes or [NodeSize(cores, gpus)])
        # Used several times: by the choice, and by the sentences about it.
        self.simulation: Callable[..., Simulation] = cache(self._simulate)

    def makespan(self, counts: _Counts, last: LastJobs | None = None) -> float:
        return self.simulation(counts, last).makespan

    def best(self) -> _Counts:
        """Return the fewest threads within a tie of the best."""
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
        """Return an assignment with more threads for the last jobs if it is clearly shorter."""
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
        """Yield more threads for the last jobs of the model that ends last, side by side."""
        spans = self.simulation(counts).spans
        if not spans:
            return
        index = self.names.index(spans[-1].job.rpartition("/")[0])
        model = self.models[index]
        most = min(self.machine.all_cores, len(model.jobs)) if model.last_apart else 0
        for jobs in range(1, most):
            threads = self.most_threads(jobs)
            if threads > counts[index]:
                yield LastJobs(model.name, jobs, threads)

    def at_once(self, threads: int) -> int:
        """Return how many jobs with these threads run side by side."""
        return sum(node.cores // threads for node in self.machine.each)

    def most_threads(self, jobs: int) -> int:
        """Return the most threads with which so many jobs run side by side."""
        return next(count for count in range(self.cores, 0, -1) if self.at_once(count) >= jobs)

    @cached_property
    def filled(self) -> bool:
        """Whether jobs with one thread fill the cores, so that nothing else need be tried.

        If threads save no core-seconds, the core-seconds with one thread / cores are a lower bound;
        longest-first exceeds it by at most the longest job (Graham 1969).
        """
        jobs = [model.cost.seconds(work, 1) for model in self.models for work in model.jobs]
        saves = any(
            count * at(model.cost.step_seconds, count) < at(model.cost.step_seconds, 1)
            for model in self.models
            for count in thread_counts(self.cores)
        )
        cores = self.machine.all_cores
        share = math.fsum(jobs) / cores
        most = share + (1 - 1 / cores) * max(jobs, default=0.0)
        return not saves and most <= min(TIE * share, self._serial())

    def _serial(self) -> float:
        """Seconds of the best serial execution: all threads, one job at a time on each node."""
        seconds = math.fsum(
            model.cost.seconds(work, self.cores) for model in self.models for work in model.jobs
        )
        return seconds / self.at_once(self.cores)

    def _simulate(self, counts: _Counts, last: LastJobs | None = None) -> Simulation:
        def threads(model: Model, count: int, number: int) -> int:
            mine = last is not None and last.model == model.name and number < last.jobs
            return last.threads if last is not None and mine else count

        requests = [
            Request(
                f"{model.name}/{number:06}",
                model.cost.shared(self.per_gpu.get(model.name, 1)).seconds(work, own),
                own,
                gpu=self.machine.gpus > 0,
                jobs_per_gpu=self.per_gpu.get(model.name, 1),
            )
            for model, count in zip(self.models, counts, strict=True)
            for number, work in enumerate(sorted(model.jobs, key=size_of))
            for own in (threads(model, count, number),)
        ]
        return simulate(requests, self.machine)

    def _equal(self, count: int) -> _Counts:
        return (count,) * len(self.models)

    def _fewest(self, ways: Sequence[_Counts]) -> _Counts:
        """Return the fewest threads within a tie of the best and no longer than serial."""
        serial = self.makespan(self._equal(self.cores))
        limit = min(serial, TIE * min(map(self.makespan, ways)))
        return min((way for way in ways if self.makespan(way) <= limit), key=self._order)

    def _order(self, counts: _Counts) -> tuple[int, float, _Counts]:
        threads = sum(
            count * len(model.jobs) for model, count in zip(self.models, counts, strict=True)
        )
        return threads, self.makespan(counts), counts

    def _by_work(self) -> list[int]:
        """Return the indices of the models, most work first."""
        work = [
            math.fsum(model.cost.seconds(item, 1) for item in model.jobs) for model in self.models
        ]
        return sorted(range(len(self.models)), key=lambda index: (-work[index], index))

    def others(self, counts: _Counts, index: int) -> list[_Counts]:
        """Return the assignments that differ in the threads of one model only."""
        return [
            (*counts[:index], count, *counts[index + 1 :])
            for count in thread_counts(self.cores)
            if count != counts[index]
        ]


def _decision(ways: _Assignments, whole: _Counts, overturned: str = "") -> Decision:
    """Return the decision, perhaps with more threads for the last jobs, and its reasons."""
    chosen, last = ways.with_last(whole)
    threads = dict(zip(ways.names, chosen, strict=True))
    why = {name: _sentence(ways, whole, index) for index, name in enumerate(ways.names)}
    if last is not None:
        why[last.model] = _last_sentence(ways, whole, chosen, last)
    return Decision(threads, {name: why[name] + overturned for name in why}, bool(overturned), last)


def _last_sentence(ways: _Assignments, whole: _Counts, chosen: _Counts, last: LastJobs) -> str:
    index = ways.names.index(last.model)
    model = ways.models[index]
    mine, theirs = (_way(ways, model, counts[index]) for counts in (chosen, whole))
    here, there = ways.makespan(chosen, last), ways.makespan(whole)
    which = "the last" if last.jobs == 1 else f"each of the last {last.jobs}"
    return (
        f"{mine}, and {last.threads} threads for {which}, beat {theirs} throughout: {here:.3g} s "
        f"against {there:.3g} s for the sweep"
    )


def _sentence(ways: _Assignments, chosen: _Counts, index: int) -> str:
    """Compare the chosen threads of a model with its best alternative."""
    model, count = ways.models[index], chosen[index]
    if ways.cores == 1:
        which = "there is" if ways.machine.nodes == 1 else "the smallest node has"
        return f"1 thread: {which} 1 core"
    if not model.jobs:
        return "1 thread: there is no job"
    if ways.filled:
        return _filled_sentence(ways, model)
    near = [way for way in ways.others(chosen, index) if _is_next(way[index], count, ways.cores)]
    other = min(near, key=lambda way: (ways.makespan(way), way))
    here, there = ways.makespan(chosen), ways.makespan(other)
    verdict = "beat" if here < there else "equal, within 5 %,"
    mine, theirs = (_way(ways, model, number) for number in (count, other[index]))
    steps = [_per_step(ways, model, number) for number in (count, other[index])]
    return (
        f"{mine} {verdict} {theirs}: {here:.3g} s against {there:.3g} s for the sweep, "
        f"{1000 * steps[0]:.3g} ms against {1000 * steps[1]:.3g} ms per step"
    )


def _filled_sentence(ways: _Assignments, model: Model) -> str:
    one, more = 1, thread_counts(ways.cores)[1]
    mine, theirs = (_way(ways, model, count) for count in (one, more))
    steps = [_per_step(ways, model, count) for count in (one, more)]
    return (
        f"{mine}: the jobs of the sweep fill the cores, and threads cost core-seconds: "
        f"{1000 * steps[0]:.3g} ms per step against {1000 * steps[1]:.3g} ms with {theirs}"
    )


def _is_next(other: int, count: int, cores: int) -> bool:
    counts = thread_counts(cores)
    return abs(counts.index(other) - counts.index(count)) == 1


def _way(ways: _Assignments, model: Model, count: int) -> str:
    jobs = min(ways.at_once(count), len(model.jobs))
    return (
        f"{count} {'thread' if count == 1 else 'threads'} × {jobs} {'job' if jobs == 1 else 'jobs'}"
    )


def _per_step(ways: _Assignments, model: Model, count: int) -> float:
    """Mean seconds per step over all jobs that run side by side."""
    return at(model.cost.step_seconds, count) / min(ways.at_once(count), len(model.jobs))


def size_of(work: Work) -> tuple[int, int]:
    """Return the sort key of the jobs of one model: the last ones are the smallest."""
    return work.steps, work.evaluations
