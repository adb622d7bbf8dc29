"""Outputs, loss and accuracy of a model in evaluation mode.

::

    evaluate ─┬─ outputs_on: batches, in order ── loss and accuracy of all samples at once
              └─ figures_of: batches, in order ── loss and accuracy of each batch
                    where the plan scores by batch: no more than a batch of outputs is held

Of a job on several processes, each computes a share of the batches. What the dry run saw an
evaluation change in the model is restored after each, see `Kept`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.data.transforms import tensors_in
from asynckfold.jobs.columns import Columns
from asynckfold.jobs.criteria import PROBABILITIES, TRANSFORMED, UNKNOWN
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.objective import MASKS, MULTICLASS, REGRESSION, SEGMENTATION, Objective
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.model_state import Kept
from asynckfold.training.precision import outputs_of
from asynckfold.training.several_optimizers import optimizers_of


def loss_and_accuracy(
    found: torch.Tensor,
    wanted: torch.Tensor,
    criterion: Any,
    objective: Objective,
    like: Any = None,
) -> list[torch.Tensor]:
    """Return the loss of all outputs (n, ...) at once, and the accuracy, in float64.

    No accuracy for regression, and if only the user's `output_transform` knows the classes. `like`
    are outputs of a batch, where these are trees.
    """
    loss, hits = criterion(objective.given(found, like), wanted), right(objective, found, wanted)
    numbers = [loss] if hits is None else [loss, hits.double().mean()]
    return [torch.as_tensor(number, dtype=torch.float64) for number in numbers]


def right(objective: Objective, outputs: Any, targets: torch.Tensor) -> torch.Tensor | None:
    """Return which samples (n,), or pixels (m,), have their class, or all labels, predicted right.

    Pixels that are ignored are left out. None without classes, or if only the user's
    `output_transform` knows them.
    """
    if objective.kind == REGRESSION or objective.scale == TRANSFORMED or objective.outputs:
        return None
    found: torch.Tensor = outputs
    if objective.kind == MULTICLASS:
        return found.argmax(1) == targets
    if objective.kind == SEGMENTATION:
        return (found.argmax(1) == targets)[targets != objective.ignore_index]
    if objective.scale == UNKNOWN:
        return None
    positive = found > (0.5 if objective.scale == PROBABILITIES else 0)
    wanted = targets > (0 if objective.signs else 0.5)
    if objective.kind == MASKS:
        return (positive == wanted).flatten()
    return (positive.reshape(wanted.shape) == wanted).reshape(len(wanted), -1).all(dim=1)


def batch_bounds(count: int, size: int) -> list[tuple[int, int]]:
    """Return where each batch of an evaluation lies among `count` samples.

    Examples
    --------
    >>> batch_bounds(300, 256)
    [(0, 256), (256, 300)]
    """
    return [(low, min(low + size, count)) for low in range(0, count, size)]


def batches_of(
    model: nn.Module,
    data: Batches,
    indices: Indices,
    params: TrainerParams,
    beat: Callable[[], None],
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield targets and outputs (b, ...) of samples (n,) by batches; call `beat` after each."""
    ordered = data.ordered(indices, training=False)
    places = batch_bounds(len(indices), params.eval_batch_size)
    for (low, high), following in zip_longest(places, places[1:]):
        inputs, targets = ordered.batch(low, high, following)
        yield targets, outputs_of(model, inputs, params.precision)
        beat()


def outputs_on(
    model: nn.Module,
    data: Batches,
    indices: Indices,
    params: TrainerParams,
    beat: Callable[[], None],
    columns: Columns | None = None,
    see: Callable[[Any], None] | None = None,
) -> torch.Tensor:
    """Return outputs (n, ...) on samples (n,), see `batches_of`; trees as their columns.

    `see` gets the outputs of each batch.
    """
    parts = []
    for _, found in batches_of(model, data, indices, params, beat):
        parts.append(found if columns is None else columns.join(found))
        if see is not None:
            see(found)
    return torch.cat(parts) if columns is None else columns.stack(parts)


def figures_of(
    batches: Iterable[tuple[torch.Tensor, Any]], criterion: Any, objective: Objective
) -> torch.Tensor:
    """Return loss, right and judged predictions, and whether an output is NaN, of each batch.

    Shape (n_batches, 4), in float64, on the device; nothing is waited for. Predictions are those of
    `right`: none are judged where it returns None. `batches` are targets and outputs.
    """
    found = []
    for targets, outputs in batches:
        hits, device = right(objective, outputs, targets), targets.device
        judged = torch.zeros(0, dtype=torch.bool, device=device) if hits is None else hits
        nans = [part.isnan().any() for part in tensors_in(outputs)] or [torch.tensor(False)]
        numbers = [
            criterion(outputs, targets),
            judged.sum(),
            torch.ones_like(judged).sum(),
            torch.stack(nans).any(),
        ]
        found.append(
            torch.stack(
                [torch.as_tensor(number, device=device).reshape(()).double() for number in numbers]
            )
        )
    return torch.stack(found)


def shares(count: int, size: int, ranks: int) -> list[slice]:
    """Divide `count` samples among processes, almost equally, in whole batches of `size`.

    With fewer batches than ranks, the last ranks get nothing.

    Examples
    --------
    >>> shares(300, 256, 3)
    [slice(0, 256, None), slice(256, 300, None), slice(300, 300, None)]
    """
    batches = -(-count // size)
    busy = max(1, min(ranks, batches))
    edges = [min(count, size * (batches * min(rank, busy) // busy)) for rank in range(ranks + 1)]
    return [slice(low, high) for low, high in pairwise(edges)]


def set_mode(model: nn.Module, criterion: Any, optimizer: Any = None, *, train: bool) -> None:
    """Set the mode of model and criterion, and of optimizers that have one."""
    model.train(train)
    if isinstance(criterion, nn.Module):
        criterion.train(train)
    for part in filter(has_modes, optimizers_of(optimizer)):
        part.train() if train else part.eval()


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer has other weights for evaluation, as schedule-free ones do.

    See Defazio et al. 2024, arXiv:2405.15682.
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluating(training: Any) -> Iterator[None]:
    """Leave a job in evaluation mode, and its model as it was."""
    set_mode(training.model, training.criterion, training.optimizer, train=False)
    kept = kept_of(training.bundle.plan, training.task.job, training.model)
    try:
        # Not inference_mode: a tensor that the model keeps from it could not be trained with later.
        with torch.no_grad():
            yield
    finally:
        kept.restore()


def kept_of(plan: Plan, job: Job, model: nn.Module) -> Kept:
    """Return the buffers of a job's model, to be restored, where an evaluation changes them."""
    return Kept(model, needed=plan.recipe.get("settings", {}).get(kept_key(job.model), False))


def kept_key(model: str) -> str:
    """Return under which name of its settings a plan says that an evaluation changes a model."""
    return f"{model}: restored after evaluation"
