"""What went wrong: failures, grouped by their error, and the lines of the run's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import DONE, Result, cause
from asynckfold.results.report.sanitize import TEXT_LIMIT, clean, shown


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


def failures(plan: Plan, results: Mapping[str, Result]) -> tuple[FailureGroup, ...]:
    """Group equal errors, the most frequent first."""
    groups: dict[tuple[str, str], list[tuple[Job, Result]]] = {}
    for job in plan.jobs:
        result = results.get(job.id)
        if result is not None and result.status != DONE:
            groups.setdefault((result.status, cause(result.error)), []).append((job, result))
    found = [
        FailureGroup(
            status,
            clean(error, 4096) or "no error text was recorded",
            tuple(shown(job).id for job, _ in members),
            clean(next((item.traceback for _, item in members if item.traceback), ""), TEXT_LIMIT),
        )
        for (status, error), members in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: -len(group.jobs)))
