"""Whether fusing the jobs of a model pays, and how much: a pure rule over operations and jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asynckfold.jobs.cost import work_of
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.planning import gpu_rule
from asynckfold.planning.flop_model import between, rule_cost

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


def why_not_paying(
    fuse: Fuse,
    plan: Plan,
    folds: Sequence[Fold],
    model: str,
    flops: int,
    products: int | None = None,
    kind: str = "cpu",
) -> str:
    """Return why the jobs of a model are not fused on a kind of device; empty if that may pay.

    The check of the fused model runs on a core in any case.
    """
    if fuse is False:
        return "fuse is False"
    if plan.params.trainer != "plain":
        return f"its jobs use the trainer {plan.params.trainer!r}"
    if plan.params.compile:
        return "each job is compiled separately (compile=True)"
    jobs = [job for job in plan.jobs if job.model == model]
    if len(jobs) < 2:
        return "there is one job"
    if fuse != "auto":
        return ""
    ratio = plan.params.eval_batch_size / plan.batch_size
    check = cost = rule_cost(flops, 1, ratio)
    if kind == "cuda":
        cost = gpu_rule.gpu_cost(flops, ratio, products)
        if reason := gpu_rule.why_not_fused(cost):
            return reason
    elif flops > MOST_FLOPS:
        return f"a step of {flops / 1e6:.3g} MFLOP, and {MOST_FLOPS / 1e6:g} is the most"
    by_fold = {fold.key: work_of(fold, plan.params, plan.batch_size) for fold in folds}
    seconds = math.fsum(cost.seconds(by_fold[job.key], 1) for job in jobs)
    least = LEAST_SECONDS + LEAST_STEPS * check.step_seconds[1]
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


def gain(flops: float, jobs: int) -> float:
    """Return the speed-up of training steps by fusion on cores, for a forecast.

    Interpolated in `GAINS` by the logarithms of operations and jobs. Evaluation and checkpoints
    gain nothing: they are not shared.

    Parameters
    ----------
    flops : float
        Operations of a training step.
    jobs : int
        Size of the group.

    Examples
    --------
    >>> [round(gain(1.31e7, jobs), 2) for jobs in (1, 2, 5, 10)]
    [1.0, 1.37, 1.86, 1.86]
    """
    points = [math.log(point) for point, _ in GAINS]
    size = max(math.log(max(flops, 1.0)), points[0])
    many = between(points, [most for _, most in GAINS], size)
    return 1 + (many - 1) * min(1.0, math.log(jobs) / math.log(GAINING_JOBS))
