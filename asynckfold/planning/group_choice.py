"""The fusion groups of a sweep: on cores by the rule, on GPUs by what was measured there."""

from __future__ import annotations

from dataclasses import replace

from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, WORKER_BYTES
from asynckfold.jobs.plan import Plan
from asynckfold.planning import fusion_groups, gpu_fusion
from asynckfold.planning.fusion_groups import Fuse, Grouping, grouped
from asynckfold.planning.workload import Choice, Workload
from asynckfold.system.machine import total_memory


def group(
    work: Workload,
    threads: Choice,
    before: Plan | None,
    fuse: Fuse,
    most_bytes: int | None,
    gpu_bytes: int = 0,
) -> Grouping:
    """Decide which jobs are fused; a run that has a plan keeps its groups.

    Parameters
    ----------
    work : Workload
        The sweep, with the kinds of device.
    threads : Choice
        Threads and costs.
    before : Plan or None
        Plan of this run or of another, whose groups are kept.
    fuse : "auto", bool or int
        The user's setting.
    most_bytes : int or None
        Memory that all running jobs may take; by default all that there is.
    gpu_bytes : int
        Memory of the smallest GPU; 0 if unknown.
    """
    plan = work.plan.with_threads(threads.threads)
    kinds = ("cpu", "cuda") if plan.devices else (plan.device,)
    found = Grouping()
    for kind in kinds:
        part = replace(work.on(kind), plan=plan.on(kind) if plan.devices else plan)
        if kind == "cpu":
            found = _on_cores(part, threads, before, fuse, most_bytes)
        else:
            found = found.beside(_on_gpus(part, threads, before, fuse, gpu_bytes))
    return found if found.groups or fuse is not False else Grouping()


def _on_cores(
    work: Workload, threads: Choice, before: Plan | None, fuse: Fuse, most_bytes: int | None
) -> Grouping:
    facts = work.facts
    # By a rule over shapes. Timings of a probe vary, so they count only if far from the rule.
    gains = {name: cost.fused_gain for name, cost in threads.costs.items() if cost.fused_gain}
    here = {
        name: fusion_groups.why_not_here(gain) for name, gain in gains.items() if fuse == "auto"
    }
    why_not = {name: text or here.get(name, "") for name, text in facts.fusible.items()}
    checks = {
        name: f"{text}; {fusion_groups.measured_here(gains[name])}" if name in gains else text
        for name, text in facts.fused.items()
    }
    room = max(0, (most_bytes or total_memory()) - WORKER_BYTES)
    most = {name: room // size for name, size in facts.memory.items() if room and size}
    failing = facts.failures.keys()
    cores, nodes = work.all_cores, [node.cores for node in work.nodes]
    return grouped(work.plan, fuse, why_not, cores, before, failing, checks, most, nodes)


def _on_gpus(
    work: Workload, threads: Choice, before: Plan | None, fuse: Fuse, gpu_bytes: int
) -> Grouping:
    costs = {**threads.costs, **threads.gpu_costs}
    why_not, checks, most = {}, {}, {}
    for name, found in work.on_gpu.items():
        cost, per_gpu = costs[name], threads.per_gpu.get(name, 1)
        here = gpu_fusion.why_not_here(cost, per_gpu) if fuse == "auto" else ""
        why_not[name], checks[name] = found.refusal or here, found.found
        if cost.fused_gain:
            gain = gpu_fusion.gain_over_sharing(cost, per_gpu)
            checks[name] += f"; {fusion_groups.measured_here(gain)}"
        size = max(cost.gpu_memory, work.facts.memory.get(name, 0))
        if size and gpu_bytes:
            most[name] = max(0, gpu_bytes - GPU_CONTEXT_BYTES) // size
    failing = work.facts.failures.keys()
    return grouped(work.plan, fuse, why_not, work.all_gpus, before, failing, checks, most)
