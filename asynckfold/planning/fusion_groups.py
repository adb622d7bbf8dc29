"""Fusion groups: a pure rule over operations, number of jobs and allotted cores.

The width of a group touches the bits of its jobs, so the same sweep must get the same groups on an
idle and on a busy machine: a timing counts only where it is far from the rule, and is then stored
for this machine (`why_not_here`). The groups are written in the plan.

::

    fuse=False, a GPU ──────────────────────────────► no groups
    the run has a plan, or plan_from another ───────► its groups
    else, for each model:  fusible?  pays?  ────────► equal groups, one per core or more
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from asynckfold.jobs.cost import work_of
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.planning.thread_search import OVERTURN, rule_cost

MOST_FLOPS = 3e8
"""Operations of a training step above which fusion may not pay.

From `asynckfold bench fusion` (1 core of an AMD EPYC, 2 cores shared with others; torch 2.15;
batches of 32 unless noted): seconds of plain steps / seconds of a fused step, of 5 and of 10 jobs.

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

Up to 290 MFLOP all were at least 1.3 times faster, in two runs on a busy machine; VGG11 varied
between 1.10 and 1.41. LeNet CIFAR, at 0.94 before, is bound by its convolutions, and fused ones are
not faster than plain ones: 3 to 16 channels fill no vector."""

MOST_JOBS = 10
"""Largest group: ten jobs were little faster per job than five, and lose more when they fail."""

LEAST_JOBS = 3
"""Smallest group that "auto" forms; less gains too little.

Measured as above, on a busier machine, over the models up to LeNet5: 2 jobs were 1.27 to 1.59 times
faster, 3 jobs 1.38 to 2.04 times."""

LEAST_SECONDS = 1.0
"""Modelled seconds of a model's jobs, one after another, below which tracing costs more than fusion
gains; see `LEAST_STEPS`."""

LEAST_STEPS = 250
"""Steps of a model to add to `LEAST_SECONDS`, for the equivalence check in both precisions.

A whole call over five folds with two warm workers, plain and fused (2 cores of a Xeon under light
load; torch 2.15, medians of three): MLP 64-128-10, whose jobs take 1.6 s by the rule, 1.43 and
1.08 s; MLP 784-128-10, 1.3 s: 1.17 and 0.87; LeNet CIFAR, 2.1 s: 2.41 and 2.20; LeNet5, 4.1 s: 3.28
and 3.18."""

GAINS = ((1.3e6, 2.73), (1.31e7, 1.86), (7.3e7, 1.5), (2.9e8, 1.5), (1.87e9, 1.25))
"""(operations of a step, speedup of five fused jobs) from the table above; models with similar
operations are combined by their geometric mean."""

GAINING_JOBS = 5
"""Width of a group beyond which the gain grows little."""

Fuse = bool | int | str
"""``"auto"``, True for every fusible model, False, or the number of jobs of a group."""


@dataclass(frozen=True)
class Grouping:
    """The fusion groups of a plan.

    Parameters
    ----------
    groups : tuple of tuple of str
        Job ids; a job in no group is trained separately.
    why : Mapping of str to str
        A sentence by model.
    widths : Mapping of str to int
        Size of the largest group of each model that has one.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)


def why_not_paying(fuse: Fuse, plan: Plan, folds: Sequence[Fold], model: str, flops: int) -> str:
    """Return why the jobs of a model are not worth fusing; empty if they are.

    Parameters
    ----------
    fuse : "auto", bool or int
        The setting.
    plan : Plan
        Has the model's jobs; its groups and threads do not matter.
    folds : sequence of Fold
        The folds of the plan.
    model : str
        Name of the model.
    flops : int
        Operations of one of its training steps.
    """
    if fuse is False:
        return "fuse is False"
    if plan.device != "cpu":
        return "only jobs on CPUs are fused"
    if plan.params.trainer != "plain":
        return f"each is trained by the trainer {plan.params.trainer!r}"
    if plan.params.compile:
        return "each is compiled by itself (compile=True)"
    jobs = [job for job in plan.jobs if job.model == model]
    if len(jobs) < 2:
        return "there is one job"
    if fuse != "auto":
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


def gain(flops: float, jobs: int, measured: float = 0.0) -> float:
    """Return the speedup of fused training steps, for a forecast; no bit depends on it.

    Evaluation and checkpoints gain nothing: each job of a group does its own. Interpolates `GAINS`
    by the logarithms of operations and jobs.

    Parameters
    ----------
    flops : float
        Operations of a training step.
    jobs : int
        Width of the group.
    measured : float
        The gain of five jobs on this machine, by a probe; 0 without one.

    Examples
    --------
    >>> [round(gain(1.31e7, jobs), 2) for jobs in (1, 2, 5, 10)]
    [1.0, 1.37, 1.86, 1.86]
    >>> gain(1.31e7, 5, measured=2.5)
    2.5
    """
    return 1 + ((measured or _gain_of_many(flops)) - 1) * _share_of_gain(jobs)


def gain_of_many(found: float, jobs: int) -> float:
    """Return the gain of five jobs from the gain `found` of two jobs or more.

    >>> round(gain_of_many(gain(1.31e7, 2), 2), 2)
    1.86
    """
    return max(0.01, 1 + (found - 1) / _share_of_gain(jobs))


def _share_of_gain(jobs: int) -> float:
    return min(1.0, math.log(jobs) / math.log(GAINING_JOBS))


def _gain_of_many(flops: float) -> float:
    points = [math.log(point) for point, _ in GAINS]
    log = min(max(math.log(max(flops, 1.0)), points[0]), points[-1])
    most = GAINS[-1][1]
    for (left, low), (right, high) in pairwise(zip(points, (g for _, g in GAINS), strict=True)):
        if log <= right:
            most = low + (high - low) * (log - left) / (right - left)
            break
    return most


def measured_here(gain: float) -> str:
    """Describe a measured gain of fusion; below 1 it is a loss.

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

    As for threads, a timing overrules the rule only by the margin `OVERTURN`.

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
) -> Grouping:
    """Divide the jobs of each model that pays into groups.

    Parameters
    ----------
    plan : Plan
        Has its threads.
    fuse : "auto", bool or int
        The setting.
    why_not : Mapping of str to str
        Reason against fusion by model; empty where there is none.
    cores : int
        Allotted cores.
    before : Plan, optional
        Plan of this run or another whose groups are kept.
    failing : collection of str
        Candidates whose dry run failed: their jobs would end the others of a group.
    found : Mapping of str to str, optional
        Notes on fused models, added to their sentences.
    most : Mapping of str to int, optional
        Number of jobs that fit into memory at once, by model.

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
        names = [job.id for job in plan.jobs if job.model == model]
        mine = [group for group in kept if group[0] in names]
        fresh = [
            job.id
            for job in plan.jobs
            if job.model == model and job.id not in known and job.candidate not in failing
        ]
        reason = why_not.get(model, "it could not be checked")
        if not fresh and not known.issuperset(names):
            reason = reason or "its dry run failed"
        fitting = (most or {}).get(model, len(names))
        if fitting < 2 and fresh:
            reason = reason or "no two of its jobs fit into the memory at once"
        places = cores * _per_core(plan, model)
        made = [] if reason or not fresh else _divided(fresh, fuse, places, fitting)
        if not reason and fresh and not made:
            reason = f"{len(fresh)} jobs are too few for {cores} cores"
        mine += made
        groups += mine
        why[model] = _told(mine, len(names), reason, taken_over=known.issuperset(names))
        if made and made != _divided(fresh, fuse, places, len(names)):
            why[model] += f", since no more than {fitting} at once fit into the memory"
        if made and found and found.get(model):
            why[model] += f"; {found[model]}"
        if mine:
            widths[model] = max(map(len, mine))
    return Grouping(tuple(groups), why, widths)


def _per_core(plan: Plan, model: str) -> float:
    return 1 / plan.threads_of(model)


def _divided(
    names: Sequence[str], fuse: Fuse, places: float, fitting: int
) -> list[tuple[str, ...]]:
    """Return equal groups in order, so that jobs of one LR schedule stay together."""
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


def _told(groups: Sequence[tuple[str, ...]], jobs: int, reason: str, *, taken_over: bool) -> str:
    if not groups:
        return "not fused, as before" if taken_over else f"not fused: {reason}"
    sizes = " + ".join(str(len(group)) for group in groups)
    return f"fused: {sizes} of {jobs} jobs" + (", as before" if taken_over else "")


def problems(fuse: object) -> Iterator[tuple[str, str, str]]:
    """Yield problems of a setting of ``fuse``: rule, received, remedy."""
    number = isinstance(fuse, int) and not isinstance(fuse, bool)
    if (number and fuse < 2) or not (number or isinstance(fuse, bool) or fuse == "auto"):  # type: ignore[operator]
        yield (
            "fuse must be 'auto', True, False, or the number of jobs of a group, 2 or more",
            repr(fuse),
            "Leave fuse out for its default.",
        )
