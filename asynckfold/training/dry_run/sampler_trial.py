"""The first epochs of each fold by the user's `sampler`, and the rules that it must keep."""

from __future__ import annotations

import numpy as np

from asynckfold.data.batches import Batches
from asynckfold.errors import refuse
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run.checks import Refused
from asynckfold.training.dry_run.misfit import trying
from asynckfold.training.sampling import BALANCED, epoch_samples, length_problems


def check(bundle: Bundle, data: Batches) -> None:
    """Refuse a sampler that breaks a rule on a fold.

    Raises
    ------
    Refused
        It raises, gives no weights or places, or other draws from the same seed.
    """
    sampler = bundle.recipe.sampler
    if sampler is None:
        return
    objective = bundle.plan.objective_of("")
    if isinstance(sampler, str) and not objective.is_classes:
        raise Refused(
            f"sampler={BALANCED!r} needs one class for each sample",
            f"targets of kind {objective.kind}",
            "Pass weights, one for each sample.",
        )
    is_array = not (isinstance(sampler, str) or callable(sampler))
    if is_array and np.shape(sampler) != (data.n_samples,):
        raise Refused(
            "weights of a sampler must be one for each sample of the data set",
            f"shape {np.shape(sampler)} for {data.n_samples} samples",
            "Pass an array of that length, in the data set's order, or a function of the targets "
            "of the training fold.",
        )
    for fold in bundle.folds:
        rule = "sampler must work on the targets of each training fold"
        with trying(rule, "It gets a tensor, with a class as its index."):
            first, again, second = (
                epoch_samples(sampler, data, fold.fitted, 0, epoch) for epoch in (0, 0, 1)
            )
            refuse(length_problems(len(first), len(second)))
        if not np.array_equal(first, again):
            raise Refused(
                "sampler must give the same draws from the same seed",
                "other draws at the second call",
                "Draw from the global generators of torch, NumPy and random, or from a generator "
                "attribute, which are seeded for each epoch.",
            )
