"""How far a sweep is, from its events: steps, seconds, what runs, and the best so far.

A step trains one job on one batch; an iteration of a fusion group is a step of each of its jobs.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asynckfold.jobs.messages import EpochEnded, Progress, RunEvent
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import DONE, ENDED, Result, counts_line
from asynckfold.system.units import duration

AT_ONCE_SECONDS = 0.05
"""Longest time between two counts that are taken as one: jobs of a group report one by one."""

RATE_SECONDS = 10.0
"""Time over which a speed is averaged."""


@dataclass
class Meter:
    """Speed of a count over the last seconds; remembers when the count changed."""

    _changes: deque[tuple[float, float]] = field(default_factory=deque)

    def look(self, now: float, count: float) -> None:
        """Note a count."""
        if self._changes and self._changes[-1][1] == count:
            return
        if self._changes and now - self._changes[-1][0] < AT_ONCE_SECONDS:
            now, _ = self._changes.pop()
        self._changes.append((now, count))
        while len(self._changes) > 2 and now - self._changes[0][0] > RATE_SECONDS:
            self._changes.popleft()

    def per_second(self, now: float) -> float:
        """Return the speed; NaN before there were two counts."""
        if len(self._changes) < 2:
            return math.nan
        (begun, first), (ended, last) = self._changes[0], self._changes[-1]
        # Nothing moved for longer than it usually takes: the speed falls.
        passed = now if now - ended > max(RATE_SECONDS, ended - begun) else ended
        return max(0.0, last - first) / (passed - begun) if passed > begun else math.nan


@dataclass(eq=False)
class PlacementProgress:
    """A placement that runs."""

    placement: Placement
    begun: float
    heard: float
    steps: int = 0  # that its jobs trained
    passed: int = 0  # jobs that run in turn: number of those before `job`
    job: str = ""  # of which there was an event last
    epoch: str = ""  # of that job, as text
    batch: str = ""
    loss: float = math.nan
    meter: Meter = field(default_factory=Meter)
    valid: dict[str, float] = field(default_factory=dict)
    measure: str = "valid"

    @property
    def where(self) -> str:
        """Its cores or GPUs as text, in a cluster with their node."""
        cores, on = (
            self.placement.cores,
            f" of {self.placement.node}" if self.placement.node else "",
        )
        if self.placement.gpu is not None:
            return f"GPU {self.placement.gpu}{on}"
        return f"{'core' if len(cores) == 1 else 'cores'} {','.join(map(str, cores))}{on}"


class SweepProgress:
    """What is known of a sweep, or of the serial baseline.

    Parameters
    ----------
    plan : Plan
        All jobs.
    requests : Mapping of str to Request
        Expected seconds by job id.
    results : sequence of Result
        What earlier sessions finished.
    batches : Mapping of str to int, optional
        Expected batches of an epoch by job id, until the job tells.
    title : str
        What is running, if it is not the sweep itself.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        plan: Plan,
        requests: Mapping[str, Request],
        results: Sequence[Result],
        batches: Mapping[str, int] | None = None,
        title: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.title = title
        self.results: dict[str, Result] = {}
        self.running: dict[str, PlacementProgress] = {}
        self.load: Load | None = None
        self._clock = clock
        self._begun = clock()
        self._jobs = {job.id: job for job in plan.jobs}
        self.waiting = set(self._jobs)
        self._width = {name: len(group) for group in plan.groups for name in group}
        self._expected = {name: request.seconds for name, request in requests.items()}
        self._batches = {name: (batches or {}).get(name, 1) for name in self._jobs}
        self.steps = sum(self._batches.values()) * plan.params.epochs
        self._done: dict[str, int] = {}  # steps of running jobs
        self._ended_steps = self._running_steps = 0
        self._skipped = 0  # counted as done, but not trained just now
        self._meter = Meter()
        self._epochs: dict[str, tuple[float, int]] = {}  # seconds (of whole groups) and number
        self._rough: dict[str, float] = {}  # seconds of a job by model, from the speed of its steps
        self._placements = 1
        self._statuses = Counter[str]()
        self._best: str | None = None
        self._order = {name: place for place, name in enumerate(self._jobs)}
        for result in results:
            self.ended(result)

    def placed(self, placement: Placement) -> None:
        """Jobs went from waiting to running."""
        found = PlacementProgress(placement, self._clock(), self._clock())
        for name in placement.jobs:
            self.waiting.discard(name)
            if name in self.results:
                # It failed, and is tried again.
                self._statuses[self.results.pop(name).status] -= 1
                self._ended_steps -= self._steps_of(name)
                self._skipped -= self._steps_of(name)
                self._best = None
            done = self._done.pop(name, 0)
            self._skipped -= done
            self._running_steps -= done
            self.running[name] = found
        self._placements = len(self.placements)

    def heard(self, event: RunEvent) -> None:
        """Remember where a job is, and how long its epochs take."""
        if not isinstance(event, (Progress, EpochEnded)) or event.job_id not in self.running:
            return
        name, found = event.job_id, self.running[event.job_id]
        found.job, found.heard = name, self._clock()
        self._pass_to(name, found)
        epochs = self.plan.params.epochs
        if isinstance(event, Progress):
            self.steps += (event.batches - self._batches[name]) * epochs
            self._batches[name] = event.batches
            found.epoch, found.batch = f"{event.epoch}/{epochs}", f"{event.batch}/{event.batches}"
            found.loss = event.loss
            self._advance(name, event.epoch - 1, event.batch)
            return
        item, model = event.epoch, self._jobs[name].model
        seconds, count = self._epochs.get(model, (0.0, 0))
        self._epochs[model] = seconds + item.seconds * self._width.get(name, 1), count + 1
        found.epoch, found.batch = f"{item.number}/{epochs}", ""
        measures = [("valid", item.accuracy), ("valid loss", item.valid_loss)]
        known = (
            (measure, value)
            for measure, value in measures
            if value is not None and not math.isnan(value)
        )
        found.measure, found.valid[name] = next(known, ("train loss", item.train_loss))
        self._advance(name, item.number - 1, self._batches[name])

    def _pass_to(self, name: str, found: PlacementProgress) -> None:
        """Count the jobs before this one as trained, of those that run in turn."""
        if not found.placement.is_job_batch:
            return
        place = found.placement.jobs.index(name)
        for before in found.placement.jobs[found.passed : place]:
            if self.running.get(before) is found:
                self._count(before, self._steps_of(before))
        found.passed = max(found.passed, place)

    def _advance(self, name: str, epoch: int, batch: int) -> None:
        before, found = epoch * self._batches[name], self.running[name]
        if name not in self._done:
            # Those of a checkpoint were trained before.
            self._skipped += before
            found.steps -= before
            self._count(name, before)
        self._count(name, before + batch)
        count = found.steps
        if not found.placement.is_job_batch:
            count = max(self._done.get(other, 0) for other in self._live(found))
        found.meter.look(found.heard, count)
        speed = found.meter.per_second(found.heard)
        if speed > 0:
            self._rough[self._jobs[name].model] = self._steps_of(name) / speed
        self._meter.look(found.heard, self.steps_done - self._skipped)

    def _count(self, name: str, steps: int) -> None:
        """Set the steps of a running job."""
        more = steps - self._done.get(name, 0)
        self._done[name] = steps
        self._running_steps += more
        self.running[name].steps += more

    def ended(self, result: Result) -> None:
        """A job went from running, or from waiting when its worker died, to ended."""
        name = result.job_id
        self.running.pop(name, None)
        self.waiting.discard(name)
        done, steps = self._done.pop(name, 0), self._steps_of(name)
        self._running_steps -= done
        if name not in self.results:
            self._ended_steps += steps
            self._skipped += steps - done
        else:
            self._statuses[self.results[name].status] -= 1
        self._statuses[result.status] += 1
        self._best = None
        # Their outputs are large.
        self.results[name] = replace(result, outputs=None, epochs=(), traceback="")

    @property
    def placements(self) -> list[PlacementProgress]:
        """The placements that run."""
        return list(dict.fromkeys(self.running.values()))

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        return not self.waiting and not self.running

    @property
    def steps_done(self) -> int:
        """Steps that are done, of `steps`; those of ended jobs count as done."""
        return self._ended_steps + self._running_steps

    @property
    def percent(self) -> int:
        """Share of the steps that are done; 100 only at the end."""
        return 100 if self.is_over else min(99, 100 * self.steps_done // max(1, self.steps))

    def seconds_left(self) -> float | None:
        """Expected wall time until the last job ends; None before the first epoch or speed."""
        if self.is_over:
            return 0.0
        if not self._epochs and not self._rough:
            return None
        running = [self._left(found) for found in self.placements]
        # Between the end of a placement and the start of the next there is one less.
        count = max(1, len(running), self._placements if self.waiting else 0)
        # The jobs of a group train at once: each has its share.
        waiting = math.fsum(self._seconds(job) / self._width.get(job, 1) for job in self.waiting)
        found = max([(waiting + math.fsum(running)) / count, *running])
        return found if math.isfinite(found) else None

    def _left(self, found: PlacementProgress) -> float:
        """Return the expected seconds until a placement ends."""
        lefts = [
            self._seconds(name) * (1 - self._done.get(name, 0) / max(1, self._steps_of(name)))
            for name in self._live(found)
        ]
        total = math.fsum(lefts) if found.placement.is_job_batch else max(lefts)
        return max(0.0, total - (self._clock() - found.heard))

    def _seconds(self, name: str) -> float:
        """Return the seconds that a job takes, or its whole group."""
        model = self._jobs[name].model
        total, count = self._epochs.get(model, (0.0, 0))
        if count:
            return total / count * self.plan.params.epochs
        return self._rough.get(model, self._expected.get(name, 0.0) * self._width.get(name, 1))

    def _steps_of(self, name: str) -> int:
        return self._batches[name] * self.plan.params.epochs

    def _live(self, found: PlacementProgress) -> list[str]:
        return [name for name in found.placement.jobs if self.running.get(name) is found]

    def best(self) -> str:
        """Return the candidate with the highest mean so far, and on how many folds."""
        if self._best is None:
            self._best = _best_of(self.plan, self._jobs, self.results.values())
        return self._best

    def summary(self) -> str:
        """Return the number of jobs by state."""
        if self.title:
            return f"{self.title}: job {max(1, len(self._done))} of {len(self._jobs)}"
        pending = len(self._jobs) - len(self.results)
        counts = {"planned": len(self._jobs), **{name: self._statuses[name] for name in ENDED}}
        counts |= {"pending": pending, "running": len(self.running)}
        return counts_line(counts, is_held=True)

    def times(self) -> str:
        """Return the time that passed and is left, and the speed."""
        parts = [f"{duration(self._clock() - self._begun)} elapsed"]
        left = self.seconds_left()
        if left is not None and not self.is_over:
            parts.append(f"{duration(left)} left")
        speed = self._meter.per_second(self._clock())
        if speed > 0 and not self.is_over:
            parts.append(_speed(speed, "step"))
        return ", ".join(parts)

    def lines(self) -> list[str]:
        """Return a line for each placement that runs, in the order of the plan."""
        found = sorted(self.placements, key=lambda item: self._order[item.placement.jobs[0]])
        return [_line_of(self, item) for item in found]


def overview(progress: SweepProgress) -> str:
    """Return how far a sweep is on one line."""
    found = f"{progress.summary()}, {progress.times()}"
    if progress.is_over:
        return found
    found = f"{progress.percent} % of the steps: {found}"
    return "; ".join(filter(None, [found, progress.best()]))


def cores_in_use(progress: SweepProgress) -> str:
    """Return how many cores the jobs hold, and how many other programs use."""
    if progress.load is None:
        return ""
    running = (found.placement for found in progress.placements)
    nodes = [node for node in progress.load.nodes if node.cores]
    taken = {(item.node, core) for item in running for core in item.cores}
    count = sum(len(node.cores) for node in nodes)
    used = f"jobs on {len(taken)} of {count} {'core' if count == 1 else 'cores'}"
    used += f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    # Some may be those of jobs.
    others = count - sum(len(node.idle) for node in nodes)
    return f"{used}, other programs on {others}" if others else used


def _line_of(progress: SweepProgress, found: PlacementProgress) -> str:
    jobs = [progress._jobs[name] for name in found.placement.jobs]
    name, number = found.job or jobs[0].id, len(jobs)
    is_fused = number > 1 and not found.placement.is_job_batch
    if is_fused:
        candidates = {job.candidate for job in jobs}
        name = jobs[0].candidate if len(candidates) == 1 else jobs[0].model
    parts = [name, f"epoch {found.epoch}" if found.epoch else "starting"]
    if is_fused:
        parts.append(f"{number} {'folds' if len(candidates) == 1 else 'jobs'} fused")
    elif number > 1 and not progress.title and (others := len(progress._live(found)) - 1):
        parts.append(f"then {others} more")
    speed = found.meter.per_second(progress._clock())
    if speed > 0:
        parts.append(_speed(speed, "it"))
    score = [found.valid[job.id] for job in jobs if job.id in found.valid]
    if not is_fused:
        score = [found.valid[name]] if name in found.valid else []
    if score:
        parts.append(f"{found.measure} {_mean(score):.3f}")
    elif found.batch:
        parts += [f"batch {found.batch}", f"loss {found.loss:.4g}"]
    return " · ".join([*parts, found.where])


def _best_of(plan: Plan, jobs: Mapping[str, Job], results: Iterable[Result]) -> str:
    metric = plan.scoring[0]
    by_candidate: dict[str, list[float]] = {}
    for result in results:
        if result.status == DONE and not math.isnan(result.scores.get(metric, math.nan)):
            scores = by_candidate.setdefault(jobs[result.job_id].candidate, [])
            scores.append(result.scores[metric])
    most = max(map(len, by_candidate.values()), default=0)
    means = {name: _mean(found) for name, found in by_candidate.items() if len(found) == most}
    means = {name: mean for name, mean in means.items() if not math.isnan(mean)}
    if not means:
        return ""
    highest = max(means.values())
    first, *others = sorted(name for name, mean in means.items() if mean == highest)
    score = f"{metric} {highest:.4f} ({most} {'fold' if most == 1 else 'folds'})"
    if others:
        return f"so far {first} is tied with {len(others)} more at {score}"
    # One alone is not the best: the others have fewer folds.
    return f"{'best so far' if len(means) > 1 else 'so far'} {first} {score}"


def _mean(values: Iterable[float]) -> float:
    """Return the mean, whatever the order; NaN of infinities of both signs."""
    found = sorted(values)
    return sum(found) / len(found)


def _speed(per_second: float, unit: str) -> str:
    """Return a speed for people.

    >>> _speed(155.4, "step"), _speed(31.2, "it"), _speed(2.25, "it"), _speed(0.25, "it")
    ('155 steps/s', '31 it/s', '2.2 it/s', '4.0 s/it')
    """
    if per_second < 1:
        return f"{1 / per_second:.1f} s/{unit}"
    units = unit if unit == "it" else f"{unit}s"
    return f"{per_second:.{0 if per_second >= 10 else 1}f} {units}/s"
