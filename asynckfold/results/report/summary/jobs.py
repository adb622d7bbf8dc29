"""The jobs: every attempt, how they were packed, and what averaging did in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Result
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sanitize import clean, shown
from asynckfold.results.utilization import Packing, packing_of
from asynckfold.store import Attempt, Placed, RunReader


@dataclass(frozen=True)
class Bar:
    """One attempt: a bar in the Gantt chart; times in run seconds.

    Parameters
    ----------
    expected : float
        Seconds that the whole job was expected to take.
    memory, peak_memory : int or None
        Bytes that were reserved for it, and the most that its process held, torch included; None
        where that is not known.
    waits : tuple of str
        What its job waited for before, and how long.
    changes : tuple of (float, tuple of int)
        Since when it held which other cores than `cores`, with which it was placed.
    """

    job: str
    candidate: str
    attempt: int
    cores: tuple[int, ...]
    device: str
    start: float
    end: float
    outcome: str
    error: str
    expected: float
    memory: int | None
    peak_memory: int | None
    waits: tuple[str, ...]
    changes: tuple[tuple[float, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class AveragedJob:
    """What parameter averaging did in one job.

    Parameters
    ----------
    job : str
        Its id.
    rounds : int
        How often the clones of its processes were averaged.
    seconds : float
        Of its epochs, also of those before a continuation.
    samples : tuple of int
        Samples × epochs of each process.
    """

    job: str
    rounds: int
    seconds: float
    samples: tuple[int, ...]


def shown_packing(store: RunReader) -> Packing | None:
    """Return how the jobs were packed, under names that are safe to show."""
    found = packing_of(store)
    return found and replace(
        found,
        models=tuple(
            replace(item, model=clean(item.model), why=clean(item.why, 4096))
            for item in found.models
        ),
    )


def bars(
    store: RunReader, results: Mapping[str, Result], jobs: Mapping[str, Job]
) -> tuple[Bar, ...]:
    """Return a bar for each attempt; one that has not ended lasts until the latest moment known."""
    attempts, placed = store.attempts(), store.placed()
    moments = [moment for item in attempts for moment in (item.started, item.ended) if moment]
    latest = max(moments, default=0.0)
    open_outcome = "lost" if store.holder() is None else "running"
    return tuple(
        Bar(
            job=shown(jobs[item.job_id]).id,
            candidate=shown(jobs[item.job_id]).candidate,
            attempt=item.attempt,
            cores=item.cores,
            device=clean(item.device),
            start=item.started,
            end=latest if item.ended is None else item.ended,
            outcome=item.outcome or open_outcome,
            error=clean(item.error, 4096),
            expected=item.expected,
            changes=item.changes,
            **_placing(placed.get((item.job_id, item.attempt)), results.get(item.job_id), item),
        )
        for item in attempts
        if item.job_id in jobs
    )


def _placing(placed: Placed | None, result: Result | None, attempt: Attempt) -> dict[str, Any]:
    ended = result is not None and result.attempt == attempt.attempt
    return {
        "memory": None if placed is None else placed.memory,
        "peak_memory": result.peak_memory if result is not None and ended else None,
        "waits": tuple(clean(str(wait), 4096) for wait in placed.waits) if placed else (),
    }


def averaged(found: CVResults) -> tuple[AveragedJob, ...]:
    """Return what averaging did in each job that was trained by it."""
    results = ((job, found.results.get(job.id)) for job in found.plan.jobs)
    return tuple(
        AveragedJob(
            shown(job).id,
            result.averaged.rounds,
            math.fsum(item.seconds for item in result.epochs),
            result.averaged.samples,
        )
        for job, result in results
        if result is not None and result.averaged is not None
    )
