"""Outputs, loss and accuracy of a model in evaluation mode.

::

    evaluate ── outputs_on: batches, in order ── loss and accuracy of all samples at once
                   └─ of a job on several processes, each computes a share of the batches
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.jobs.criteria import PROBABILITIES, TRANSFORMED, UNKNOWN
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.objective import MASKS, MULTICLASS, REGRESSION, SEGMENTATION, Objective
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.precision import outputs_of


def loss_and_accuracy(
    found: torch.Tensor, wanted: torch.Tensor, criterion: Any, objective: Objective
) -> list[torch.Tensor]:
    """Return the loss of all outputs (n, ...) at once, and the accuracy, in float64.

    No accuracy for regression, and if only the user's `output_transform` knows the classes.
    """
    loss, hits = criterion(found, wanted), right(objective, found, wanted)
    numbers = [loss] if hits is None else [loss, hits.double().mean()]
    return [torch.as_tensor(number, dtype=torch.float64) for number in numbers]


def right(
    objective: Objective, outputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor | None:
    """Return which samples (n,), or pixels (m,), have their class, or all labels, predicted right.

    Pixels that are ignored are left out. None without classes, or if only the user's
    `output_transform` knows them.
    """
    if objective.kind == REGRESSION or objective.scale == TRANSFORMED:
        return None
    if objective.kind == MULTICLASS:
        return outputs.argmax(1) == targets
    if objective.kind == SEGMENTATION:
        return (outputs.argmax(1) == targets)[targets != objective.ignore_index]
    if objective.scale == UNKNOWN:
        return None
    positive = outputs > (0.5 if objective.scale == PROBABILITIES else 0)
    wanted = targets > (0 if objective.signs else 0.5)
    if objective.kind == MASKS:
        return (positive == wanted).flatten()
    return (positive.reshape(wanted.shape) == wanted).reshape(len(wanted), -1).all(dim=1)


def outputs_on(
    model: nn.Module,
    data: Batches,
    indices: Indices,
    params: TrainerParams,
    beat: Callable[[], None],
) -> torch.Tensor:
    """Return outputs (n, ...) on samples (n,), batch by batch; call `beat` after each."""
    outputs, size, count = [], params.eval_batch_size, len(indices)
    ordered = data.ordered(indices, training=False)
    places = [(low, min(low + size, count)) for low in range(0, count, size)]
    for (low, high), following in zip_longest(places, places[1:]):
        inputs, _ = ordered.batch(low, high, following)
        outputs.append(outputs_of(model, inputs, params.precision))
        beat()
    return torch.cat(outputs)


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


def set_mode(model: nn.Module, criterion: Any, *, train: bool) -> None:
    """Set the mode of model and criterion."""
    model.train(train)
    if isinstance(criterion, nn.Module):
        criterion.train(train)
