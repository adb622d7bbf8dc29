"""Whether a plan can be carried out here: processes, parts of the samples, memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asynckfold.errors import Problem
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.trainer_params import KINDS
from asynckfold.system.units import MIB, gibibytes, named_node


def process_problems(
    draft: Plan,
    folds: Sequence[Fold],
    held: bool,
    devices: Any,
    why_no_gpu: str,
) -> Iterator[Problem]:
    """Yield why a job cannot train with several processes here."""
    if draft.params.processes == 1 and not draft.params.on_gpu:
        return
    if draft.params.on_gpu and draft.device == "cpu":
        remedy = "see `asynckfold doctor`"
        if devices == "cpu":
            remedy = "pass devices='auto' (`asynckfold doctor` explains)"
        yield Problem(
            "a process of the kind 'gpu' needs a GPU",
            f"{draft.params.by_kind}, and none: {why_no_gpu}",
            f"Leave the kind 'gpu' out, or {remedy}.",
        )
    elif draft.device != "cpu" and not draft.params.on_gpu:
        yield Problem(
            "the processes of a job train on CPUs only, except the last ones of averaging",
            f"processes={draft.params.processes}, and a GPU",
            "Pass devices='auto', or trainer='averaging' with processes, partition_size or "
            "epochs_per_round of the kinds 'cpu' and 'gpu'.",
        )
    if not held and draft.params.processes > 1:
        yield Problem(
            "processes > 1 requires samples that are held in memory",
            "a dataset that is read sample by sample",
            "Pass processes=1, or arrays.",
        )
    count, size, parts = draft.params.processes, draft.batch_size, draft.params.partition_size
    least = min(len(fold.train) for fold in folds)
    if draft.params.trainer == "allreduce" and min(size, least) < count:
        yield Problem(
            "each process must have a sample of each batch",
            f"batch_size={size} of {least} samples for processes={count}",
            "Pass a greater batch_size, or fewer processes.",
        )
    elif draft.params.trainer != "allreduce" and not parts and least < count * size:
        yield Problem(
            "the samples of a process must make a batch",
            f"{least} samples for processes={count} and batch_size={size}",
            f"Pass batch_size={max(1, least // count)} or less, or fewer processes.",
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


def precision_problems(draft: Plan) -> Iterator[Problem]:
    """Yield why jobs cannot compute in the requested data type."""
    if draft.params.precision == "fp16" and draft.device == "cpu":
        yield Problem(
            "precision='fp16' needs a GPU",
            "jobs on cores",
            "Pass precision='bf16' or 'fp32'; `asynckfold doctor` tells which GPUs are there.",
        )


def part_problems(draft: Plan, folds: Sequence[Fold]) -> Iterator[Problem]:
    """Yield why the training fold cannot be divided into parts of these sizes."""
    size, least = draft.batch_size, min(len(fold.train) for fold in folds)
    params = draft.params
    values = dict(zip(KINDS, (params.partition_size, params.gpu_partition_size), strict=True))
    sizes = {kind: value for kind, value in values.items() if value is not None}
    by_kind = len(sizes) == len(KINDS)
    # The remedy corrects the sizes of both kinds at once.
    fitting = {kind: min(max(value, size), least) for kind, value in sizes.items()}
    for kind, value in sizes.items():
        received = f"partition_size={value}" + (f" of the kind {kind!r}" if by_kind else "")
        if value < size:
            yield Problem(
                "the part of a process must make a batch",
                f"{received} and batch_size={size}",
                f"Pass partition_size={fitting if by_kind else f'{size} or more'}, or "
                f"batch_size={value} or less.",
            )
        if value > least:
            yield Problem(
                "the part of a process must not exceed the training fold",
                f"{received} of {least} samples",
                f"Pass partition_size={fitting if by_kind else f'{least} or less'}, and "
                "epochs_per_round for several passes.",
            )


def room_problems(
    expected: Mapping[str, int],
    most: int | None,
    workers: int,
    together: Mapping[str, int] | None = None,
) -> Iterator[Problem]:
    """Yield the models for which `max_memory` is too little.

    Parameters
    ----------
    expected : Mapping of str to int
        Estimated bytes of a job, by model.
    most : int or None
        Limit on the bytes of all running jobs and their workers.
    workers : int
        Bytes of the workers of a job or a group.
    together : Mapping of str to int, optional
        Size of the largest fusion group, by model, for fused models.
    """
    if most is None:
        return
    for model, count in (together or {}).items():
        size = count * expected[model] + workers
        if expected[model] + workers <= most < size:
            yield Problem(
                "max_memory must be enough for a fusion group",
                f"{gibibytes(most, 2)}, and {gibibytes(size, 2)} expected for "
                f"{count} jobs of {model}",
                f"Pass max_memory='{math.ceil(size / MIB)}MiB' or more, or fuse fewer.",
            )
    for model, size in expected.items():
        if (size := size + workers) > most:
            yield Problem(
                "max_memory must be enough for one job of each model",
                f"{gibibytes(most, 2)}, and {gibibytes(size, 2)} expected for a job of {model}",
                f"Pass max_memory='{math.ceil(size / MIB)}MiB' or more, or leave {model} out.",
            )
