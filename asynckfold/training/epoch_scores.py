"""What a job finds on samples at the end of an epoch: outputs, losses, accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asynckfold.data.device_copies import fetched_together
from asynckfold.jobs.folds import Indices
from asynckfold.training import evaluation
from asynckfold.training.losses import adds_up, classifies, weights
from asynckfold.training.own_validation import measured
from asynckfold.training.stopwatch import mark, seconds_between

Training = Any
"""A `training_run.Training`, which lies above."""


class Diverged(Exception):  # noqa: N818
    """The loss became infinite or NaN, or an output NaN."""


def evaluate(
    training: Training, indices: Indices
) -> tuple[npt.NDArray[np.float32], float, float | None]:
    """Return outputs (n, ...) on samples (n,), loss and accuracy; leaves evaluation mode on."""
    return numbers(training, fetched_together(evaluated(training, indices)))


def evaluated(training: Training, indices: Indices) -> list[torch.Tensor]:
    """Return what `evaluate` returns as tensors, on the device; the accuracy only if there is one.

    It waits for nothing.
    """
    evaluation.set_mode(training.model, training.criterion, train=False)
    # Not inference_mode: a tensor that the model keeps from it could not be trained with later.
    with torch.no_grad():
        outputs = training.outputs_on(indices)
        targets = training.data.targets_of(indices)
        objective = training.bundle.plan.objective_of(training.task.job.model)
        found = evaluation.loss_and_accuracy(outputs, targets, training.criterion, objective)
        return [outputs.float(), *found]


def numbers(
    training: Training, found: Sequence[torch.Tensor]
) -> tuple[npt.NDArray[np.float32], float, float | None]:
    """Return what `evaluated` returned as numbers; a loss that sums is divided by the samples."""
    outputs, loss, *accuracy = found
    divisor = len(outputs) if adds_up(training.criterion, training.bundle.plan) else 1
    return outputs.numpy(), float(loss) / divisor, float(accuracy[0]) if accuracy else None


def inner_metrics(training: Training) -> dict[str, float]:
    """Return loss and accuracy on the part that the fold sets aside; nothing without one.

    Raises
    ------
    Diverged
        The loss is not finite.
    """
    if not training.bundle.fold_of(training.task.job).inner_valid.size:
        return {}
    _, loss, accuracy = evaluate(training, training.inner_valid)
    if not np.isfinite(loss):
        raise Diverged(f"the loss on the inner part became {loss} at epoch {training.epoch + 1}")
    found = {"inner_loss": loss}
    return found if accuracy is None else {**found, "inner_accuracy": accuracy}


def score_again(training: Training) -> None:
    """Evaluate the held-out fold once more, by the weights that callbacks left.

    Raises
    ------
    Diverged
        An output is NaN, or the loss is not finite.
    """
    began = mark(training.device)
    training.outputs, valid_loss, _ = evaluate(training, training.valid)
    valid_loss, _ = measured(training, valid_loss)
    training.score_seconds = seconds_between(began, mark(training.device))
    if np.isnan(training.outputs).any():
        raise Diverged("an output on the held-out fold became nan by the weights of a callback")
    if not np.isfinite(valid_loss):
        raise Diverged(f"the loss on the held-out fold became {valid_loss} by those of a callback")


def check_finite(training: Training, losses: torch.Tensor) -> None:
    """Raise `Diverged` unless all losses (n_batches,) of the epoch are finite."""
    found = losses.numpy()
    if not np.isfinite(found).all():
        first = int(np.flatnonzero(~np.isfinite(found))[0])
        raise Diverged(
            f"the loss became {found[first]} at epoch {training.epoch + 1}, batch {first + 1} "
            f"(learning rate {training.lr:g})"
        )


def counts_of(training: Training) -> list[torch.Tensor]:
    """Return how much each sample of the epoch (n,) counts, on the device; nothing if equally."""
    criterion = training.criterion
    if training.own_step is not None or adds_up(criterion, training.bundle.plan):
        return []
    if not classifies(criterion):
        return []
    targets = training.data.targets_of(training.order)
    found = weights(criterion, targets, waits=targets.is_cpu)
    return [] if found is None else [found]
