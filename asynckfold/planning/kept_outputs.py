"""How large the outputs of held-out samples become: whether they are kept, and fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from asynckfold.errors import Problem
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import OutputSample
from asynckfold.jobs.plan import Plan
from asynckfold.system.units import gibibytes

GIB = 1 << 30

MOST_AT_ONCE = 1_000_000_000
"""Bytes of one value in a file of SQLite, by its default limit."""

COPIES = 2
"""How often a job holds the outputs of an evaluation: those of its batches, and all of them joined.
"""


def why_not_kept(
    plan: Plan, folds: Sequence[Fold], samples: Mapping[str, OutputSample], most_gib: float
) -> str:
    """Return why a run keeps no outputs of held-out samples, ``""`` where it does.

    Parameters
    ----------
    plan : Plan
        All jobs.
    folds : sequence of Fold
        Their folds.
    samples : Mapping of str to OutputSample
        Outputs of each model, as the dry run saw them.
    most_gib : float
        How much to keep at most, in GiB.

    Examples
    --------
    >>> import numpy as np
    >>> from asynckfold.jobs.plan import TrainerParams, make_jobs
    >>> folds = [Fold(0, at, np.arange(5), np.arange(5, 1024)) for at in range(2)]
    >>> plan = Plan(
    ...     make_jobs(["A"], ["step"], folds, 0), TrainerParams(), 32, 1, 0, "cpu", ("a",), "d", "f"
    ... )
    >>> seen = {"A": OutputSample(np.zeros((1, 512, 256), np.float32))}
    >>> why_not_kept(plan, folds, seen, 1)
    ''
    >>> why_not_kept(plan, folds, seen, 0.5)
    'they would take 0.995 GiB, more than keep_outputs_gib=0.5'
    """
    counts = {fold.key: len(fold.valid) for fold in folds}
    sizes = [
        4 * counts[job.repeat, job.fold] * samples[job.model].columns
        for job in plan.jobs
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

    Examples
    --------
    >>> import numpy as np
    >>> from dataclasses import replace
    >>> from asynckfold.jobs.trainer_params import TrainerParams
    >>> folds = [Fold(0, 0, np.arange(5), np.arange(5, 1024))]
    >>> params = TrainerParams(eval_batch_size=128)
    >>> plan = Plan((), params, 32, 1, 0, "cpu", ("a",), "d", "f")
    >>> seen = {"A": OutputSample(np.zeros((1, 512, 256), np.float32))}
    >>> held_bytes(plan, folds, seen)["A"] // 2**20
    1019
    >>> held_bytes(replace(plan, by_batch=True), folds, seen)["A"] // 2**20
    128
    """
    most = max((max(len(fold.valid), len(fold.inner_valid)) for fold in folds), default=0)
    rows = min(most, plan.params.eval_batch_size) if plan.by_batch else most
    return {model: 4 * COPIES * rows * sample.columns for model, sample in samples.items()}


def outputs_problems(held: Mapping[str, int], total: int, why: str) -> Iterator[Problem]:
    """Yield the models whose outputs do not fit in `total` bytes of memory.

    `why` names the scores that need all outputs of a fold at once, if any.

    Examples
    --------
    >>> print(*outputs_problems({"A": 5 << 30}, 4 << 30, "roc_auc"))
    the outputs of a held-out fold must fit in memory: received 5.0 GiB for model A, of 4.0 GiB. \
roc_auc needs them all at once: score by metrics of torchmetrics, which get a batch at a time, or \
pass more folds.
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
