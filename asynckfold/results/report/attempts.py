"""Attempts, their packing, averaging, failures and the event log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asynckfold.jobs.placement import Wait
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import Result, cause, job_by_id
from asynckfold.results.utilization import end_of, mean_use
from asynckfold.store import RunReader, Sample


@dataclass(frozen=True)
class Bar:
    """One attempt: a bar in the Gantt chart; times in run seconds."""

    job: str
    candidate: str
    attempt: int
    cores: tuple[int, ...]
    device: str
    start: float
    end: float
    outcome: str
    error: str
    expected: float  # seconds of the whole job
    memory: int | None  # bytes reserved; None if not known
    peak_memory: int | None  # bytes of the whole process, torch included; None if not known
    waits: tuple[Wait, ...]  # before it
    changes: tuple[tuple[float, tuple[int, ...]], ...] = ()  # cores held from a later moment on
    score: float = math.nan  # by the first metric; NaN without a result
    node: str = ""  # its name, in a cluster

    @property
    def ended_well(self) -> bool:
        """Whether it ended with a score, or still may."""
        return self.outcome in ("ok", "running")


@dataclass(frozen=True)
class FailureGroup:
    """Jobs that ended with the same status and error text."""

    status: str
    error: str
    jobs: tuple[str, ...]
    traceback: str


@dataclass(frozen=True)
class LogLine:
    """An event of the run; `at` in run seconds."""

    at: float
    kind: str
    job: str
    text: str


def bars(store: RunReader, results: Mapping[str, Result]) -> tuple[Bar, ...]:
    """Return a bar for each attempt; one without an end lasts as long as its session."""
    metric, jobs = store.plan.scoring[0], job_by_id(store.plan)
    sessions = {item.session: item.end for item in store.sessions()}
    open_outcome = "lost" if store.holder() is None else "running"
    drawn = []
    for item in store.attempts():
        if item.job_id not in jobs:
            continue
        job, result = jobs[item.job_id], results.get(item.job_id)
        is_last = result is not None and result.attempt == item.attempt
        drawn.append(
            Bar(
                job=job.id,
                candidate=job.candidate,
                attempt=item.attempt,
                cores=item.cores,
                device=item.device,
                start=item.started,
                end=end_of(item, sessions),
                outcome=item.outcome or open_outcome,
                error=item.error,
                expected=item.expected,
                memory=item.memory,
                peak_memory=result.peak_memory if result and is_last else None,
                waits=item.waits,
                changes=item.changes,
                score=result.scores.get(metric, math.nan) if result and is_last else math.nan,
                node=item.node,
            )
        )
    return tuple(drawn)


def failures(plan: Plan, results: Mapping[str, Result]) -> tuple[FailureGroup, ...]:
    """Group equal errors, the most frequent first."""
    groups: dict[tuple[str, str], list[tuple[Job, Result]]] = {}
    for job in plan.jobs:
        result = results.get(job.id)
        if result is not None and result.is_failure:
            groups.setdefault((result.status, cause(result.error)), []).append((job, result))
    grouped = [
        FailureGroup(
            status,
            error or "no error text was recorded",
            tuple(job.id for job, _ in failed),
            next((item.traceback for _, item in failed if item.traceback), ""),
        )
        for (status, error), failed in groups.items()
    ]
    return tuple(sorted(grouped, key=lambda group: -len(group.jobs)))


def event_log(store: RunReader) -> tuple[LogLine, ...]:
    """Return the run's events."""
    return tuple(
        LogLine(item.at, item.kind, item.job_id or "", item.text) for item in store.events()
    )


USE_POINTS = 400


@dataclass(frozen=True)
class CpuUse:
    """CPU use in one phase, thinned to at most `USE_POINTS` moments."""

    phase: str  # "serial" or "packed"
    seconds: tuple[float, ...]  # since the first sample
    used: tuple[float, ...]  # cores in use by all processes
    own: tuple[float, ...]  # cores in use by this run
    cores: int  # allowed
    mean_used: float  # over the time of the phase
    mean_own: float


@dataclass(frozen=True)
class GpuUse:
    """How busy one GPU was with all programs, thinned to at most `USE_POINTS` moments."""

    index: int
    seconds: tuple[float, ...]  # since the first sample
    used: tuple[float, ...]  # share of the time, 0 to 1
    mean: float


def gpu_uses(samples: Sequence[Sample]) -> tuple[GpuUse, ...]:
    """Return the use of each GPU that the run was allowed."""
    gpus = []
    for index in range(max((len(item.cores) for item in samples), default=0)):
        rows = [
            (item.at, item.cores[index])
            for item in samples
            if index < len(item.cores) and item.cores[index] >= 0
        ]
        if rows:
            at, used = np.array(rows).T
            # Samples become rarer, so each counts for the time since the one before.
            gaps = np.diff(at, prepend=at[0])
            mean = float(used @ gaps / gaps.sum()) if gaps.any() else float(used[0])
            seconds, shares = _thinned(rows)
            gpus.append(GpuUse(index, seconds, shares, mean))
    return tuple(gpus)


def uses(samples: Sequence[Sample]) -> tuple[CpuUse, ...]:
    """Return the CPU use of each phase that was sampled, serial first."""
    cpu = []
    for phase in ("serial", "packed"):
        of_phase = [item for item in samples if item.phase == phase]
        if of_phase:
            at, used, by_run = _thinned([(item.at, item.used, item.own) for item in of_phase])
            cores = max(len(item.cores) for item in of_phase)
            cpu.append(CpuUse(phase, at, used, by_run, cores, *mean_use(samples, phase)))
    return tuple(cpu)


def _thinned(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return moments since the first row, and each further column, thinned to `USE_POINTS`."""
    groups = np.array_split(np.array(rows), min(USE_POINTS, len(rows)))
    at, *columns = np.array([group.mean(axis=0) for group in groups]).T.tolist()
    return [tuple(moment - rows[0][0] for moment in at), *map(tuple, columns)]
