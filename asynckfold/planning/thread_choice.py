"""The threads of each model: as requested, as stored, taken over from another run, or decided.

::

    a number is requested ──────────────────────┐
    the run has a plan ─────────────────────────┤
    plan_from another run ──────────────────────┼──► Choice: threads, why, costs, prediction
    else: rule ◄── flops                        │             │
          └── long sweep: cache or probe ── decide            ▼
    GPUs: one job on each ◄── long sweep: cache or probe of one and of two at once
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.cost import Cost
from asynckfold.jobs.plan import Plan
from asynckfold.planning import fusion_groups
from asynckfold.planning.calibration import gain_text
from asynckfold.planning.gpu_sharing import with_gpu_sharing
from asynckfold.planning.thread_search import Decision, Model, decide
from asynckfold.planning.workload import (
    PROBE_SHARE,
    SETTING_SECONDS,
    Choice,
    Probe,
    Workload,
    failure_in,
)

BY_GPU = "the work is done by a GPU"
"""Why a GPU job has one thread."""


def chosen(
    workload: Workload,
    asked: int | None,
    before: Choice | None,
    other: Plan | None,
    probe: Probe | None,
    place: Path | None,
) -> Choice:
    """Choose the threads of each model, and how many jobs share a GPU.

    Parameters
    ----------
    workload : Workload
        The sweep.
    asked : int or None
        Requested number of threads.
    before : Choice or None
        The run's choice in an earlier session, which stays.
    other : Plan or None
        Plan of the run whose decisions are taken over.
    probe : callable or None
        Times a model; None if nothing may be probed.
    place : Path or None
        Folder of the cost cache.

    Raises
    ------
    InputError
        The other run does not know a model, or has more threads than there are cores here.
    """
    found = _with_threads(workload, asked, before, other, probe, place)
    if workload.plan.device != "cuda":
        return found
    if before is not None:
        kept = before.per_gpu.keys() & found.threads.keys()
        per_gpu = {name: before.per_gpu[name] for name in sorted(kept)}
        costs = {**found.costs, **{name: before.costs[name] for name in sorted(kept)}}
        found = replace(found, per_gpu=per_gpu, costs=costs)
    return with_gpu_sharing(workload, found, probe, place)


def _with_threads(
    workload: Workload,
    asked: int | None,
    before: Choice | None,
    other: Plan | None,
    probe: Probe | None,
    place: Path | None,
) -> Choice:
    models = workload.models()
    names = [model.name for model in models]
    processes = workload.plan.params.processes
    if processes > 1:
        why = f"each job trains with {processes} processes"
        found = _fixed(workload, models, dict.fromkeys(names, 1), why)
        gains = {name: cost.processes_gain for name, cost in found.costs.items()}
        more = {name: f", {gain_text(gain)}" if gain else "" for name, gain in gains.items()}
        return replace(found, why={name: why + more[name] for name, why in found.why.items()})
    if asked is not None:
        return _fixed(workload, models, dict.fromkeys(names, asked), "as asked")
    if before is not None:
        return _extended(workload, models, before, probe, place)
    if other is not None:
        refuse(_problems(other, names, workload.cores))
        threads = {name: other.threads_of(name) for name in names}
        found = _fixed(workload, models, threads, "taken over from another run")
        mine = {job.id for job in workload.plan.jobs}
        kept = {name: count for name, count in other.last_threads.items() if name in mine}
        return replace(found, last_threads=kept)
    if workload.plan.device == "cuda":
        return _fixed(workload, models, dict.fromkeys(names, 1), BY_GPU)
    timed, failures = measured(workload, models, probe, place)
    decision = decide(models, workload.cores, timed, workload.nodes)
    return _choice(workload, models, decision, timed, failures)


def _extended(
    workload: Workload,
    models: Sequence[Model],
    before: Choice,
    probe: Probe | None,
    place: Path | None,
) -> Choice:
    """Keep the run's earlier choice, and decide for models that were added to it."""
    added = [model for model in models if model.name not in before.threads]
    if not added:
        return before
    timed: dict[str, Cost] = {}
    failures: dict[str, str] = {}
    if workload.plan.device == "cuda":
        more = _given(dict.fromkeys((model.name for model in added), 1), BY_GPU)
    else:
        timed, failures = measured(workload, added, probe, place)
        more = decide(added, workload.cores, timed, workload.nodes)
    decision = Decision(
        {**before.threads, **more.threads}, {**before.why, **more.why}, more.overturned, more.last
    )
    found = _choice(workload, models, decision, {**before.costs, **timed}, failures)
    return replace(found, last_threads={**before.last_threads, **found.last_threads})


def _problems(other: Plan, names: Sequence[str], cores: int) -> Iterator[Problem]:
    known = list(dict.fromkeys(job.model for job in other.jobs))
    for name in names:
        if name not in known:
            yield Problem(
                "plan_from must be a run of the same models",
                f"{name}, and a run of {', '.join(known)}",
                "Leave plan_from out to have the threads decided.",
            )
        elif other.most_threads_of(name) > cores:
            yield Problem(
                "the threads of plan_from must not exceed the cores that this run may use",
                f"{other.most_threads_of(name)} threads for {name} on {cores} cores",
                "Leave plan_from out to have the threads decided.",
            )


def measured(
    workload: Workload, models: Sequence[Model], probe: Probe | None, place: Path | None
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Return measured costs by model, and tracebacks of failed probes.

    Whether a sweep is long enough for probes does not depend on timings, so that the same sweep is
    always decided by the same numbers.
    """
    cores = workload.cores
    counts = _probed_counts(cores)
    settings = len(models) * len(counts) + sum(workload.may_fuse(item.name) for item in models)
    most = settings * SETTING_SECONDS
    alone = math.fsum(model.cost.seconds(work, 1) for model in models for work in model.jobs)
    if cores == 1 or most > PROBE_SHARE * alone / workload.all_cores:
        return {}, {}

    def measure(model: Model, probe: Probe) -> Cost | str:
        timings = {
            count: probe(model.name, count, min(cores // count, len(model.jobs)))
            for count in counts
        }
        if failure := failure_in([item for found in timings.values() for item in found]):
            return failure
        cost = workload.gathered(model.name, timings)
        if workload.may_fuse(model.name):
            return replace(cost, fused_gain=_fused_gain(model, cost, cores, probe))
        return cost

    return workload.measured(models, probe, place, measure)


def _fused_gain(model: Model, cost: Cost, cores: int, probe: Probe) -> float:
    """Return the measured gain of fusion with other groups side by side; 0 if not known."""
    together = min(fusion_groups.GAINING_JOBS, len(model.jobs))
    if together < 2:
        return 0.0
    timings = probe(model.name, 1, max(1, min(cores, len(model.jobs) // together)), together)
    # What user code raises in a group, it also raises in its jobs.
    if not timings or failure_in(timings):
        return 0.0
    own = median_low([item.step_seconds for item in timings])
    return fusion_groups.gain_of_many(cost.step_seconds[1] / own, together)


def _probed_counts(cores: int) -> list[int]:
    """One thread, powers of two, all."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*powers, cores]


def _fixed(
    workload: Workload, models: Sequence[Model], threads: dict[str, int], why: str
) -> Choice:
    return _choice(workload, models, _given(threads, why), {}, {})


def _given(threads: dict[str, int], why: str) -> Decision:
    """Return a decision without alternatives."""
    sentences = {
        name: f"{count} {'thread' if count == 1 else 'threads'}: {why}"
        for name, count in threads.items()
    }
    return Decision(threads, sentences)


def _choice(
    workload: Workload,
    models: Sequence[Model],
    decision: Decision,
    measured: Mapping[str, Cost],
    failures: Mapping[str, str],
) -> Choice:
    """Complete a decision by the costs that order the jobs."""
    costs = {
        model.name: measured.get(model.name) or _estimated(model, workload) for model in models
    }
    return Choice(
        decision.threads,
        decision.why,
        costs,
        workload.predicted(decision.threads, costs),
        workload.all_cores,
        decision.overturned,
        failures,
        last_threads=workload.last_threads(decision.last),
        nodes=workload.nodes,
    )


def _estimated(model: Model, workload: Workload) -> Cost:
    """Return the rule's cost, scaled to the step of the dry run on a core, with its memory."""
    cost, facts = model.cost, workload.facts
    if not workload.is_on_gpus:
        cost = cost.scaled(facts.step_seconds.get(model.name, 0.0))
    gain = workload.processes_gain(model.name, cost)
    return replace(cost, memory=facts.memory.get(model.name, 0), processes_gain=gain)
