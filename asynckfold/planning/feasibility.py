"""Whether a plan can be carried out here: processes, parts of the samples, memory, outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asynckfold.errors import Problem
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import OutputSample
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.trainer_params import KINDS
from asynckfold.system.units import GIB, MIB, gibibytes, named_node

MOST_AT_ONCE = 1_000_000_000
"""Bytes of one value in a file of SQLite, by its default limit."""

COPIES = 2
"""How often a job holds the outputs of an evaluation: those of its batches, and all of them joined.
"""


def plan_problems(
    draft: Plan,
    folds: Sequence[Fold],
    held: bool,
    devices: Any,
    why_no_gpu: str,
    nodes: Mapping[str, int],
) -> Iterator[Problem]:
    """Yield why the plan cannot be carried out; `nodes` are the cores of a cluster by name."""
    yield from process_problems(draft, folds, held, devices, why_no_gpu)
    yield from node_problems(draft, nodes)
    yield from part_problems(draft, folds)


def process_problems(
    draft: Plan, folds: Sequence[Fold], held: bool, devices: Any, why_no_gpu: str
) -> Iterator[Problem]:
    """Yield why a job cannot train with its processes, or in its data type, here."""
    several = draft.params.processes > 1
    if draft.params.on_gpu and draft.device == "cpu":
        remedy = "see `asynckfold doctor`"
        if devices == "cpu":
            remedy = "pass devices='auto' (`asynckfold doctor` explains)"
        yield Problem(
            "a process of the kind 'gpu' needs a GPU",
            f"{draft.params.by_kind}, and none: {why_no_gpu}",
            f"Leave the kind 'gpu' out, or {remedy}.",
        )
    elif several and draft.device != "cpu" and not draft.params.on_gpu:
        yield Problem(
            "the processes of a job train on CPUs only, except the last ones of averaging",
            f"processes={draft.params.processes}, and a GPU",
            "Pass devices='auto', or trainer='averaging' with processes, partition_size or "
            "epochs_per_round of the kinds 'cpu' and 'gpu'.",
        )
    if several and not held:
        yield Problem(
            "processes > 1 requires samples that are held in memory",
            "a dataset that is read sample by sample",
            "Pass processes=1, or arrays.",
        )
    count, size = draft.params.processes, draft.batch_size
    least = min(len(fold.train) for fold in folds)
    shared = draft.params.trainer == "allreduce"
    parts = draft.params.partition_size
    if several and (min(size, least) < count if shared else not parts and least < count * size):
        yield Problem(
            "each process must have a sample of each batch"
            if shared
            else "the samples of a process must make a batch",
            f"{least} samples for processes={count} and batch_size={size}",
            "Pass a greater batch_size, or fewer processes."
            if shared
            else f"Pass batch_size={max(1, least // count)} or less, or fewer processes.",
        )
    if draft.params.precision == "fp16" and draft.device == "cpu":
        yield Problem(
            "precision='fp16' needs a GPU",
            "jobs on cores",
            "Pass precision='bf16' or 'fp32'; `asynckfold doctor` tells which GPUs are there.",
        )


def node_problems(draft: Plan, nodes: Mapping[str, int]) -> Iterator[Problem]:
    """Yield why no node of a cluster can ever hold a job; `nodes` are their cores by name."""
    count, threads = draft.params.processes, draft.threads_per_job
    if not nodes or count * threads <= max(nodes.values()):
        return
    name, cores = max(nodes.items(), key=lambda pair: pair[1])
    received, each = (
        (f"processes={count}", "processes")
        if count > 1
        else (f"{threads} threads", "threads_per_job")
    )
    yield Problem(
        "each job must fit on one node of the cluster",
        f"{received}, and the largest node, {named_node(name)}, has {cores} "
        f"{'core' if cores == 1 else 'cores'}",
        f"Pass {each}={cores} or less, or add a larger node.",
    )


def part_problems(draft: Plan, folds: Sequence[Fold]) -> Iterator[Problem]:
    """Yield why the training fold cannot be divided into parts of these sizes."""
    size, least = draft.batch_size, min(len(fold.train) for fold in folds)
    sizes = (draft.params.partition_size, draft.params.gpu_partition_size)
    for kind, value in zip(KINDS, sizes, strict=True):
        received = f"partition_size={value} of the kind {kind!r}"
        if value is not None and value < size:
            yield Problem(
                "the part of a process must make a batch",
                f"{received} and batch_size={size}",
                f"Pass partition_size={size} or more, or batch_size={value} or less.",
            )
        if value is not None and value > least:
            yield Problem(
                "the part of a process must not exceed the training fold",
                f"{received} of {least} samples",
                f"Pass partition_size={least} or less, and epochs_per_round for several passes.",
            )


def room_problems(
    expected: Mapping[str, int], most: int | None, workers: int, together: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield the models for which `max_memory` is too little.

    `expected` are bytes of a job by model, `most` the limit on all running jobs and their workers,
    `workers` the bytes of the workers of a job or a group, and `together` the jobs of the largest
    fusion group by model.
    """
    for model, one in expected.items() if most is not None else ():
        count = together.get(model, 1)
        if (size := count * one + workers) > (most or 0):
            yield Problem(
                "max_memory must be enough for one job of each model, or one fusion group",
                f"{gibibytes(most or 0, 2)}, and {gibibytes(size, 2)} expected for "
                f"{'a job' if count == 1 else f'{count} jobs'} of {model}",
                f"Pass max_memory='{math.ceil(size / MIB)}MiB' or more, fuse fewer, or leave "
                f"{model} out.",
            )


def why_not_kept(
    plan: Plan, folds: Sequence[Fold], samples: Mapping[str, OutputSample], most_gib: float
) -> str:
    """Return why a run keeps no outputs of held-out samples, ``""`` where it does.

    `samples` are outputs of each model, as the dry run saw them.
    """
    counts = {fold.key: len(fold.valid) for fold in folds}
    sizes = [
        4 * counts[job.key] * samples[job.model].columns
        for job in plan.outer.jobs
        if job.model in samples
    ]
    largest = max(sizes, default=0)
    if largest > MOST_AT_ONCE:
        return f"those of one fold would take {largest / GIB:.3g} GiB, more than a file can hold"
    if sum(sizes) > most_gib * GIB:
        total = f"{sum(sizes) / GIB:.3g} GiB"
        return f"they would take {total}, more than keep_outputs_gib={most_gib:g}"
    return "the run was begun without them" if plan.by_batch else ""


def held_bytes(
    plan: Plan, folds: Sequence[Fold], samples: Mapping[str, OutputSample]
) -> dict[str, int]:
    """Return by model how many bytes of outputs a job holds at once.

    Those of its held-out fold or inner part, or of one batch where the plan scores by batch.
    """
    most = max((max(len(fold.valid), len(fold.inner_valid)) for fold in folds), default=0)
    rows = min(most, plan.params.eval_batch_size) if plan.by_batch else most
    return {model: 4 * COPIES * rows * sample.columns for model, sample in samples.items()}


def outputs_problems(held: Mapping[str, int], total: int, why: str) -> Iterator[Problem]:
    """Yield the models whose outputs do not fit in `total` bytes of memory.

    `why` names the scores that need all outputs of a fold at once, if any.
    """
    for model, size in held.items():
        if size > total:
            yield Problem(
                "the outputs of a held-out fold must fit in memory"
                if why
                else "the outputs of a batch must fit in memory",
                f"{gibibytes(size)} for model {model}, of {gibibytes(total)}",
                f"{why} needs them all at once: score by metrics of torchmetrics, which get a "
                "batch at a time, or pass more folds."
                if why
                else "Pass a smaller eval_batch_size.",
            )
