"""How many jobs of each model share a GPU: one, unless a probe finds two clearly faster.

This changes no bit, so neither a requested number of threads nor another run has a say in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asynckfold.jobs.cost import Cost
from asynckfold.planning.flop_model import OVERTURN
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


def with_gpu_sharing(
    workload: Workload, choice: Choice, probe: Probe | None, place: Path | None
) -> Choice:
    """Complete a choice by the jobs per GPU of the models for which that is open."""
    models = [model for model in workload.models() if model.name not in choice.per_gpu]
    if not models:
        return choice
    found, failures = measured(workload, models, probe, place)
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
    if workload.plan.params.processes > 1:
        # A probe is one process on the GPU; it tells nothing about a job with ranks on cores.
        return {}, {}
    steps = sum(work.steps for model in models for work in model.jobs)
    most = GPU_START_SECONDS + 2 * len(models) * SETTING_SECONDS
    if most > PROBE_SHARE * steps * GPU_STEP_SECONDS / max(1, workload.gpus):
        return {}, {}

    def measure(model: Model, probe: Probe) -> Cost | str | None:
        alone = probe(model.name, 1, 1)
        if failure := failure_in(alone):
            return failure
        if not alone:
            return None
        cost = workload.gathered(model.name, {1: alone})
        pair = probe(model.name, 1, 2)
        timed = len(pair) == 2 and not failure_in(pair)
        return replace(cost, pair_seconds=max(item.step_seconds for item in pair) if timed else 0.0)

    return workload.measured(models, probe, place, measure)


def jobs_per_gpu(cost: Cost) -> tuple[int, str]:
    """Return how many jobs of a model share a GPU, and why.

    One is the rule: processes take turns on a GPU, and several were measured slower. Two share it
    if a probe shows that they take `OVERTURN` times as many steps together.

    Examples
    --------
    >>> jobs_per_gpu(Cost({1: 0.004}, {1: 0.001}, pair_seconds=0.005))
    (2, '2 jobs on a GPU beat 1: 2.5 ms against 4 ms per step')
    >>> jobs_per_gpu(Cost({1: 0.004}, {1: 0.001}, pair_seconds=0.007))
    (1, '1 job on a GPU: 4 ms per step, 3.5 ms with 2, and less than 1.3 times faster is no gain')
    """
    if not cost.pair_seconds:
        return 1, "1 job on a GPU: 2 at once could not be timed"
    alone, shared = cost.step_seconds[1], cost.pair_seconds / 2
    one, two = f"{1000 * alone:.3g} ms", f"{1000 * shared:.3g} ms"
    if alone >= OVERTURN * shared:
        return 2, f"2 jobs on a GPU beat 1: {two} against {one} per step"
    return 1, (
        f"1 job on a GPU: {one} per step, {two} with 2, and less than {OVERTURN} times faster is "
        "no gain"
    )
