"""The kind of device of each candidate, then the threads of its jobs, and how many share a GPU.

::

    devices names one kind, a trainer of several processes ──► that kind
    the run has a plan, or plan_from another ────────────────► its kinds
    else: the division with which cores and GPUs end first ──┐
                                                             ▼
    threads: as requested │ of the run │ of plan_from │ by `thread_rule`; one on GPUs
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.cost import Cost
from asynckfold.jobs.plan import Plan
from asynckfold.planning import fusion_rule, gpu_rule
from asynckfold.planning.exchange import gain_text
from asynckfold.planning.flop_model import thread_counts
from asynckfold.planning.thread_rule import Threads, count_text, decide
from asynckfold.planning.workload import Choice, Workload

KINDS = ("cpu", "cuda")

_NAMES = {"cpu": "cores", "cuda": "GPUs"}

BY_GPU = "the work is done by a GPU"
"""Why a GPU job has one thread."""


@dataclass(frozen=True)
class Devices:
    """The kind of device of each candidate, and why; no sentence where there was no choice."""

    kinds: Mapping[str, str]
    why: str = ""


def choose_devices(workload: Workload, allowed: Sequence[str], before: Plan | None) -> Devices:
    """Choose the kind of device of each candidate.

    Candidates go to GPUs in the order of what they gain there, as long as the sweep becomes
    shorter. All jobs of a candidate run on one kind of device, since it changes bits.

    Parameters
    ----------
    workload : Workload
        The sweep; the device of its plan does not matter.
    allowed : sequence of {"cpu", "cuda"}
        The kinds that the user and the trainer leave open.
    before : Plan or None
        Plan of this run or of another, whose kinds are kept: of candidates, and for new ones.
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
    """Return the GPU-seconds of each candidate."""
    part = replace(workload, plan=replace(workload.plan, device="cuda", devices={}))
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
    return gpu_rule.jobs_per_gpu(cost, workload.gpu_memory, cores)


def choose(
    workload: Workload,
    requested: int | None,
    before: Choice | None,
    other: Plan | None,
    stored: Plan | None = None,
) -> Choice:
    """Choose threads and jobs per GPU, on each kind of device that the plan names.

    Parameters
    ----------
    workload : Workload
        The sweep.
    requested : int or None
        Requested number of threads.
    before : Choice or None
        The run's choice in an earlier session, which stays.
    other : Plan or None
        Plan of the run whose decisions are taken over.
    stored : Plan or None
        Plan of the run.

    Raises
    ------
    InputError
        The other run does not know a model, or has more threads than there are cores here.
    """
    if not workload.plan.devices:
        return _on_one_kind(workload, requested, before, other)
    parts = {kind: workload.on(kind) for kind in KINDS}
    on_cores, on_gpus = (
        _on_one_kind(part, requested, _part_of(before, stored, kind), other)
        for kind, part in parts.items()
    )
    return _merged(workload, parts, on_cores, on_gpus, before)


def _on_one_kind(
    workload: Workload, requested: int | None, before: Choice | None, other: Plan | None
) -> Choice:
    choice = _with_threads(workload, requested, before, other)
    if workload.plan.device != "cuda":
        return choice
    per_gpu, why = {} if before is None else dict(before.per_gpu), dict(choice.why)
    per_gpu = {name: count for name, count in per_gpu.items() if name in choice.threads}
    for name in choice.threads.keys() - per_gpu.keys():
        per_gpu[name] = _jobs_per_gpu(workload, choice.costs[name])
        jobs = "1 job" if per_gpu[name] == 1 else f"{per_gpu[name]} jobs"
        why[name] += f"; {jobs} on a GPU"
    return replace(choice, per_gpu=dict(sorted(per_gpu.items())), why=why)


def _with_threads(
    workload: Workload, requested: int | None, before: Choice | None, other: Plan | None
) -> Choice:
    models = workload.models()
    names = [model.name for model in models]
    processes = workload.plan.params.processes
    if processes > 1:
        why = f"each job trains with {processes} processes"
        choice = _choice(workload, _equal(names, 1, why))
        gains = {name: cost.processes_gain for name, cost in choice.costs.items()}
        more = {name: f", {gain_text(gain)}" if gain else "" for name, gain in gains.items()}
        return replace(choice, why={name: why + more[name] for name, why in choice.why.items()})
    if requested is not None:
        return _choice(workload, _equal(names, requested, "as asked"))
    if before is not None:
        return _extended(workload, before)
    if other is not None:
        refuse(_problems(other, names, workload.cores))
        counts = {name: other.threads_of(name) for name in names}
        why = "taken over from another run"
        sentences = {name: f"{count_text(count)}: {why}" for name, count in counts.items()}
        choice = _choice(workload, Threads(counts, sentences))
        mine = {job.id for job in workload.plan.jobs}
        kept = {name: count for name, count in other.last_threads.items() if name in mine}
        return replace(choice, last_threads=kept)
    return _choice(workload, _by_rule(workload, names))


def _by_rule(workload: Workload, names: Sequence[str]) -> Threads:
    if workload.plan.device == "cuda":
        return _equal(names, 1, BY_GPU)
    models = [model for model in workload.models() if model.name in names]
    return decide(models, workload.cores, workload.nodes)


def _extended(workload: Workload, before: Choice) -> Choice:
    """Keep the run's earlier choice, and decide for models that were added to it."""
    models = dict.fromkeys(job.model for job in workload.plan.jobs)
    added = [name for name in models if name not in before.threads]
    if not added:
        return before
    more = _by_rule(workload, added)
    threads = Threads({**before.threads, **more.counts}, {**before.why, **more.why}, more.last)
    choice = _choice(workload, threads)
    return replace(
        choice,
        costs={**choice.costs, **before.costs},
        last_threads={**before.last_threads, **choice.last_threads},
    )


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


def _equal(names: Sequence[str], count: int, why: str) -> Threads:
    return Threads(dict.fromkeys(names, count), dict.fromkeys(names, f"{count_text(count)}: {why}"))


def _choice(workload: Workload, threads: Threads) -> Choice:
    """Complete a decision by the costs that order the jobs."""
    models = dict.fromkeys(job.model for job in workload.plan.jobs)
    return Choice(
        threads.counts,
        threads.why,
        {name: workload.estimated_cost(name) for name in models},
        workload.all_cores,
        last_threads=workload.last_threads(threads.last),
        nodes=workload.nodes,
    )


def _part_of(before: Choice | None, stored: Plan | None, kind: str) -> Choice | None:
    """Return the part of an earlier choice that is about one kind of device."""
    if before is None or stored is None:
        return before
    jobs = {job.id: job.model for job in stored.on(kind).jobs}
    last = {name: count for name, count in before.last_threads.items() if name in jobs}
    threads = {
        model: last.get(name, before.threads[model]) if kind == "cuda" else before.threads[model]
        for name, model in reversed(jobs.items())
    }
    costs = {**before.costs, **before.gpu_costs} if kind == "cuda" else before.costs
    return replace(before, threads=threads, costs=costs, last_threads=last)


def _merged(
    workload: Workload,
    parts: Mapping[str, Workload],
    on_cores: Choice,
    on_gpus: Choice,
    before: Choice | None,
) -> Choice:
    """Return one choice; threads of jobs that differ from their model's stand by themselves."""
    known = {} if before is None else before.threads
    threads = {**on_gpus.threads, **on_cores.threads}
    threads = {model: known.get(model, count) for model, count in threads.items()}
    each = {
        job.id: choice.last_threads.get(job.id, choice.threads[job.model])
        for part, choice in ((parts["cpu"], on_cores), (parts["cuda"], on_gpus))
        for job in part.plan.jobs
    }
    models = {job.id: job.model for job in workload.plan.jobs}
    last = {name: count for name, count in sorted(each.items()) if count != threads[models[name]]}
    why = {
        model: "; ".join(
            f"on {_NAMES[kind]} {choice.why[model]}"
            for kind, choice in (("cpu", on_cores), ("cuda", on_gpus))
            if any(job.model == model for job in parts[kind].plan.jobs)
        )
        for model in threads
    }
    return replace(
        on_cores,
        threads=threads,
        why=why,
        costs={**on_gpus.costs, **on_cores.costs},
        per_gpu=on_gpus.per_gpu,
        last_threads=last,
        gpu_costs=on_gpus.costs,
    )
