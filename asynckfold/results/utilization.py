"""What was predicted of a run, and what came of it: read from the store alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, starmap

from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import Result, job_by_id
from asynckfold.planning.thread_search import Prediction
from asynckfold.planning.workload import Choice, decided_of
from asynckfold.store import Attempt, RunReader

_Group = tuple[str, ...]
"""Ids of the jobs that are trained as one, or of one job."""


@dataclass(frozen=True)
class ModelAccount:
    """What the jobs of one model were expected to cost, and what they cost.

    Parameters
    ----------
    model : str
        Its name.
    threads : int
        Threads of each of its jobs.
    why : str
        Why so many; empty where that was not recorded.
    jobs : int
        Jobs that have ended, over which the means are.
    predicted_seconds, seconds : float
        Mean seconds of a job, those of its failed attempts included; NaN where none has ended.
        Jobs that are trained as one have equal parts of their seconds.
    memory, peak_memory : int
        Bytes that were reserved for a job, or for the most that are trained as one, beyond their
        process, and the most that a process held in all, torch included: so the second is the
        greater.
    """

    model: str
    threads: int
    why: str
    jobs: int
    predicted_seconds: float
    seconds: float
    memory: int
    peak_memory: int


@dataclass(frozen=True)
class Packing:
    """How a run used the cores that it was given.

    Parameters
    ----------
    cores : int or None
        Allotted cores: of affinity, quota and ``n_jobs``, whoever else used them; None in runs
        that were begun before this was recorded.
    predicted : Prediction or None
        What the whole sweep was expected to take when it was decided, on all allotted cores.
    makespan : float
        Seconds from the start of the first attempt to the end of the last: the tail is included,
        data, start-up and checks before the first job are not. Of several sessions, the sum.
    core_seconds : float
        Cores that attempts held × seconds for which they held them, also those that were lost.
    longest : float
        Seconds of the longest job, or of the longest jobs that are trained as one, all attempts
        together.
    lower_bound : float or None
        Seconds below which no order of these attempts can stay: core-seconds / cores, or the
        longest job.
    held : float or None
        Mean share of the allotted cores that jobs held, 0 to 1: core-seconds / (cores × makespan).
        What they held, not what they used of it: a worker that waits for its disk holds its core.
        Cores that were left to neighbours count as not held.
    models : tuple of ModelAccount
        In the plan's order.
    """

    cores: int | None
    predicted: Prediction | None
    makespan: float
    core_seconds: float
    longest: float
    lower_bound: float | None
    held: float | None
    models: tuple[ModelAccount, ...]


def packing_of(store: RunReader) -> Packing | None:
    """Return how a run was packed, so far; None before a process began its first attempt."""
    attempts = store.attempts()
    if not attempts:
        return None
    ends = _ends(attempts, {item.session: item.end for item in store.sessions()})
    groups = _groups(store.plan)
    held = _held(attempts, ends, groups)
    if not held:
        return None
    seconds: dict[_Group, float] = {}
    for attempt, begin, end in held:
        group = groups[attempt.job_id]
        seconds[group] = seconds.get(group, 0.0) + end - begin
    core_seconds = math.fsum(starmap(_core_seconds, held))
    decided = decided_of(store)
    cores = decided.cores if decided else None
    makespan, longest = _makespan(attempts, ends), max(seconds.values())
    return Packing(
        cores,
        decided.prediction if decided else None,
        makespan,
        core_seconds,
        longest,
        max(core_seconds / cores, longest) if cores else None,
        core_seconds / (cores * makespan) if cores and makespan else None,
        _models(store.plan, groups, store.results(), attempts, seconds, decided),
    )


def _ends(attempts: Sequence[Attempt], sessions: Mapping[int, float]) -> list[float]:
    """When each attempt ended; what has no end was there to the last that its session wrote."""
    return [
        max(attempt.started, sessions.get(attempt.session, 0.0))
        if attempt.ended is None
        else attempt.ended
        for attempt in attempts
    ]


def _groups(plan: Plan) -> dict[str, _Group]:
    """With whom each job is trained as one; by itself where it is alone."""
    groups = {job.id: (job.id,) for job in plan.jobs}
    return groups | {name: group for group in plan.groups for name in group}


def _held(
    attempts: Sequence[Attempt], ends: Sequence[float], groups: Mapping[str, _Group]
) -> list[tuple[Attempt, float, float]]:
    """From when to when each attempt held cores; of those of a group at once, the first did.

    Of a row of jobs that was left, those held none that no process had begun.
    """
    until: dict[_Group, float] = {}
    found = []
    for attempt, end in zip(attempts, ends, strict=True):
        if attempt.outcome in (None, "interrupted", "lost") and not attempt.pid:
            continue
        group = groups[attempt.job_id]
        before = until.get(group, attempt.started)
        begin = max(attempt.started, before)
        found.append((attempt, begin, max(begin, end)))
        until[group] = max(end, before)
    return found


def _core_seconds(attempt: Attempt, begin: float, end: float) -> float:
    """Cores × seconds, where the cores may have changed meanwhile."""
    held = [(attempt.started, attempt.cores), *attempt.changes]
    ends = [*(at for at, _ in attempt.changes), end]
    return math.fsum(
        # A worker that is not pinned holds as many cores as it has threads.
        (len(cores) or attempt.threads) * max(0.0, min(until, end) - max(at, begin))
        for (at, cores), until in zip(held, ends, strict=True)
    )


def _makespan(attempts: Sequence[Attempt], ends: Sequence[float]) -> float:
    def session(pair: tuple[Attempt, float]) -> int:
        return pair[0].session

    pairs = sorted(zip(attempts, ends, strict=True), key=session)
    spans = [list(found) for _, found in groupby(pairs, session)]
    return math.fsum(
        max(end for _, end in span) - min(attempt.started for attempt, _ in span) for span in spans
    )


def _models(
    plan: Plan,
    groups: Mapping[str, _Group],
    results: Mapping[str, Result],
    attempts: Sequence[Attempt],
    seconds: Mapping[_Group, float],
    decided: Choice | None,
) -> tuple[ModelAccount, ...]:
    jobs = job_by_id(plan)
    newest = {item.job_id: item for item in attempts}
    accounts = []
    for model in dict.fromkeys(job.model for job in plan.jobs):
        mine = [groups[job.id] for job in plan.jobs if job.model == model]
        ended = [name for name in results if jobs[name].model == model and name in newest]
        cost = decided.costs.get(model) if decided else None
        accounts.append(
            ModelAccount(
                model,
                plan.threads_of(model),
                decided.why.get(model, "") if decided else "",
                len(ended),
                _mean([newest[name].expected / len(groups[name]) for name in ended]),
                _mean([seconds[groups[name]] / len(groups[name]) for name in ended]),
                cost.memory * max(map(len, mine)) if cost else 0,
                max((results[name].peak_memory for name in ended), default=0),
            )
        )
    return tuple(accounts)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
