"""Which jobs form fusion groups: a pure rule over operations, number of jobs and allotted cores.

The size of a group changes bits, so the same sweep must get the same groups on an idle and on a
busy machine. The groups are written in the plan.

::

    fuse=False ─────────────────────────────────────► no groups
    the run has a plan, or plan_from another ───────► its groups
    else, for each model:  fusible?  pays?  ────────► equal groups, at least one a core or GPU
                                                      of all nodes
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, WORKER_BYTES
from asynckfold.jobs.plan import Plan
from asynckfold.planning.fusion_rule import Fuse
from asynckfold.planning.workload import Choice, Workload
from asynckfold.system.machine import total_memory

MOST_JOBS = 10
"""Largest group on cores: ten jobs were hardly faster per job than five, and are lost together."""

MOST_ON_A_GPU = 64
"""Largest group on a GPU, where a step has the launches of one job. On one H100, 60 MLPs took 0.40
ms in one CUDA graph and ten 0.21; 60 LeNets 4.7 and ten 1.25."""

LEAST_JOBS = 3
"""If no group would have this many jobs, the gain is too small, and "auto" does not fuse.

Measured like the table above, on a busier machine: 2 jobs 1.27 to 1.59 times faster, 3 jobs 1.38 to
2.04 times, over the models up to LeNet5."""


@dataclass(frozen=True)
class Grouping:
    """The fusion groups of a sweep.

    Parameters
    ----------
    groups : tuple of tuple of str
        Job ids; a job in none is trained separately.
    why : Mapping of str to str
        A sentence by model.
    widths : Mapping of str to int
        Size of the largest group by model, for models that have groups.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)

    def beside(self, on_gpus: Grouping) -> Grouping:
        """Return these groups, of jobs on cores, and those of other jobs on GPUs."""
        both = self.why.keys() & on_gpus.why.keys()
        joined = {name: f"on cores {self.why[name]}; on GPUs {on_gpus.why[name]}" for name in both}
        return Grouping(
            (*self.groups, *on_gpus.groups),
            {**self.why, **on_gpus.why, **joined},
            {**on_gpus.widths, **self.widths},
        )


def group(
    work: Workload, threads: Choice, before: Plan | None, fuse: Fuse, most_bytes: int | None
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
    """
    plan = work.plan.with_threads(threads.threads)
    kinds = ("cpu", "cuda") if plan.devices else (plan.device,)
    groups = Grouping()
    for kind in kinds:
        part = replace(work.on(kind), plan=plan.on(kind) if plan.devices else plan)
        if kind == "cpu":
            groups = _on_cores(part, before, fuse, most_bytes)
        else:
            groups = groups.beside(_on_gpus(part, threads, before, fuse))
    return groups if groups.groups or fuse is not False else Grouping()


def _on_cores(work: Workload, before: Plan | None, fuse: Fuse, most_bytes: int | None) -> Grouping:
    facts = work.facts
    room = max(0, (most_bytes or total_memory()) - WORKER_BYTES)
    most = {name: room // size for name, size in facts.memory.items() if room and size}
    cores, nodes = work.all_cores, [node.cores for node in work.nodes]
    return grouped(
        work.plan, fuse, facts.fusible, cores, before, facts.failures, facts.fused, most, nodes
    )


def _on_gpus(work: Workload, choice: Choice, before: Plan | None, fuse: Fuse) -> Grouping:
    facts, most = work.facts, {}
    for name in dict.fromkeys(job.model for job in work.plan.jobs):
        cost = {**choice.costs, **choice.gpu_costs}[name]
        if cost.gpu_memory and work.gpu_memory:
            most[name] = max(0, work.gpu_memory - GPU_CONTEXT_BYTES) // cost.gpu_memory
    reasons, gpus = facts.gpu_fusible, work.all_gpus
    return grouped(work.plan, fuse, reasons, gpus, before, facts.failures, facts.fused, most)


def grouped(
    plan: Plan,
    fuse: Fuse,
    why_not: Mapping[str, str],
    cores: int,
    before: Plan | None = None,
    failing: Collection[str] = (),
    checks: Mapping[str, str] | None = None,
    most: Mapping[str, int] | None = None,
    nodes: Sequence[int] = (),
) -> Grouping:
    """Divide the jobs of each model into fusion groups.

    Parameters
    ----------
    plan : Plan
        With its threads; all of its jobs on one kind of device.
    fuse : "auto", bool or int
        The user's setting.
    why_not : Mapping of str to str
        By model why it is not fused; empty if it is.
    cores : int
        Allotted cores, on all nodes; GPUs for jobs on GPUs.
    before : Plan, optional
        Plan of this run or of another, whose groups are kept.
    failing : collection of str
        Candidates whose dry run failed: in a group they would end the other jobs as well.
    checks : Mapping of str to str, optional
        By model what its dry run reported about fused jobs.
    most : Mapping of str to int, optional
        By model how many jobs fit into memory at once.
    nodes : sequence of int, optional
        The cores of each node of a cluster: a group runs on one of them.

    Examples
    --------
    >>> from asynckfold.jobs.plan import Job
    >>> from asynckfold.jobs.trainer_params import TrainerParams
    >>> jobs = tuple(Job("A", "step", 0, fold, 0) for fold in range(5))
    >>> plan = Plan(jobs, TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
    >>> [len(group) for group in grouped(plan, True, {"A": ""}, cores=2).groups]
    [2, 3]
    >>> grouped(plan, False, {"A": "fuse is False"}, cores=2).why
    {'A': 'not fused: fuse is False'}
    """
    groups: list[tuple[str, ...]] = []
    why: dict[str, str] = {}
    widths: dict[str, int] = {}
    ids, folds = {job.id for job in plan.jobs}, plan.fold_keys
    kept = () if before is None else tuple(group for group in before.groups if ids >= set(group))
    known = set() if before is None else {job.id for job in before.jobs}
    for model in dict.fromkeys(job.model for job in plan.jobs):
        jobs = [job for job in plan.jobs if job.model == model]
        names = [job.id for job in jobs]
        mine = [group for group in kept if group[0] in names]
        fresh = [job.id for job in jobs if job.id not in known and job.candidate not in failing]
        reason = why_not.get(model, "it could not be checked")
        if not fresh and not known.issuperset(names):
            reason = reason or "its dry run failed"
        fitting = (most or {}).get(model, len(names))
        if fitting < 2 and fresh:
            reason = reason or "no two of its jobs fit into the memory at once"
        on_gpus = plan.device == "cuda"
        threads = plan.threads_of(model)
        places = cores if on_gpus else cores * (1 / threads)
        if nodes and not on_gpus:
            places = sum(count // threads for count in nodes)
        widest = MOST_ON_A_GPU if on_gpus else MOST_JOBS
        new = [job for job in jobs if job.id in fresh]
        # Inner folds have fewer steps.
        rounds = [[job.id for job in new if len(job.key) == size] for size in (2, 3)]
        if plan.race is not None:
            # Groups of one fold, so that there is something to leave out.
            rounds = [[job.id for job in new if job.key == key] for key in folds]
        divided = [_divided(names, fuse, places, fitting, widest) for names in rounds if names]
        made = [] if reason else [group for part in divided for group in part]
        if not reason and fresh and not made:
            reason = f"{len(fresh)} jobs are too few for {cores} {'GPUs' if on_gpus else 'cores'}"
        mine += made
        groups += mine
        taken_over = known.issuperset(names)
        why[model] = _group_sentence(mine, len(names), reason, taken_over=taken_over)
        if made and divided != [
            _divided(each, fuse, places, len(each), widest) for each in rounds if each
        ]:
            why[model] += f", since no more than {fitting} at once fit into the memory"
        if made and checks and checks.get(model):
            why[model] += f"; {checks[model]}"
        if mine:
            widths[model] = max(map(len, mine))
    return Grouping(tuple(groups), why, widths)


def _divided(
    names: Sequence[str], fuse: Fuse, places: float, fitting: int, widest: int
) -> list[tuple[str, ...]]:
    """Divide the jobs in order into equal groups; jobs of one LR schedule stay together."""
    if isinstance(fuse, int) and not isinstance(fuse, bool):
        count = math.ceil(len(names) / fuse)
    else:
        at_once = max(1, math.floor(places))
        count = max(math.ceil(len(names) / widest), min(at_once, len(names)))
    count = max(count, math.ceil(len(names) / fitting))
    ends = [round(part * len(names) / count) for part in range(count + 1)]
    parts = [tuple(names[low:high]) for low, high in pairwise(ends)]
    if fuse == "auto" and max(map(len, parts)) < LEAST_JOBS:
        return []
    return [part for part in parts if len(part) > 1]


def _group_sentence(
    groups: Sequence[tuple[str, ...]], jobs: int, reason: str, *, taken_over: bool
) -> str:
    if not groups:
        return "not fused, as before" if taken_over else f"not fused: {reason}"
    sizes = " + ".join(str(len(group)) for group in groups)
    return f"fused: {sizes} of {jobs} jobs" + (", as before" if taken_over else "")
