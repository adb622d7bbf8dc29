"""The kind of device of each candidate, the threads of its jobs, a guess how many share a GPU.

::

    devices names one kind, a trainer of several processes ──► that kind
    the run has a plan, or plan_from another ────────────────► its kinds
    else: the division with which cores and GPUs end first ──┐
                                                             ▼
    threads: as requested │ of the run │ of plan_from │ by `thread_rule`; one on GPUs
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.cost import Cost
from asynckfold.jobs.plan import Plan
from asynckfold.planning import fusion_rule, gpu_rule
from asynckfold.planning.flop_model import gain_text, thread_counts
from asynckfold.planning.thread_rule import Threads, count_text, decide
from asynckfold.planning.workload import Choice, Workload

KINDS = ("cpu", "cuda")

_NAMES = {"cpu": "cores", "cuda": "GPUs"}

BY_GPU, TAKEN_OVER = "the work is done by a GPU", "taken over from another run"
"""Why a job has its number of threads."""


@dataclass(frozen=True)
class Devices:
    """The kind of device of each candidate, and why; no sentence where there was no choice."""

    kinds: Mapping[str, str]
    why: str = ""


def choose_devices(workload: Workload, allowed: Sequence[str], before: Plan | None) -> Devices:
    """Choose the kind of device of each candidate.

    Candidates go to GPUs in the order of what they gain there, as long as the sweep becomes
    shorter. All jobs of a candidate run on one kind of device, since it changes bits.

    `allowed` are the kinds that user and trainer leave open. The kinds of a plan of this run or of
    another, `before`, are kept, and hold for new candidates.
    """
    names = list(workload.plan.candidate_names)
    known = {}
    if before is not None:
        known = {name: before.device_of(name) for name in before.candidate_names}
    allowed = [kind for kind in allowed if kind in known.values()] or allowed
    if len(allowed) == 1:
        return Devices(dict.fromkeys(names, allowed[0]))
    kinds = {name: known[name] for name in names if name in known}
    if len(kinds) == len(names):
        return Devices(kinds)
    on_cores, on_gpus = _seconds_on_cores(workload), _seconds_on_gpus(workload)
    new = [name for name in names if name not in kinds]
    new.sort(key=lambda name: (-on_cores[name] / on_gpus[name], name))
    divisions = [
        kinds | {name: "cuda" if at < count else "cpu" for at, name in enumerate(new)}
        for count in range(len(new) + 1)
    ]

    def seconds(division: Mapping[str, str]) -> float:
        cores = math.fsum(on_cores[name] for name in names if division[name] == "cpu")
        gpus = [on_gpus[name] for name in names if division[name] == "cuda"]
        start = gpu_rule.START_SECONDS if gpus else 0.0
        return max(cores / workload.all_cores, start + math.fsum(gpus) / workload.all_gpus)

    best = min(divisions, key=seconds)
    counts = ", ".join(f"{[*best.values()].count(kind)} on {_NAMES[kind]}" for kind in KINDS)
    alone = " and ".join(
        f"{seconds(dict.fromkeys(names, kind)):.3g} s with all on {_NAMES[kind]}" for kind in KINDS
    )
    why = f"candidates: {counts}, by the rule: {seconds(best):.3g} s predicted, {alone}"
    return Devices({name: best[name] for name in names}, why)


def _seconds_on_cores(workload: Workload) -> dict[str, float]:
    """Return the core-seconds of each candidate."""
    part = replace(workload, plan=replace(workload.plan, device="cpu", devices={}))
    jobs, works = len(workload.plan.jobs), workload.works()
    most = max(1, workload.all_cores // jobs)
    threads = max(count for count in thread_counts(workload.cores) if count <= most)
    costs = {}
    for name in dict.fromkeys(job.model for job in workload.plan.jobs):
        costs[name] = part.rule_cost(name)
        if workload.may_fuse(name):
            width = min(fusion_rule.GAINING_JOBS, max(1, jobs // workload.all_cores))
            costs[name] = costs[name].fused(fusion_rule.gain(costs[name].flops, width))
    seconds = dict.fromkeys(workload.plan.candidate_names, 0.0)
    for job in workload.plan.jobs:
        seconds[job.candidate] += threads * costs[job.model].seconds(works[job.id], threads)
    return seconds


def _seconds_on_gpus(workload: Workload) -> dict[str, float]:
    """Return the GPU-seconds of each candidate. A requested number changes no bit."""
    plan = replace(workload.plan, device="cuda", devices={})
    part = replace(workload, plan=plan, jobs_per_gpu=None)
    works, costs = workload.works(), {}
    for name in dict.fromkeys(job.model for job in workload.plan.jobs):
        cost = part.rule_cost(name)
        sharing = _jobs_per_gpu(part, cost)
        costs[name] = gpu_rule.shared(cost, sharing), sharing
    seconds = dict.fromkeys(workload.plan.candidate_names, 0.0)
    for job in workload.plan.jobs:
        cost, sharing = costs[job.model]
        seconds[job.candidate] += cost.seconds(works[job.id], 1) / sharing
    return seconds


def _jobs_per_gpu(workload: Workload, cost: Cost) -> int:
    if workload.plan.params.processes > 1:
        return 1
    cores = workload.all_cores // max(1, workload.all_gpus)
    if workload.jobs_per_gpu is not None:
        return max(1, min(workload.jobs_per_gpu, cores))
    return gpu_rule.jobs_per_gpu(cost, workload.gpu_memory, cores)


def choose(
    workload: Workload, requested: int | None, before: Choice | None, other: Plan | None
) -> Choice:
    """Choose the threads of each model, and guess how many of its jobs share a GPU.

    A job on a GPU has one thread, unless another number is requested. Where its model has more on
    cores, it is among `Choice.last_threads`.

    `requested` is a number of threads, `before` the run's choice in an earlier session, which
    stays, and `other` the plan of a run whose decisions are taken over.

    Raises
    ------
    InputError
        The other run does not know a model, or has more threads than there are cores here.
    """
    plan, known = workload.plan, before or Choice({}, {}, {}, workload.all_cores)
    on_gpus = [job for job in plan.jobs if plan.device_of(job.candidate) == "cuda"]
    parts = {kind: workload.on(kind) for kind in KINDS}
    names = {
        kind: list(dict.fromkeys(job.model for job in parts[kind].plan.jobs)) for kind in KINDS
    }
    threads = {kind: _threads(parts[kind], names[kind], requested, before, other) for kind in KINDS}
    costs = {
        kind: {name: parts[kind].estimated_cost(name) for name in names[kind]} for kind in KINDS
    }
    counts = {**threads["cuda"].counts, **threads["cpu"].counts}
    last = parts["cpu"].last_threads(threads["cpu"].last)
    earlier = {
        job.model: known.last_threads[job.id] for job in on_gpus if job.id in known.last_threads
    }
    for job in on_gpus:
        count = requested or {**known.threads, **earlier}.get(job.model, 1)
        if other is None and counts[job.model] != count:
            last[job.id] = count
    if other is not None and requested is None:
        jobs = {job.id for job in plan.jobs}
        last = {name: count for name, count in other.last_threads.items() if name in jobs}
    if requested is None:
        last = {**known.last_threads, **last}
    per_gpu = {name: _jobs_per_gpu(workload, cost) for name, cost in costs["cuda"].items()}
    changed = {name for name, count in per_gpu.items() if known.per_gpu.get(name) != count}
    why = dict(threads["cpu"].why)
    for name, count in per_gpu.items():
        text = f"{threads['cuda'].why[name]}; {count} {'job' if count == 1 else 'jobs'} on a GPU"
        why[name] = f"on cores {why[name]}; on GPUs {text}" if name in why else text
    on_gpu = {
        **costs["cuda"],
        **_only(known.costs, costs["cuda"]),
        **_only(known.gpu_costs, costs["cuda"]),
    }
    on_core = {**costs["cpu"], **_only(known.costs, costs["cpu"])}
    return Choice(
        counts,
        {**why, **_only(known.why, {*why} - changed)},
        {**on_gpu, **on_core},
        known.cores,
        per_gpu=per_gpu,
        last_threads=dict(sorted(last.items())),
        gpu_costs=on_gpu if plan.devices else {},
        devices=known.devices,
        nodes=workload.nodes,
    )


def _only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _threads(
    workload: Workload,
    names: Sequence[str],
    requested: int | None,
    before: Choice | None,
    other: Plan | None,
) -> Threads:
    """Return the threads of models on one kind of device."""
    processes = workload.plan.params.processes
    if processes > 1:
        threads = _equal(names, 1, f"each job trains with {processes} processes")
        gains = {name: workload.estimated_cost(name).processes_gain for name in names}
        more = {name: f", {gain_text(gain)}" if gain else "" for name, gain in gains.items()}
        return replace(threads, why={name: text + more[name] for name, text in threads.why.items()})
    if requested is not None:
        return _equal(names, requested, "as asked")
    if before is None and other is not None:
        refuse(_problems(other, names, workload.cores))
        parts = [_equal([name], other.threads_of(name), TAKEN_OVER) for name in names]
        return _joined(parts)
    kept = {} if before is None else before.threads
    added = [name for name in names if name not in kept]
    stays = _joined([_equal([name], kept[name], "as before") for name in names if name in kept])
    if workload.plan.device == "cuda":
        return _joined([stays, _equal(added, 1, BY_GPU)])
    models = [model for model in workload.models() if model.name in added]
    more_threads = decide(models, workload.cores, workload.nodes) if models else _equal([], 1, "")
    return _joined([stays, more_threads])


def _joined(parts: Sequence[Threads]) -> Threads:
    """Return the threads of several groups of models."""
    return Threads(
        {name: count for part in parts for name, count in part.counts.items()},
        {name: text for part in parts for name, text in part.why.items()},
        next((part.last for part in parts if part.last), None),
    )


def _problems(other: Plan, names: Sequence[str], cores: int) -> Iterator[Problem]:
    known = {job.model: other.most_threads_of(job.model) for job in other.jobs}
    for name in names:
        if known.get(name, cores + 1) > cores:
            yield Problem(
                "plan_from must be a run of the same models, whose threads fit the cores here",
                f"{name} on {cores} cores, and threads of the models of that run: {known}",
                "Leave plan_from out to have the threads decided.",
            )


def _equal(names: Sequence[str], count: int, why: str) -> Threads:
    return Threads(dict.fromkeys(names, count), dict.fromkeys(names, f"{count_text(count)}: {why}"))
