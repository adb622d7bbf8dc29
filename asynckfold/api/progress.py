"""How far a sweep is, from its events: steps, seconds, what runs, and the best so far.

A step trains one job on one batch; an iteration of a fusion group is a step of each of its jobs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from asynckfold.jobs.messages import EpochEnd, Progress, RunEvent
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE, ENDED, Epoch, Result, counts_line
from asynckfold.system.plain_text import columns_of, fitted
from asynckfold.system.units import duration

NAME_COLUMNS = 16
"""Least width of a name whose line is shortened."""


@dataclass(eq=False)
class PlacementProgress:
    """A placement that runs, and where the job is that reported last."""

    placement: Placement
    job: str = ""
    epoch: str = ""  # as text
    batch: str = ""  # of it, with the loss

    @property
    def where(self) -> str:
        """Its cores or its GPU as text, in a cluster with their node."""
        on = f" of {self.placement.node}" if self.placement.node else ""
        if self.placement.gpu is not None:
            return f"GPU {self.placement.gpu}{on}"
        cores = self.placement.cores
        return f"{'core' if len(cores) == 1 else 'cores'} {','.join(map(str, cores))}{on}"


class SweepProgress:
    """How far a sweep is.

    `requests` have the expected seconds, and `batches` the expected batches of an epoch, by job id,
    until the job reports them; `results` are what earlier sessions finished.
    """

    def __init__(
        self,
        plan: Plan,
        requests: Mapping[str, Request],
        results: Sequence[Result],
        batches: Mapping[str, int],
    ) -> None:
        self.plan = plan
        self.results: dict[str, Result] = {}
        self.running: dict[str, PlacementProgress] = {}
        self.epochs: dict[str, list[Epoch]] = {}  # of running jobs, by job id
        self.load: Load | None = None
        self._began = time.monotonic()
        self._jobs = {job.id: job for job in plan.jobs}
        self.waiting = set(self._jobs)
        self._seconds = {name: request.seconds or 1.0 for name, request in requests.items()}
        self._batches = {name: batches.get(name, 1) for name in self._jobs}
        self._done: dict[str, int] = {}  # steps of running and ended jobs
        self._restored: dict[str, int] = {}  # of these, steps that this session did not train
        for result in results:
            self.ended(result)

    def placed(self, placement: Placement) -> None:
        """Move jobs from waiting to running; a failed job may be tried again."""
        item = PlacementProgress(placement)
        for name in placement.jobs:
            self.waiting.discard(name)
            earlier: list[dict[str, Any]] = [self.results, self._done, self._restored, self.epochs]
            for by_job in earlier:
                by_job.pop(name, None)
            self.running[name] = item

    def heard(self, event: RunEvent) -> None:
        """Take where a job is, and what it measured."""
        if not isinstance(event, (Progress, EpochEnd)) or event.job_id not in self.running:
            return
        name, item = event.job_id, self.running[event.job_id]
        item.job = name
        if isinstance(event, Progress):
            number, batch, self._batches[name] = event.epoch, event.batch, event.batches
            item.batch = f"batch {event.batch}/{event.batches} · loss {event.loss:.4g}"
        else:
            number, batch, epoch = event.epoch.number, self._batches[name], event.epoch
            item.batch = ""
            self.epochs.setdefault(name, []).append(epoch)
        item.epoch = f"epoch {number}/{self.plan.params.epochs}"
        before_epoch = (number - 1) * self._batches[name]
        self._restored.setdefault(name, before_epoch)
        self._done[name] = before_epoch + batch

    def ended(self, result: Result) -> None:
        """Move a job from running, or from waiting when its worker died, to ended."""
        name = result.job_id
        steps = self._done[name] = self._steps_of(name)
        if self.running.pop(name, None) is None:
            self._restored[name] = steps
        self.waiting.discard(name)
        self.epochs.pop(name, None)
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
    def steps(self) -> int:
        """Steps of all jobs."""
        return sum(self._batches.values()) * self.plan.params.epochs

    @property
    def steps_done(self) -> int:
        """Steps that are done, of `steps`; those of ended jobs count as done."""
        return sum(self._done.values())

    @property
    def percent(self) -> int:
        """Share of the steps that are done; 100 only at the end."""
        return 100 if self.is_over else min(99, 100 * self.steps_done // max(1, self.steps))

    def seconds_left(self) -> float | None:
        """Expected wall time until the last job ends; None before the first step.

        The expected seconds of what is left, at the pace of this session so far.
        """
        if self.is_over:
            return 0.0
        worked = math.fsum(map(self._worked_of, self._done))
        left = math.fsum(self._seconds.get(name, 1.0) for name in self.waiting)
        for name in self.running:
            share = self._done.get(name, 0) / max(1, self._steps_of(name))
            left += self._seconds.get(name, 1.0) * max(0.0, 1 - share)
        elapsed = time.monotonic() - self._began
        return left * elapsed / worked if worked > 0 and elapsed > 0 else None

    def _worked_of(self, name: str) -> float:
        """Return the expected seconds of the steps of a job that this session trained."""
        trained = self._done.get(name, 0) - self._restored.get(name, 0)
        return self._seconds.get(name, 1.0) * trained / max(1, self._steps_of(name))

    def _steps_of(self, name: str) -> int:
        return self._batches[name] * self.plan.params.epochs

    def best(self, columns: int = 1 << 20) -> str:
        """Return the candidate with the highest mean, among those with the most folds."""
        metric, scores = self.plan.scoring[0], dict[str, list[float]]()
        for result in self.results.values():
            score = result.scores.get(metric, math.nan)
            job = self._jobs[result.job_id]
            if result.status == DONE and math.isfinite(score) and job.inner is None:
                scores.setdefault(job.candidate, []).append(score)
        counts = sorted(map(len, scores.values()))[-2:]
        # In a race, the first one in the next fold is alone there for a moment.
        most = 0 if not counts else counts[-1] if self.plan.race is None else counts[0]
        means = {name: fmean(every) for name, every in scores.items() if len(every) >= most}
        if not means:
            return self._leading(columns)
        first = max(sorted(means), key=means.__getitem__)
        folds = len(scores[first])
        text = f"{metric} {means[first]:.4f} ({folds} {'fold' if folds == 1 else 'folds'})"
        # One alone is not the best: the others have fewer folds.
        return _line("best so far" if len(means) > 1 else "so far", first, text, columns)

    def _leading(self, columns: int) -> str:
        """Return what the jobs that run measured last, of the best one."""
        newest = {name: epochs[-1] for name, epochs in self.epochs.items()}
        is_loss = any(epoch.accuracy is None for epoch in newest.values())
        measured = {
            name: epoch.valid_loss if is_loss else _valid(epoch) for name, epoch in newest.items()
        }
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        if not finite:
            return ""
        first = (min if is_loss else max)(finite, key=finite.__getitem__)
        measure = "loss" if is_loss else "accuracy"
        where = f"epoch {newest[first].number} of {self.plan.params.epochs}"
        return _line("so far", first, f"valid {measure} {finite[first]:.4f} ({where})", columns)

    def summary(self) -> str:
        """Return the number of jobs by state."""
        statuses = Counter(result.status for result in self.results.values())
        counts = {"planned": len(self._jobs), **{name: statuses[name] for name in ENDED}}
        counts |= {"pending": len(self.waiting | {*self.running}), "running": len(self.running)}
        return counts_line(counts, is_held=True)

    def times(self) -> str:
        """Return the time that passed, and that is left."""
        elapsed, left = time.monotonic() - self._began, self.seconds_left()
        text = f"{duration(elapsed)} elapsed"
        return text if left is None or self.is_over else f"{text}, {duration(left)} left"

    def lines(self, columns: int = 1 << 20) -> list[str]:
        """Return a line for each placement that runs, in the order of the plan."""
        order = {name: place for place, name in enumerate(self._jobs)}
        items = sorted(self.placements, key=lambda item: order[item.placement.jobs[0]])
        return [self._line_of(item, columns) for item in items]

    def _line_of(self, item: PlacementProgress, columns: int) -> str:
        jobs = [self._jobs[name] for name in item.placement.jobs]
        name, group, shown = item.job or jobs[0].id, "", [item.job]
        if len(jobs) > 1 and not item.placement.is_job_batch:
            is_one = len({job.candidate for job in jobs}) == 1
            name = jobs[0].candidate if is_one else jobs[0].model
            group = f"{len(jobs)} {'folds' if is_one else 'jobs'} fused"
            shown = [job.id for job in jobs]
        elif others := sum(self.running.get(job.id) is item for job in jobs) - 1:
            group = f"then {others} more"
        valid = [_valid(self.epochs[job][-1]) for job in shown if job in self.epochs]
        measured = f"valid {sum(valid) / len(valid):.3f}" if valid else item.batch
        parts = [item.epoch or "starting", group, measured, item.where]
        return _line("", name, "".join(f"· {part} " for part in parts if part).rstrip(), columns)


def _line(before: str, name: str, after: str, columns: int) -> str:
    """Join what stands around a name, which is shortened to fit."""
    rest = columns_of(before) + columns_of(after) + 2
    name = fitted(name, max(NAME_COLUMNS, columns - rest))
    return " ".join(filter(None, [before, name, after]))


def _valid(epoch: Epoch) -> float:
    return epoch.valid_loss if epoch.accuracy is None else epoch.accuracy


def overview(progress: SweepProgress) -> str:
    """Return how far a sweep is on one line."""
    text = f"{progress.summary()}, {progress.times()}"
    if progress.is_over:
        return text
    return "; ".join(filter(None, [f"{progress.percent} % of the steps: {text}", progress.best()]))


def cores_in_use(progress: SweepProgress) -> str:
    """Return how many cores the jobs hold, and how many other programs use."""
    if progress.load is None:
        return ""
    nodes = [node for node in progress.load.nodes if node.cores]
    running = [item.placement for item in progress.placements]
    taken = {(placement.node, core) for placement in running for core in placement.cores}
    count = sum(len(node.cores) for node in nodes)
    text = f"jobs on {len(taken)} of {count} {'core' if count == 1 else 'cores'}"
    text += f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    # Some may be those of jobs.
    others = count - sum(len(node.idle) for node in nodes)
    return f"{text}, other programs on {others}" if others else text
