"""Some batches by the user's `collate_fn`, and the rules that they must keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asynckfold.data.batches import Batches
from asynckfold.data.collation import structure
from asynckfold.data.transforms import leaves_by_path, seeded
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run.checks import Refused
from asynckfold.training.dry_run.misfit import trying

MOST = 256
"""Samples of a batch that are tried: an evaluation may take all samples at once."""

FIRST = 8
"""Batches that are tried besides the last one."""


def check(bundle: Bundle, data: Batches) -> None:
    """Refuse a `collate_fn` that breaks a rule on the first fold: some batches and the last.

    Raises
    ------
    Refused
        It raises, gives another structure, other targets, or other inputs for the same samples.
    """
    if data.collation is None:
        return
    fold, size = bundle.folds[0], bundle.plan.batch_size
    rest = len(fold.fitted) % size or size
    rows = [fold.fitted[low : low + size] for low in range(0, FIRST * size, size)]
    rows.append(fold.fitted[-rest:])
    most, first = min(MOST, bundle.plan.params.eval_batch_size), ""
    batches = [partial(_inputs, data.train, part[:MOST], 0, 0) for part in rows if len(part)]
    batches.append(partial(_inputs, data.eval, fold.valid[:most]))
    for make in batches:
        inputs = _made(make, 0)
        found = structure(inputs)
        first = first or found
        if found != first:
            raise Refused(
                "collate_fn must give batches of one structure",
                f"{first}, and for other samples {found}",
                "Return the same keys, types and dimensions for any samples.",
            )
        if not _same(inputs, _made(make, 1)):
            raise Refused(
                "collate_fn must give the same inputs for the same samples",
                f"other numbers at the second call: {found}",
                "Draw random numbers in train_transform or in a training_step.",
            )


def _inputs(view: Callable[..., Any], *given: Any) -> Any:
    return view(*given)[0]


def _made(make: Callable[[], Any], seed: int) -> Any:
    rule = "collate_fn must make a batch of any samples of the data set"
    remedy = "Try it on [dataset[0], dataset[1]]; classes arrive as their index."
    with trying(rule, remedy), seeded(seed):
        return make()


def _same(one: Any, other: Any) -> bool:
    mine, theirs = (list(leaves_by_path(inputs)[0].values()) for inputs in (one, other))
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)
    # Objects such as a batch of graphs are compared by their type.
    return type(one) is type(other) and (one == other or not isinstance(one, (int, float, str)))
