"""Which jobs form fusion groups: a pure rule over operations, number of jobs and allotted cores.

The size of a group changes bits, so the same sweep must get the same groups on an idle and on a
busy machine. A timing counts only if it is far from the rule, and is then cached for this machine
(`why_not_here`). On a GPU there is no rule, and only a timing decides for fusion, see `gpu_fusion`.
The groups are written in the plan.

::

    fuse=False ─────────────────────────────────────► no groups
    the run has a plan, or plan_from another ───────► its groups
    else, for each model:  fusible?  pays?  ────────► equal groups, at least one a core or GPU
                                                      of all nodes
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from asynckfold.jobs.cost import work_of
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.planning.flop_model import OVERTURN, between, rule_cost

MOST_FLOPS = 3e8
"""Operations of a training step above which fusion may not pay.

Measured (1 core of an AMD EPYC, 2 cores shared with others; torch 2.15;
batches of 32 unless stated): seconds of plain steps / seconds of a fused step, for 5 and 10 jobs.

=========================  =====  =====  =====
model                      MFLOP      5     10
=========================  =====  =====  =====
MLP 64-128-10                1.3   2.73   3.46
MLP 784-128-10              13.1   1.86   2.05
MLP 784-128-10, batch 128   52.4   1.39   1.58
LeNet5                      72.4   1.86   1.90
LeNet CIFAR                  103   1.32   1.34
LeNet5, batch 128            290   1.58   1.61
VGG11, quarter width        1869   1.41   1.10
=========================  =====  =====  =====

Up to 290 MFLOP every model was at least 1.3 times faster in both of two runs on a shared machine;
VGG11 was between 1.10 and 1.41. LeNet CIFAR is bound by its convolutions, which fusion does not
speed up: 3 to 16 channels do not fill a vector."""

MOST_JOBS = 10
"""Largest group: ten jobs were hardly faster per job than five, and are lost together."""

LEAST_JOBS = 3
"""If no group would have this many jobs, the gain is too small, and "auto" does not fuse.

Measured like the table above, on a busier machine: 2 jobs 1.27 to 1.59 times faster, 3 jobs 1.38 to
2.04 times, over the models up to LeNet5."""

LEAST_SECONDS = 1.0
"""Total seconds of a model's jobs, by the rule, below which tracing costs more than fusion gains;
see `LEAST_STEPS`."""

LEAST_STEPS = 250
"""Further steps needed to pay for the check of the fused model in both precisions.

A whole call over five folds with two warm workers, plain and fused (2 cores of a Xeon, little other
load; torch 2.15, medians of three). MLP 64-128-10, 1.6 s by the rule: 1.43 and 1.08 s; MLP
784-128-10, 1.3 s: 1.17 and 0.87; LeNet CIFAR, 2.1 s: 2.41 and 2.20; LeNet5, 4.1 s: 3.28 and 3.18.
"""

GAINS = ((1.3e6, 2.73), (1.31e7, 1.86), (7.3e7, 1.5), (2.9e8, 1.5), (1.87e9, 1.25))
"""Operations of a step, and the gain of five fused jobs, from the table above; for models with
similar operations their geometric mean."""

GAINING_JOBS = 5
"""Group size beyond which the gain per job hardly grows."""

Fuse = bool | int | str
"""``"auto"``, True for every model that can be fused, False, or the number of jobs per group."""


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


def why_not_paying(fuse: Fuse, plan: Plan, folds: Sequence[Fold], model: str, flops: int) -> str:
    """Return why the jobs of a model are not fused; empty if they are, or on a GPU may be."""
    if fuse is False:
        return "fuse is False"
    if plan.params.trainer != "plain":
        return f"its jobs use the trainer {plan.params.trainer!r}"
    if plan.params.compile:
        return "each job is compiled separately (compile=True)"
    jobs = [job for job in plan.jobs if job.model == model]
    if len(jobs) < 2:
        return "there is one job"
    if fuse != "auto" or plan.device == "cuda":
        return ""
    if flops > MOST_FLOPS:
        return f"a step of {flops / 1e6:.3g} MFLOP, and {MOST_FLOPS / 1e6:g} is the most"
    by_fold = {fold.key: work_of(fold, plan.params, plan.batch_size) for fold in folds}
    cost = rule_cost(flops, 1, plan.params.eval_batch_size / plan.batch_size)
    seconds = math.fsum(cost.seconds(by_fold[job.repeat, job.fold], 1) for job in jobs)
    least = LEAST_SECONDS + LEAST_STEPS * cost.step_seconds[1]
    if seconds < least:
        return f"its jobs take about {seconds:.2g} s in all, and {least:.2g} s is the least"
    return ""


def unfit(fuse: Fuse, model: str, reason: str) -> tuple[str, str, str]:
    """Return rule, received and remedy for a model that must be fused and cannot be."""
    return (
        f"fuse={fuse} needs models that can be fused",
        f"model {model}: {reason}",
        "Pass fuse='auto' or fuse=False, or leave the model out.",
    )


def gain(flops: float, jobs: int, measured: float = 0.0) -> float:
    """Return the speed-up of training steps by fusion, for a forecast; no bit depends on it.

    Interpolated in `GAINS` by the logarithms of operations and jobs. Evaluation and checkpoints
    gain nothing: each job of a group does its own.

    Parameters
    ----------
    flops : float
        Operations of a training step.
    jobs : int
        Size of the group.
    measured : float
        The gain of five jobs measured here by a probe; 0 if there was none.

    Examples
    --------
    >>> [round(gain(1.31e7, jobs), 2) for jobs in (1, 2, 5, 10)]
    [1.0, 1.37, 1.86, 1.86]
    >>> gain(1.31e7, 5, measured=2.5)
    2.5
    """
    return 1 + ((measured or _gain_of_many(flops)) - 1) * _share_of_gain(jobs)


def gain_of_many(found: float, jobs: int) -> float:
    """Return the gain of five or more jobs from that `found` for `jobs`, at least 2.

    >>> round(gain_of_many(gain(1.31e7, 2), 2), 2)
    1.86
    """
    return max(0.01, 1 + (found - 1) / _share_of_gain(jobs))


def _share_of_gain(jobs: int) -> float:
    return min(1.0, math.log(jobs) / math.log(GAINING_JOBS))


def _gain_of_many(flops: float) -> float:
    points = [math.log(point) for point, _ in GAINS]
    log = max(math.log(max(flops, 1.0)), points[0])
    return between(points, [most for _, most in GAINS], log)


def measured_here(gain: float) -> str:
    """Return the measured gain of fusion as a sentence.

    >>> measured_here(1.9)
    'measured here: fused steps are 1.90 times faster than separate ones'
    >>> measured_here(0.8)
    'measured here: fused steps take 1.25 times as long as separate ones'
    >>> measured_here(0.996)
    'measured here: fused steps take as long as separate ones'
    """
    if "1.00" in (f"{gain:.2f}", f"{1 / gain:.2f}"):
        found = "take as long as"
    elif gain > 1:
        found = f"are {gain:.2f} times faster than"
    else:
        found = f"take {1 / gain:.2f} times as long as"
    return f"measured here: fused steps {found} separate ones"


def why_not_here(measured: float) -> str:
    """Return why a measured gain forbids fusion; empty if it does not.

    As for threads, a timing overturns the rule only by the margin `OVERTURN`.

    >>> why_not_here(0.9)
    ''
    >>> why_not_here(0.5)
    'measured here: fused steps take 2.00 times as long as separate ones'
    """
    return measured_here(measured) if 0 < measured <= 1 / OVERTURN else ""


def grouped(
    plan: Plan,
    fuse: Fuse,
    why_not: Mapping[str, str],
    cores: int,
    before: Plan | None = None,
    failing: Collection[str] = (),
    found: Mapping[str, str] | None = None,
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
    found : Mapping of str to str, optional
        By model what to report with its groups.
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
    ids = {job.id for job in plan.jobs}
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
        made = [] if reason or not fresh else _divided(fresh, fuse, places, fitting)
        if not reason and fresh and not made:
            reason = f"{len(fresh)} jobs are too few for {cores} {'GPUs' if on_gpus else 'cores'}"
        mine += made
        groups += mine
        taken_over = known.issuperset(names)
        why[model] = _group_sentence(mine, len(names), reason, taken_over=taken_over)
        if made and made != _divided(fresh, fuse, places, len(names)):
            why[model] += f", since no more than {fitting} at once fit into the memory"
        if made and found and found.get(model):
            why[model] += f"; {found[model]}"
        if mine:
            widths[model] = max(map(len, mine))
    return Grouping(tuple(groups), why, widths)


def _divided(
    names: Sequence[str], fuse: Fuse, places: float, fitting: int
) -> list[tuple[str, ...]]:
    """Divide the jobs in order into equal groups; jobs of one LR schedule stay together."""
    if isinstance(fuse, int) and not isinstance(fuse, bool):
        count = math.ceil(len(names) / fuse)
    else:
        at_once = max(1, math.floor(places))
        count = max(math.ceil(len(names) / MOST_JOBS), min(at_once, len(names)))
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
