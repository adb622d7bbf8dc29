"""How a run used its cores: what was predicted and what happened, from the store alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

from asynckfold.jobs.decoding import decoded
from asynckfold.jobs.messages import Facts
from asynckfold.planning.forecast import Forecast, forecast
from asynckfold.planning.fusion_groups import grouped
from asynckfold.planning.workload import Choice, TimeEstimate, Workload
from asynckfold.store import Attempt, RunReader, Sample
from asynckfold.store.database import decoding

_Group = tuple[str, ...]
"""Job ids of a fusion group, or of a single job."""

FIRST_SECONDS = 1.0
"""The most that the first sample of a phase counts for."""


def mean_use(samples: Sequence[Sample], phase: str) -> tuple[float, float]:
    """Return the cores in use by everyone, and by this run: means over the time of a phase.

    NaN without samples. A sample counts for the time since the one before, since samples become
    rarer the longer a phase lasts.
    """
    gaps = [
        after.at - before.at if after.phase == before.phase else math.nan
        for before, after in pairwise(samples)
    ]
    total, used, by_run = 0.0, 0.0, 0.0
    # Without samples there is no gap either.
    for item, gap, following in zip(samples, [math.nan, *gaps], [*gaps, math.nan], strict=False):
        if item.phase != phase:
            continue
        # The first sample of a phase covers the moments before it.
        first = FIRST_SECONDS if math.isnan(following) else min(following, FIRST_SECONDS)
        weight = first if math.isnan(gap) else gap
        total, used, by_run = total + weight, used + weight * item.used, by_run + weight * item.own
    return (used / total, by_run / total) if total else (math.nan, math.nan)


@dataclass(frozen=True)
class Packing:
    """How a run used its allotted cores."""

    cores: int | None  # allotted by affinity, quota and n_jobs; None if it was not recorded
    predicted: TimeEstimate | None  # for the whole sweep on all allotted cores
    # Seconds from the first start of an attempt to the last end, summed over sessions: with the
    # tail, without data, start-up and checks before the first job.
    makespan: float
    core_seconds: float  # held by attempts, lost ones included
    longest: float  # seconds of the longest job or fusion group, over all its attempts
    lower_bound: float | None  # seconds of any order: core-seconds / cores, or the longest job
    # Mean share of the allotted cores that jobs held, 0 to 1: core-seconds / (cores × makespan).
    # A worker that waits for its disk holds its core; cores left to other processes do not count.
    held: float | None


def packing_of(store: RunReader) -> Packing | None:
    """Return how a run was packed so far; None before a process began its first attempt."""
    attempts, sessions = store.attempts(), {item.session: item.end for item in store.sessions()}
    ends = [end_of(attempt, sessions) for attempt in attempts]
    plan = store.plan
    groups: dict[str, _Group] = {job.id: (job.id,) for job in plan.jobs}
    groups |= {name: group for group in plan.groups for name in group}
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
    if cores and len({item.node for item in attempts}) > 1:
        # The plan may have been made for one of the nodes.
        cores = max(cores, len({(item.node, core) for item in attempts for core in item.cores}))
    makespan, longest = _makespan(attempts, ends), max(seconds.values())
    return Packing(
        cores,
        decided.prediction if decided else None,
        makespan,
        core_seconds,
        longest,
        max(core_seconds / cores, longest) if cores else None,
        core_seconds / (cores * makespan) if cores and makespan else None,
    )


def end_of(attempt: Attempt, sessions: Mapping[int, float]) -> float:
    """Return when an attempt ended, or the last sign of its session, by number."""
    if attempt.ended is None:
        return max(attempt.started, sessions.get(attempt.session, 0.0))
    return attempt.ended


def _held(
    attempts: Sequence[Attempt], ends: Sequence[float], groups: Mapping[str, _Group]
) -> list[tuple[Attempt, float, float]]:
    """Return from when to when each attempt held cores; in a fusion group only the first does.

    Attempts that no process had begun when their batch of short jobs was abandoned held none.
    """
    until: dict[_Group, float] = {}
    held = []
    for attempt, end in zip(attempts, ends, strict=True):
        if attempt.outcome in (None, "interrupted", "lost") and not attempt.pid:
            continue
        group = groups[attempt.job_id]
        before = until.get(group, attempt.started)
        begin = max(attempt.started, before)
        held.append((attempt, begin, max(begin, end)))
        until[group] = max(end, before)
    return held


def _core_seconds(attempt: Attempt, begin: float, end: float) -> float:
    """Return cores × seconds of an attempt whose cores may have changed."""
    held = [(attempt.started, attempt.cores), *attempt.changes]
    ends = [*(at for at, _ in attempt.changes), end]
    return math.fsum(
        # A worker that is not pinned holds as many cores as it has threads.
        (len(cores) or attempt.threads) * max(0.0, min(until, end) - max(at, begin))
        for (at, cores), until in zip(held, ends, strict=True)
    )


def _makespan(attempts: Sequence[Attempt], ends: Sequence[float]) -> float:
    spans: dict[int, tuple[float, float]] = {}
    for attempt, end in zip(attempts, ends, strict=True):
        first, last = spans.get(attempt.session, (math.inf, -math.inf))
        spans[attempt.session] = min(first, attempt.started), max(last, end)
    return math.fsum(last - first for first, last in spans.values())


def decided_of(store: RunReader) -> Choice | None:
    """Return what was decided for a run, if anything.

    Raises
    ------
    StoreCorruptError
        The record is damaged.
    """
    with decoding(store.root):
        decided = store.about.get("decision")
        return decoded(Choice, decided, "decision") if decided else None


def forecast_of(store: RunReader) -> Forecast | None:
    """Return the forecast of a stored run; None if it was not recorded."""
    decided = decided_of(store)
    if decided is None:
        return None
    folds, plan = store.splits()[0], store.plan
    with decoding(store.root):
        gpus = len(store.about["machine"]["gpus"]) if plan.device == "cuda" else 0
    kept = grouped(plan, False, {}, decided.cores, plan) if plan.groups else None
    work = Workload(plan, folds, Facts({}, {}, {}), decided.cores, gpus)
    return forecast(work, decided, kept)
