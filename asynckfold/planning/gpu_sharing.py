"""How many jobs of each model share a GPU: one, unless a probe finds several clearly faster.

This changes no bit, so neither a requested number of threads nor another run has a say in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asynckfold.jobs.cost import Cost
from asynckfold.jobs.placement import GPU_CONTEXT_BYTES
from asynckfold.planning.gpu_fusion import NOT_TIMED, with_fused_gain
from asynckfold.planning.thread_search import Model
from asynckfold.planning.workload import (
    PROBE_SHARE,
    SETTING_SECONDS,
    Choice,
    Probe,
    Workload,
    failure_in,
)

GPU_STEP_SECONDS = 0.001
"""Assumed shortest step on a GPU, to tell whether a sweep is long enough for probes: some hundred
kernels, each of which takes microseconds to launch."""

GPU_START_SECONDS = 5.0
"""Approximate start of two processes on a GPU, which serve the sweep afterwards."""

CROWDS = (2, 4, 8)
"""Numbers of jobs on one GPU that are tried, while they fit and gain."""

CROWD_GAIN = 1.15
"""Least gain in steps per second from one of these numbers to the next."""


def with_gpu_sharing(
    workload: Workload, choice: Choice, probe: Probe | None, place: Path | None
) -> Choice:
    """Complete a choice by the jobs per GPU of the models for which that is open."""
    models = [model for model in workload.models() if model.name not in choice.per_gpu]
    if not models:
        return choice
    found, failures = measured(workload, models, probe, place)
    for model in models:
        if cost := found.get(model.name):
            found[model.name] = with_fused_gain(workload, model, cost, probe, place)
    per_gpu, why = dict(choice.per_gpu), dict(choice.why)
    for name in (model.name for model in models):
        text = "1 job on a GPU: " + ("its probe failed" if name in failures else "not probed")
        per_gpu[name], text = jobs_per_gpu(found[name]) if name in found else (1, text)
        why[name] += f"; {text}"
    costs = {**choice.costs, **found}
    return replace(
        choice,
        why=why,
        costs=costs,
        per_gpu=per_gpu,
        failures={**choice.failures, **failures},
        prediction=workload.predicted(choice.threads, costs, per_gpu),
    )


def measured(
    workload: Workload, models: Sequence[Model], probe: Probe | None, place: Path | None
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Return measured costs by model, and tracebacks of failed probes."""
    if not may_probe(workload, models):
        return {}, {}

    def measure(model: Model, probe: Probe) -> Cost | str | None:
        alone = probe(model.name, 1, 1)
        if failure := failure_in(alone):
            return failure
        if not alone:
            return None
        cost = workload.gathered(model.name, {1: alone})
        for count in CROWDS:
            crowd = probe(model.name, 1, count)
            if len(crowd) < count or failure_in(crowd):
                break
            each = max(item.step_seconds for item in crowd)
            if count == 2:
                cost = replace(cost, pair_seconds=each)
            else:
                cost = replace(cost, crowd_seconds={**cost.crowd_seconds, count: each})
            if jobs_per_gpu(cost)[0] < count:
                break
        return cost

    return workload.measured(models, probe, place, measure)


def may_probe(workload: Workload, models: Sequence[Model]) -> bool:
    """Return whether a sweep is long enough for probes of these models on a GPU."""
    if workload.plan.params.processes > 1:
        # A probe is one process on the GPU; it tells nothing about a job with ranks on cores.
        return False
    steps = sum(work.steps for model in models for work in model.jobs)
    most = GPU_START_SECONDS + (1 + len(CROWDS)) * len(models) * SETTING_SECONDS
    return most <= PROBE_SHARE * steps * GPU_STEP_SECONDS / max(1, workload.all_gpus)


def why_not_timed_fused(
    workload: Workload, name: str, before: Choice | None, probe: Probe | None
) -> str:
    """Return why fused steps of a model are not timed on a GPU; empty if they are, or were."""
    if before is not None and name in before.per_gpu:
        timed = bool({**before.costs, **before.gpu_costs}[name].fused_gain)
    else:
        timed = probe is not None and may_probe(workload, workload.models())
    return "" if timed else NOT_TIMED


def jobs_per_gpu(cost: Cost) -> tuple[int, str]:
    """Return how many jobs of a model share a GPU, and why.

    One is the rule: processes take turns on a GPU, and several were measured slower. Twice as many
    share it if a probe shows that they take `CROWD_GAIN` times as many steps together.

    Examples
    --------
    >>> jobs_per_gpu(Cost({1: 0.004}, {1: 0.001}, pair_seconds=0.005))
    (2, '2 jobs on a GPU beat 1: 2.5 ms against 4 ms per step')
    >>> jobs_per_gpu(Cost({1: 0.004}, {1: 0.001}, pair_seconds=0.0075))
    (1, '1 job on a GPU: 4 ms per step, 3.75 ms with 2, and less than 1.15 times faster is no gain')
    """
    if not cost.sharing:
        return 1, "1 job on a GPU: 2 at once could not be timed"
    count, fastest, why = 1, cost.step_seconds[1], ""
    for more, each in cost.sharing.items():
        shared = each / more
        one, two = f"{1000 * fastest:.3g} ms", f"{1000 * shared:.3g} ms"
        if fastest < CROWD_GAIN * shared:
            few = f"{count} {'job' if count == 1 else 'jobs'} on a GPU"
            return count, why or (
                f"{few}: {one} per step, {two} with {more}, and less than {CROWD_GAIN} times "
                "faster is no gain"
            )
        why = f"{more} jobs on a GPU beat {count}: {two} against {one} per step"
        count, fastest = more, shared
    return count, why


def memory_share(total: int, jobs: int) -> float:
    """Return the largest share of a GPU's memory for the tensors of one of `jobs` jobs.

    Their contexts are outside it. So a job that grows runs out of memory itself, instead of the
    others. Jobs of different models on one GPU are at most as many as the smallest `jobs` of them:
    together they never exceed it.

    Examples
    --------
    >>> memory_share(8 << 30, 1), memory_share(8 << 30, 4)
    (1.0, 0.1875)
    """
    if jobs == 1 or total <= 0:
        return 1.0
    return max(0.0, 1 / jobs - GPU_CONTEXT_BYTES / total)
