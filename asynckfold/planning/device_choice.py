"""The kind of device of each candidate, then the threads of each model on it.

::

    devices names one kind, a trainer of several processes ──► that kind
    the run has a plan, or plan_from another ────────────────► its kinds
    else: rule ◄── flops                                       │
          └── long sweep: cache or probe on both ── split ─────┴──► threads, jobs per GPU

The kind changes bits. As for threads, a rule decides, over operations, jobs, allotted cores and
GPUs; timings overturn it only by a large margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asynckfold.jobs.cost import Cost
from asynckfold.jobs.placement import Request
from asynckfold.jobs.plan import Plan
from asynckfold.planning import fusion_groups, gpu_sharing, thread_choice
from asynckfold.planning.flop_model import OVERTURN, thread_counts
from asynckfold.planning.workload import Choice, Probe, Workload
from asynckfold.scheduling.device_split import OnEither, requests_on, split
from asynckfold.scheduling.simulate import VirtualMachine, simulate

KINDS = ("cpu", "cuda")

_NAMES = {"cpu": "cores", "cuda": "GPUs"}


@dataclass(frozen=True)
class Probes:
    """What times models on cores and on a GPU, None where nothing may be probed; the cache."""

    on: Mapping[str, Probe | None] = field(default_factory=dict)
    place: Path | None = None


@dataclass(frozen=True)
class Devices:
    """The kind of device of each candidate, and why; no sentence where there was no choice."""

    kinds: Mapping[str, str]
    why: str = ""


def decide(
    workload: Workload, allowed: Sequence[str], before: Plan | None, probes: Probes
) -> Devices:
    """Decide the kind of device of each candidate.

    Parameters
    ----------
    workload : Workload
        The sweep; the device of its plan does not matter.
    allowed : sequence of {"cpu", "cuda"}
        The kinds that the user and the trainer leave open.
    before : Plan or None
        Plan of this run or of another, whose kinds are kept: of candidates, and for new ones.
    probes : Probes
        What times models.
    """
    names = list(workload.plan.candidate_names)
    known = {} if before is None else _kinds(before)
    allowed = [kind for kind in allowed if kind in known.values()] or allowed
    if len(allowed) == 1:
        return Devices(dict.fromkeys(names, allowed[0]))
    kept = {name: known[name] for name in names if name in known}
    if len(kept) == len(names):
        return Devices(kept)
    machine = VirtualMachine.of(workload.each)
    parts = {kind: replace(workload, plan=_whole(workload.plan, kind)) for kind in KINDS}
    ruled = {kind: _ruled(part) for kind, part in parts.items()}
    jobs = _jobs(workload, ruled)
    kinds, told = split(jobs, machine, kept), "by the rule, which was not measured on GPUs"
    measured = _measured(parts, probes)
    if measured:
        timed = _jobs(workload, measured)
        fastest = split(timed, machine, kept)
        if _makespan(timed, kinds, machine) >= OVERTURN * _makespan(timed, fastest, machine):
            kinds, told, jobs = fastest, "measured here", timed
    return Devices(kinds, _sentence(jobs, kinds, machine, told))


def _kinds(plan: Plan) -> dict[str, str]:
    return {name: plan.device_of(name) for name in plan.candidate_names}


def _whole(plan: Plan, kind: str) -> Plan:
    return replace(plan, device=kind, devices={})


def _ruled(part: Workload) -> dict[str, Cost]:
    return {model.name: model.cost for model in part.models()}


def _measured(parts: Mapping[str, Workload], probes: Probes) -> dict[str, dict[str, Cost]]:
    """Return measured costs by kind and model; nothing unless all were measured on both."""
    models = {kind: part.models() for kind, part in parts.items()}
    on_gpus, _ = gpu_sharing.measured(
        parts["cuda"], models["cuda"], probes.on.get("cuda"), probes.place
    )
    if len(on_gpus) < len(models["cuda"]):
        return {}
    on_cores, _ = thread_choice.measured(
        parts["cpu"], models["cpu"], probes.on.get("cpu"), probes.place
    )
    if len(on_cores) < len(models["cpu"]):
        return {}
    return {"cpu": on_cores, "cuda": on_gpus}


def _jobs(workload: Workload, costs: Mapping[str, Mapping[str, Cost]]) -> list[OnEither]:
    works, found = workload.works(), []
    number = len(workload.plan.jobs)
    for job in workload.plan.jobs:
        on_cores, on_gpu = costs["cpu"][job.model], costs["cuda"][job.model]
        counts = thread_counts(workload.cores)
        if workload.may_fuse(job.model):
            together = min(fusion_groups.GAINING_JOBS, max(1, number // workload.all_cores))
            on_cores = on_cores.fused(
                fusion_groups.gain(on_cores.flops, together, on_cores.fused_gain)
            )
        per_gpu = gpu_sharing.jobs_per_gpu(on_gpu)[0]
        work = works[job.id]
        seconds = on_gpu.shared(per_gpu).seconds(work, 1)
        found.append(
            OnEither(
                job.candidate,
                {count: Request(job.id, on_cores.seconds(work, count), count) for count in counts},
                Request(job.id, seconds, gpu=True, jobs_per_gpu=per_gpu),
            )
        )
    return found


def _makespan(jobs: Sequence[OnEither], kinds: Mapping[str, str], machine: VirtualMachine) -> float:
    return simulate(requests_on(jobs, kinds, machine), machine).makespan


def _sentence(
    jobs: Sequence[OnEither], kinds: Mapping[str, str], machine: VirtualMachine, told: str
) -> str:
    ways = {_NAMES[kind]: dict.fromkeys(kinds, kind) for kind in KINDS}
    alone = " and ".join(
        f"{_makespan(jobs, way, machine):.3g} s with all on {name}" for name, way in ways.items()
    )
    counts = ", ".join(f"{[*kinds.values()].count(kind)} on {_NAMES[kind]}" for kind in KINDS)
    return (
        f"candidates: {counts}, {told}: {_makespan(jobs, kinds, machine):.3g} s predicted, {alone}"
    )


def chosen(
    workload: Workload,
    asked: int | None,
    before: Choice | None,
    other: Plan | None,
    probes: Probes,
    stored: Plan | None = None,
) -> Choice:
    """Choose threads and jobs per GPU, on each kind of device that the plan names.

    Parameters are those of `thread_choice.chosen`; `stored` is the plan of the run.
    """
    if not workload.plan.devices:
        probe = probes.on.get(workload.plan.device)
        return thread_choice.chosen(workload, asked, before, other, probe, probes.place)
    parts = {kind: workload.on(kind) for kind in KINDS}
    found = {
        kind: thread_choice.chosen(
            part, asked, _before(before, stored, kind), other, probes.on.get(kind), probes.place
        )
        for kind, part in parts.items()
    }
    return _merged(workload, parts, found["cpu"], found["cuda"], before)


def _before(before: Choice | None, stored: Plan | None, kind: str) -> Choice | None:
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
        job.id: found.last_threads.get(job.id, found.threads[job.model])
        for part, found in ((parts["cpu"], on_cores), (parts["cuda"], on_gpus))
        for job in part.plan.jobs
    }
    models = {job.id: job.model for job in workload.plan.jobs}
    last = {name: count for name, count in sorted(each.items()) if count != threads[models[name]]}
    why = {
        model: "; ".join(
            f"on {_NAMES[kind]} {found.why[model]}"
            for kind, found in (("cpu", on_cores), ("cuda", on_gpus))
            if any(job.model == model for job in parts[kind].plan.jobs)
        )
        for model in threads
    }
    return replace(
        on_cores,
        threads=threads,
        why=why,
        costs={**on_gpus.costs, **on_cores.costs},
        overturned=on_cores.overturned or on_gpus.overturned,
        failures={**on_gpus.failures, **on_cores.failures},
        per_gpu=on_gpus.per_gpu,
        last_threads=last,
        gpu_costs=on_gpus.costs,
    )
