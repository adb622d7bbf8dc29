"""Find the jobs whose trained weights are asked for, or say what there is instead."""

from __future__ import annotations

from collections.abc import Mapping

from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import DONE, Result


def find_job(plan: Plan, candidate: str, fold: int | str = 0, repeat: int = 0) -> Job:
    """Return a planned job; raise `InputError` if there is none."""
    jobs = [job for job in plan.jobs if job.candidate == candidate]
    for job in jobs:
        if (job.repeat, job.fold) == (repeat, fold):
            return job
    if jobs:
        last = max((job.repeat, job.fold) for job in jobs)
        rule = f"the run has folds 0 to {last[1]} and repeats 0 to {last[0]}"
        received = f"fold={fold}, repeat={repeat}"
        raise InputError.one(rule, received, "Pass one of these.")
    names = plan.candidate_names
    rule = f"candidate must be one of {', '.join(names)}"
    remedy = f"Pass a model/LR schedule of the run.{nearest(candidate, names)}"
    raise InputError.one(rule, repr(candidate), remedy)


def done_job(
    plan: Plan, results: Mapping[str, Result], candidate: str, fold: int | str, repeat: int
) -> Job:
    """Return a job that has trained weights; raise `InputError` if it has none."""
    job = find_job(plan, candidate, fold, repeat)
    state = _unfinished(results.get(job.id))
    if state:
        done = {item.candidate for item in plan.jobs if not _unfinished(results.get(item.id))}
        names = plan.candidate_names
        shown = ", ".join(name for name in names if name in done) or "none yet"
        rule = "only a job that is done has trained weights"
        remedy = f"Choose another; candidates with finished folds: {shown}."
        raise InputError.one(rule, f"{candidate}, {_place(job)}, which {state}", remedy)
    return job


def done_jobs(plan: Plan, results: Mapping[str, Result], candidate: str) -> list[Job]:
    """Return all jobs of a candidate; raise `InputError` unless all are done."""
    find_job(plan, candidate)
    jobs = [job for job in plan.jobs if job.candidate == candidate]
    missing = [
        f"{_place(job)} {state}" for job in jobs if (state := _unfinished(results.get(job.id)))
    ]
    if missing:
        rule = f"an ensemble of {candidate} needs all of its {len(jobs)} folds"
        remedy = "The same call continues the run; or choose another candidate."
        refuse([Problem(rule, "; ".join(missing), remedy)])
    return jobs


def _unfinished(result: Result | None) -> str:
    """Say why a job has no trained weights; empty if it has."""
    if result is None:
        return "is pending"
    return "" if result.status == DONE else f"is {result.status}: {result.error}"


def _place(job: Job) -> str:
    return f"repeat {job.repeat}, fold {job.fold}" if job.repeated else f"fold {job.fold}"
