"""Whether a run keeps the outputs of its held-out samples: by how large they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import OutputSample
from asynckfold.jobs.plan import Plan

GIB = 1 << 30

MOST_AT_ONCE = 1_000_000_000
"""Bytes of one value in a file of SQLite, by its default limit."""


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
    return ""
