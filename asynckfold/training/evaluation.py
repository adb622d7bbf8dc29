"""Outputs, loss and accuracy of a model in evaluation mode, and what a job makes of them.

::

    evaluate ─┬─ outputs_of_batches, in order ── loss and accuracy of all samples at once
              └─ figures_of: batches, in order ── loss and accuracy of each batch
                    where the plan scores by batch: no more than a batch of outputs is held

Of a job on several processes, each computes a share of the batches. What the dry run saw an
evaluation change in the model is restored after each, see `StateSnapshot`. Where the plan scores by
batch, a last pass over the held-out fold accumulates the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.data.batches import Batches, WeightedTargets
from asynckfold.data.device_copies import fetched_together
from asynckfold.data.transforms.trees import tensors_in
from asynckfold.jobs.criteria import PROBABILITIES, TRANSFORMED, UNKNOWN
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.objective import MASKS, MULTICLASS, REGRESSION, SEGMENTATION, Objective
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.schema import Schema
from asynckfold.training import lr_schedules
from asynckfold.training.losses import adds_up, as_given, counts_unequally, mean_loss, weights
from asynckfold.training.model_state import StateSnapshot
from asynckfold.training.optimizers import optimizers_of
from asynckfold.training.stopwatch import mark, seconds_between
from asynckfold.training.target_transform import in_units

if TYPE_CHECKING:
    from asynckfold.training.training_run import Training


def loss_and_accuracy(
    outputs: torch.Tensor, targets: Any, criterion: Any, objective: Objective, like: Any = None
) -> list[torch.Tensor]:
    """Return the loss of all outputs (n, ...) at once, and the accuracy, in float64.

    No accuracy for regression, and if only the user's `output_transform` knows the classes. `like`
    are outputs of a batch, where these are trees. Targets are what `Batches.weighted` returns.
    """
    loss = criterion(objective.as_returned(outputs, like), targets)
    is_weighted = isinstance(targets, WeightedTargets)
    hits = right(objective, outputs, targets.targets if is_weighted else targets)
    numbers = [loss]
    if hits is not None and is_weighted:
        numbers.append(hits.double() @ targets.weights / targets.weights.sum())
    elif hits is not None:
        numbers.append(hits.double().mean())
    return [torch.as_tensor(number, dtype=torch.float64) for number in numbers]


def right(objective: Objective, outputs: Any, targets: torch.Tensor) -> torch.Tensor | None:
    """Return which samples (n,), or pixels (m,), have their class, or all labels, predicted right.

    Pixels that are ignored are left out. None without classes, or if only the user's
    `output_transform` knows them.
    """
    if objective.kind == REGRESSION or objective.scale == TRANSFORMED or objective.outputs:
        return None
    scores: torch.Tensor = outputs
    if objective.kind == MULTICLASS:
        return scores.argmax(1) == targets
    if objective.kind == SEGMENTATION:
        return (scores.argmax(1) == targets)[targets != objective.ignore_index]
    if objective.scale == UNKNOWN:
        return None
    positive = scores > (0.5 if objective.scale == PROBABILITIES else 0)
    wanted = targets > (0 if objective.signs else 0.5)
    if objective.kind == MASKS:
        return (positive == wanted).flatten()
    return (positive.reshape(wanted.shape) == wanted).reshape(len(wanted), -1).all(dim=1)


def batch_bounds(count: int, size: int) -> list[tuple[int, int]]:
    """Return where each batch of an evaluation lies among `count` samples."""
    return [(low, min(low + size, count)) for low in range(0, count, size)]


def batches_of(
    forward: Callable[[Any], Any],
    data: Batches,
    indices: Indices,
    size: int,
    beat: Callable[[], None],
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield targets and outputs (b, ...), b ≤ `size`, of samples (n,); call `beat` after each."""
    ordered = data.ordered(indices, training=False)
    places = batch_bounds(len(indices), size)
    for (low, high), following in zip_longest(places, places[1:]):
        inputs, targets = ordered.batch(low, high, following)
        yield targets, forward(inputs)
        beat()


def outputs_of_batches(
    batches: Iterable[tuple[torch.Tensor, Any]],
    columns: Schema | None = None,
    see: Callable[[Any], None] | None = None,
) -> torch.Tensor:
    """Return outputs (n, ...) of batches, see `batches_of`; trees as their columns.

    `see` gets the outputs of each batch.
    """
    parts = []
    for _, outputs in batches:
        parts.append(outputs if columns is None else columns.join(outputs))
        if see is not None:
            see(outputs)
    return torch.cat(parts) if columns is None else columns.stack(parts)


def figures_of(
    batches: Iterable[tuple[torch.Tensor, Any]], criterion: Any, objective: Objective
) -> torch.Tensor:
    """Return loss, right and judged predictions, and whether an output is NaN, of each batch.

    Shape (n_batches, 4), in float64, on the device; nothing is waited for. Predictions are those of
    `right`: none are judged where it returns None. `batches` are targets and outputs.
    """
    figures = []
    for targets, outputs in batches:
        hits, device = right(objective, outputs, targets), targets.device
        judged = torch.zeros(0, dtype=torch.bool, device=device) if hits is None else hits
        nans = [part.isnan().any() for part in tensors_in(outputs)] or [torch.tensor(False)]
        loss, has_nan = criterion(outputs, targets), torch.stack(nans).any()
        numbers = (loss, judged.sum(), torch.ones_like(judged).sum(), has_nan)
        row = [torch.as_tensor(number, device=device).reshape(()).double() for number in numbers]
        figures.append(torch.stack(row))
    return torch.stack(figures)


def shares(count: int, size: int, ranks: int) -> list[slice]:
    """Divide `count` samples among processes, almost equally, in whole batches of `size`.

    With fewer batches than ranks, the last ranks get nothing.
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
def evaluating(training: Training) -> Iterator[None]:
    """Leave a job in evaluation mode, and its model as it was."""
    set_mode(training.model, training.criterion, training.optimizer, train=False)
    kept = kept_of(training.bundle.plan, training.task.job, training.model)
    try:
        # Not inference_mode: a tensor that the model keeps from it could not be trained with later.
        with torch.no_grad():
            yield
    finally:
        kept.restore()


def kept_of(plan: Plan, job: Job, model: nn.Module) -> StateSnapshot:
    """Return the buffers of a job's model, to be restored, where an evaluation changes them."""
    return StateSnapshot(
        model, needed=plan.recipe.get("settings", {}).get(kept_key(job.model), False)
    )


def kept_key(model: str) -> str:
    """Return under which name of its settings a plan says that an evaluation changes a model."""
    return f"{model}: restored after evaluation"


class Divergence(Exception):  # noqa: N818
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
    with evaluating(training):
        if training.bundle.plan.by_batch:
            return [training.figures_of(indices), *_counts(training, indices)]
        outputs = training.outputs_on(indices)
        targets = training.data.weighted(training.data.targets_of(indices), indices)
        judged_by = training.criterion, training.objective, training.like
        return [outputs.float(), *loss_and_accuracy(outputs, targets, *judged_by)]


def numbers(training: Training, indices: Indices, tensors: Sequence[torch.Tensor]) -> Evaluation:
    """Return what `evaluated` returned as numbers; a loss that sums is divided by the samples."""
    if training.bundle.plan.by_batch:
        return _of_batches(training, len(indices), *(item.numpy() for item in tensors))
    outputs, loss, *accuracy = tensors
    divisor = len(outputs) if adds_up(training.criterion, training.bundle.plan) else 1
    inverse = training.data.inverse
    return Evaluation(
        float(loss) / divisor,
        float(accuracy[0]) if accuracy else None,
        bool(outputs.isnan().any()),
        outputs.numpy() if inverse is None else inverse(outputs.numpy()),
    )


def _of_batches(
    training: Training,
    count: int,
    figures: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64] | None = None,
) -> Evaluation:
    """Join the figures of batches, see `figures_of`."""
    losses, right, judged, nans = figures.T
    bounds = batch_bounds(count, training.params.eval_batch_size)
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
    with evaluating(training):
        columns = training.objective.columns
        batches = training.batches_of(training.valid)
        for targets, outputs in in_units(training.data, training.valid, batches):
            rows = outputs if columns is None else columns.join(outputs)
            accumulator.update(targets.cpu().numpy(), rows.float().cpu().numpy())
    return dict(accumulator.scores())


def measured(training: Training, valid_loss: float) -> tuple[float, dict[str, float]]:
    """Return loss and measures of a job's held-out fold; `valid_loss` where no step returns one."""
    step = training.user_validation
    if step is None:
        return valid_loss, {}
    with evaluating(training):
        loss = step.loss(training.model, training.held_out_batches(), training.epoch)
    return valid_loss if loss is None else loss, step.measures


def check_held_out(training: Training, held_out: Evaluation, loss: float, where: str) -> None:
    """Raise `Divergence` if an output is NaN, or a loss that something computes is not finite."""
    if held_out.has_nan:
        raise Divergence(f"an output on the held-out fold became nan{where}")
    step = training.user_validation
    computed = as_given(training.criterion) is not None or (step is not None and step.has_loss)
    if computed and not np.isfinite(loss):
        raise Divergence(f"the loss on the held-out fold became {loss}{where}")


def inner_metrics(training: Training) -> dict[str, float]:
    """Return loss and accuracy on the part that the fold sets aside; nothing without one."""
    if not training.bundle.folds[0].inner_valid.size:
        return {}
    inner = evaluate(training, training.inner_valid)
    if not np.isfinite(inner.loss):
        epoch = training.epoch + 1
        raise Divergence(f"the loss on the inner part became {inner.loss} at epoch {epoch}")
    measures = {"inner_loss": inner.loss}
    return measures if inner.accuracy is None else measures | {"inner_accuracy": inner.accuracy}


def step_lr_schedule(training: Training, inner_loss: float | None = None) -> None:
    """Step the LR schedule at the end of an epoch, with the inner-validation loss if it needs one.

    A schedule that is stepped after each batch stays as it is.
    """
    if lr_schedules.needs_metric(training.lr_schedule):
        if inner_loss is None:
            inner_loss = evaluate(training, training.inner_valid).loss
        training.lr_schedule.step(inner_loss)
    elif training.params.lr_step == "epoch":
        training.lr_schedule.step()


def score_again(training: Training) -> None:
    """Evaluate the held-out fold once more, by the weights that callbacks left."""
    began = mark(training.device)
    held_out = evaluate(training, training.valid)
    training.outputs = held_out.outputs
    valid_loss, _ = measured(training, held_out.loss)
    training.score_seconds = seconds_between(began, mark(training.device))
    check_held_out(training, held_out, valid_loss, " by the weights of a callback")


def check_finite(training: Training, losses: torch.Tensor) -> None:
    """Raise `Divergence` unless all losses (n_batches,) of the epoch are finite."""
    values = losses.numpy()
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise Divergence(
            f"the loss became {values[first]} at epoch {training.epoch + 1}, batch {first + 1} "
            f"(learning rate {training.lr:g})"
        )


def counts_of(training: Training) -> list[torch.Tensor]:
    """Return how much each sample of the epoch (n,) counts, on the device; nothing if equally."""
    return [] if training.user_step is not None else _counts(training, training.order)


def _counts(training: Training, indices: Indices | torch.Tensor) -> list[torch.Tensor]:
    criterion = training.criterion
    if adds_up(criterion, training.bundle.plan) or not counts_unequally(criterion):
        return []
    targets = training.data.targets_of(indices)
    weighted = training.data.weighted(targets, indices)
    counts = weights(criterion, weighted, waits=targets.is_cpu)
    return [] if counts is None else [counts]
