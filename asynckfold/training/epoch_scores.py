"""What a job finds on samples at the end of an epoch: outputs, losses, accuracy.

Where the plan scores by batch, no outputs of more than a batch are held: loss and accuracy come
from those of batches, and a last pass over the held-out fold accumulates the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asynckfold.data.device_copies import fetched_together
from asynckfold.jobs.folds import Indices
from asynckfold.training import evaluation
from asynckfold.training.fold_criterion import as_given
from asynckfold.training.losses import adds_up, classifies, mean_loss, weights
from asynckfold.training.own_validation import measured
from asynckfold.training.stopwatch import mark, seconds_between

Training = Any
"""A `training_run.Training`, which lies above."""


class Diverged(Exception):  # noqa: N818
    """The loss became infinite or NaN, or an output NaN."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Loss and accuracy on some samples (n,), and the outputs (n, ...) that a run may keep.

    No outputs where the plan scores by batch; `has_nan` is whether one of them is NaN.
    """

    loss: float
    accuracy: float | None
    has_nan: bool
    outputs: npt.NDArray[np.float32] | None = None


def evaluate(training: Training, indices: Indices) -> Evaluation:
    """Return what a model says of samples (n,); leaves evaluation mode on."""
    return numbers(training, indices, fetched_together(evaluated(training, indices)))


def evaluated(training: Training, indices: Indices) -> list[torch.Tensor]:
    """Return what `evaluate` needs as tensors, on the device. It waits for nothing.

    Outputs, loss, and the accuracy if there is one; or, by batch, the figures of batches, and how
    much each sample counts if not equally.
    """
    with evaluation.evaluating(training):
        if training.bundle.plan.by_batch:
            return [training.figures_of(indices), *_counts(training, indices)]
        outputs = training.outputs_on(indices)
        targets = training.data.targets_of(indices)
        found = evaluation.loss_and_accuracy(
            outputs, targets, training.criterion, training.objective, training.like
        )
        return [outputs.float(), *found]


def numbers(training: Training, indices: Indices, found: Sequence[torch.Tensor]) -> Evaluation:
    """Return what `evaluated` returned as numbers; a loss that sums is divided by the samples."""
    if training.bundle.plan.by_batch:
        return _of_batches(training, len(indices), *(item.numpy() for item in found))
    outputs, loss, *accuracy = found
    divisor = len(outputs) if adds_up(training.criterion, training.bundle.plan) else 1
    return Evaluation(
        float(loss) / divisor,
        float(accuracy[0]) if accuracy else None,
        bool(outputs.isnan().any()),
        outputs.numpy(),
    )


def _of_batches(
    training: Training,
    count: int,
    figures: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64] | None = None,
) -> Evaluation:
    """Join the figures of batches, see `evaluation.figures_of`."""
    losses, right, judged, nans = figures.T
    bounds = evaluation.batch_bounds(count, training.params.eval_batch_size)
    if counts is not None:
        # A batch of nothing but ignored pixels has a loss of 0 / 0.
        is_counted = np.array([counts[low:high].any() for low, high in bounds])
        losses = np.where(is_counted, losses, 0.0)
    loss = mean_loss(training.criterion, training.bundle.plan, losses, bounds, counts)
    accuracy = float(right.sum() / judged.sum()) if judged.any() else None
    return Evaluation(loss, accuracy, bool(nans.any()))


def accumulate_scores(training: Training) -> dict[str, float]:
    """Return the scores of the held-out fold, accumulated by batch; nothing if not by batch."""
    make = training.bundle.accumulators.get(training.task.job.model)
    if make is None:
        return {}
    accumulator = make()
    with evaluation.evaluating(training):
        columns = training.objective.columns
        for targets, outputs in training.batches_of(training.valid):
            rows = outputs if columns is None else columns.join(outputs)
            accumulator.update(targets.cpu().numpy(), rows.float().cpu().numpy())
    return dict(accumulator.scores())


def is_lost(training: Training, loss: float) -> bool:
    """Whether the loss of the held-out fold is not finite, though something computes it."""
    own = training.own_validation
    computed = as_given(training.criterion) is not None or (own is not None and own.has_loss)
    return computed and not np.isfinite(loss)


def inner_metrics(training: Training) -> dict[str, float]:
    """Return loss and accuracy on the part that the fold sets aside; nothing without one.

    Raises
    ------
    Diverged
        The loss is not finite.
    """
    if not training.bundle.folds[0].inner_valid.size:
        return {}
    found = evaluate(training, training.inner_valid)
    if not np.isfinite(found.loss):
        epoch = training.epoch + 1
        raise Diverged(f"the loss on the inner part became {found.loss} at epoch {epoch}")
    measures = {"inner_loss": found.loss}
    return measures if found.accuracy is None else measures | {"inner_accuracy": found.accuracy}


def score_again(training: Training) -> None:
    """Evaluate the held-out fold once more, by the weights that callbacks left.

    Raises
    ------
    Diverged
        An output is NaN, or the loss is not finite.
    """
    began = mark(training.device)
    found = evaluate(training, training.valid)
    training.outputs = found.outputs
    valid_loss, _ = measured(training, found.loss)
    training.score_seconds = seconds_between(began, mark(training.device))
    if found.has_nan:
        raise Diverged("an output on the held-out fold became nan by the weights of a callback")
    if is_lost(training, valid_loss):
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
    return [] if training.own_step is not None else _counts(training, training.order)


def _counts(training: Training, indices: Indices | torch.Tensor) -> list[torch.Tensor]:
    criterion = training.criterion
    if adds_up(criterion, training.bundle.plan) or not classifies(criterion):
        return []
    targets = training.data.targets_of(indices)
    found = weights(criterion, targets, waits=targets.is_cpu)
    return [] if found is None else [found]
