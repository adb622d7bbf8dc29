"""Outputs, loss and accuracy of a model on samples that it does not learn from.

::

    evaluate ── outputs_on: batches, in order ── loss and accuracy of all samples at once
                     └─ of a job on several processes, each does some of the batches
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.jobs.criteria import PROBABILITIES, TRANSFORMED, UNKNOWN
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.objective import MULTICLASS, REGRESSION, Objective
from asynckfold.training.losses import adds_up
from asynckfold.training.precision import outputs_of

if TYPE_CHECKING:
    from asynckfold.training.training_run import Training


def evaluate(
    training: Training, indices: Indices
) -> tuple[npt.NDArray[np.float32], float, float | None]:
    """Evaluate the model in hand; it is left in evaluation mode.

    Parameters
    ----------
    training : Training
        Has the model, the samples and the criterion.
    indices : ndarray of int64, shape (n,)
        Sample numbers; one at least.

    Returns
    -------
    outputs : ndarray of float32, shape (n, ...)
        In the order of `indices`.
    loss : float
        The criterion of all outputs at once; their mean, where it sums.
    accuracy : float or None
        Share of the samples whose class, or whose labels all, the outputs say; None for
        regression, and where only the user's `output_transform` tells.
    """
    set_mode(training, train=False)
    # Not inference_mode: what a model keeps of such a pass could not be trained with afterwards.
    with torch.no_grad():
        found = training.outputs_on(indices)
        wanted = training.data.targets_of(indices)
        loss = float(training.criterion(found, wanted))
        if adds_up(training.criterion, training.bundle.plan):
            loss /= len(indices)
        asked = training.bundle.plan.objective_of(training.task.job.model)
        hits = right(asked, found, wanted)
        accuracy = None if hits is None else float(hits.double().mean())
    return found.float().cpu().numpy(), loss, accuracy


def right(asked: Objective, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    """Return of which samples (n,) the outputs say the class, or all labels, right.

    None where there are no classes, or where only the user's `output_transform` tells.
    """
    if asked.kind == REGRESSION or asked.scale == TRANSFORMED:
        return None
    if asked.kind == MULTICLASS:
        return outputs.argmax(1) == targets
    if asked.scale == UNKNOWN:
        return None
    said = outputs > (0.5 if asked.scale == PROBABILITIES else 0)
    wanted = targets > (0 if asked.signs else 0.5)
    return (said.reshape(wanted.shape) == wanted).reshape(len(wanted), -1).all(dim=1)


def outputs_on(training: Training, indices: Indices, beat: Callable[[], None]) -> torch.Tensor:
    """Return outputs (n, ...) on samples (n,), in batches; `beat` is called after each of them."""
    params = training.params
    outputs = []
    for low in range(0, len(indices), params.eval_batch_size):
        rows = torch.from_numpy(indices[low : low + params.eval_batch_size])
        outputs.append(outputs_of(training.model, training.data.eval(rows)[0], params.precision))
        beat()
    return torch.cat(outputs)


def shares(count: int, size: int, ranks: int) -> list[slice]:
    """Divide samples among processes, whole batches to each, almost equally many.

    Parameters
    ----------
    count : int
        Samples.
    size : int
        Of a batch.
    ranks : int
        Processes; where there are fewer batches, the last ones get nothing.

    Examples
    --------
    >>> shares(1200, 256, 2)
    [slice(0, 512, None), slice(512, 1200, None)]
    >>> shares(300, 256, 3)
    [slice(0, 256, None), slice(256, 300, None), slice(300, 300, None)]
    """
    batches = -(-count // size)
    busy = max(1, min(ranks, batches))
    edges = [min(count, size * (batches * min(rank, busy) // busy)) for rank in range(ranks + 1)]
    return [slice(low, high) for low, high in pairwise(edges)]


def set_mode(training: Training, *, train: bool) -> None:
    """Set the mode of model and criterion."""
    training.model.train(train)
    if isinstance(training.criterion, nn.Module):
        training.criterion.train(train)
