"""Losses: the criterion of a job, and recorded losses as means over samples.

A job has a copy of the user's criterion, or what the user's factory makes for its fold. The
gradient is that of the criterion itself. The recorded loss of an epoch or an evaluation is the mean
over all samples: a criterion that sums is divided by their number, and batch means are weighted by
batch size. With class weights or an ignored class (`CrossEntropyLoss`, `NLLLoss`), a sample counts
as in the mean of its batch, so that the recorded loss is that of all samples as one batch.

Where samples have weights, both are Σ wᵢcᵢlᵢ / Σ wᵢcᵢ, with that count cᵢ, mostly 1: the criterion
gives the losses of samples by ``reduction="none"``, see `WeightedCriterion`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.data.batches import Batches, WeightedTargets
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.jobs.criteria import Criterion, criterion_of
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.schema import Schema

SUMS = {"loss": "sum over samples"}
"""Recorded in the plan for a criterion that sums."""


class NoLoss(nn.Module):
    """Stands for a criterion where the user's code trains and there is none."""

    def forward(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return NaN: the held-out fold has no loss."""
        return torch.full((), torch.nan, device=targets.device)


_CLASSIFYING = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def adds_up(criterion: Callable[..., Any], plan: Plan) -> bool:
    """Whether a criterion sums over a batch, by its ``reduction`` or the dry run."""
    reduction = getattr(criterion, "reduction", "mean")
    return reduction == "sum" or plan.recipe.items() >= SUMS.items()


def classifies(criterion: object) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Whether it is torch's mean over classes; subclasses may not override `forward`."""
    return (
        isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss))
        and type(criterion).forward in _CLASSIFYING
        and criterion.reduction == "mean"
    )


def counts_unequally(criterion: object) -> bool:
    """Whether samples may count differently in the mean of a batch."""
    return isinstance(criterion, WeightedCriterion) or classifies(criterion)


def weights(
    criterion: Callable[..., Any], targets: Any, *, waits: bool = True
) -> torch.Tensor | None:
    """Return the weight of each sample (n,) in the mean of a batch, in float64; None if equal.

    Unless it `waits` for a device, weights that happen to be equal are returned too.
    """
    if isinstance(criterion, WeightedCriterion):
        return criterion.counts(targets)
    return class_weights(criterion, targets, waits=waits) if classifies(criterion) else None


def class_weights(
    criterion: nn.CrossEntropyLoss | nn.NLLLoss, targets: torch.Tensor, *, waits: bool
) -> torch.Tensor | None:
    """Return the `weights` of a mean over classes."""
    if targets.is_floating_point():
        # For class probabilities, torch divides by the number of samples.
        return None
    counted = targets != criterion.ignore_index
    if criterion.weight is None:
        if waits and bool(counted.all()):
            return None
        weight_of_each = counted.double()
    else:
        known = targets.where(counted, 0).long()
        weight_of_each = criterion.weight.detach().double()[known] * counted
    return weight_of_each.flatten(1).sum(1) if weight_of_each.dim() > 1 else weight_of_each


def portions(
    criterion: Callable[..., Any], plan: Plan, sizes: Sequence[int], targets: Callable[[], Any]
) -> list[float]:
    """Return factors by which the losses of a batch's parts add up to the loss of the batch.

    `sizes` are the samples of each part; `targets`, called only if they matter, returns those of
    all parts, concatenated.
    """
    return [1.0] * len(sizes) if adds_up(criterion, plan) else means(criterion, sizes, targets)


def means(
    criterion: Callable[..., Any], sizes: Sequence[int], targets: Callable[[], Any]
) -> list[float]:
    """Return the `portions` for a criterion that takes a mean."""
    counts = [float(size) for size in sizes]
    sample_weights = weights(criterion, targets()) if counts_unequally(criterion) else None
    if sample_weights is not None:
        counts = [float(part.sum()) for part in torch.split(sample_weights, list(sizes))]
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def mean_loss(
    criterion: Callable[..., Any] | None,
    plan: Plan,
    losses: npt.NDArray[np.float64],
    bounds: Sequence[tuple[int, int]],
    counts: npt.NDArray[np.float64] | None,
) -> float:
    """Return the mean over samples of the losses (n_batches,) of batches.

    `bounds` tells where each batch lies among the samples, `counts` (n,) are their `weights`. None
    as `criterion`: each loss is the mean of its batch.
    """
    sizes: npt.NDArray[Any] = np.array([high - low for low, high in bounds])
    if criterion is not None and adds_up(criterion, plan):
        return float(losses.sum() / sizes.sum())
    if counts is not None:
        sizes = np.array([counts[low:high].sum() for low, high in bounds])
    return float(losses @ sizes / sizes.sum())


class CriterionOfParts(nn.Module):
    """A criterion of targets of several parts, as a function of their rows."""

    def __init__(self, criterion: Callable[..., Any], columns: Schema) -> None:
        super().__init__()
        self.criterion, self.columns = criterion, columns

    def forward(self, outputs: Any, targets: torch.Tensor) -> Any:
        """Return the loss of outputs and the rows (B, width) of targets."""
        return self.criterion(outputs, self.columns.split(targets))


def of_rows(criterion: Callable[..., Any], data: Batches) -> Callable[..., Any]:
    """Return a criterion as a function of targets as they are stored."""
    if data.schema is None or isinstance(criterion, NoLoss):
        return criterion
    return CriterionOfParts(criterion, data.schema)


class WeightedCriterion(nn.Module):
    """The mean of the losses of samples by their weights, of outputs and `WeightedTargets`.

    `criterion` is one of stored targets, see `of_rows`, whose ``reduction`` becomes "none". With
    weights that are 0 in the whole batch, loss and gradient are 0.
    """

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self.criterion = criterion
        self._classifies = classifies(criterion)
        as_given(criterion).reduction = "none"

    def forward(self, outputs: Any, targets: WeightedTargets) -> torch.Tensor:
        """Return the weighted mean."""
        losses = self.criterion(outputs, targets.targets)
        rows, counts = losses.reshape(len(losses), -1), self._counts(targets)
        sums = rows.mean(1) if counts is None else rows.sum(1)
        total = self.counts(targets).sum().clamp(min=torch.finfo(torch.float64).tiny)
        mean: torch.Tensor = (sums * (targets.weights / total).to(sums.dtype)).sum()
        return mean

    def counts(self, targets: WeightedTargets) -> torch.Tensor:
        """Return how much each sample (n,) counts in the mean, in float64."""
        counts = self._counts(targets)
        return targets.weights if counts is None else targets.weights * counts

    def _counts(self, targets: WeightedTargets) -> torch.Tensor | None:
        if not self._classifies:
            return None
        return class_weights(self.criterion, targets.targets, waits=False)


def weighing(criterion: Callable[..., Any], data: Batches) -> Callable[..., Any]:
    """Return a criterion of the targets that `Batches.weighted` returns."""
    return criterion if data.sample_weight is None else WeightedCriterion(criterion)


def as_given(criterion: Any) -> Any:
    """Return a criterion as the user passed it, or made it."""
    while isinstance(criterion, (CriterionOfParts, WeightedCriterion)):
        criterion = criterion.criterion
    return None if isinstance(criterion, NoLoss) else criterion


def criterion_for(recipe: Recipe, data: Batches, train: Indices) -> Callable[..., Any]:
    """Return the criterion of a job that trains on the samples `train`."""
    if recipe.make_criterion is None:
        return of_rows(copy.deepcopy(recipe.criterion), data)
    targets = data.asked_of(data.targets_of(train).cpu().clone())
    criterion: Callable[..., Any] = _made(recipe.make_criterion, targets)
    return of_rows(criterion, data)


def trained_parameters(criterion: Any) -> list[nn.Parameter]:
    """Return the parameters of a criterion that a job trains."""
    parameters = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    return [item for item in parameters if item.requires_grad]


def kind_made_by(factory: Callable[[Any], Any]) -> Criterion | None:
    """Return what the criteria of a factory need, judged by that for the targets 0 and 1.

    None for the user's criteria, and where the factory does not take these targets.
    """
    # User code may raise anything for targets that are not the data's: classes, or numbers.
    for targets in (torch.arange(2), torch.arange(2.0)):
        with contextlib.suppress(Exception):
            return criterion_of(_made(factory, targets))
    return None


def _made(factory: Callable[[Any], Any], targets: Any) -> Any:
    with seeded(0):
        # It may keep a state, which no other job must see.
        return copy.deepcopy(factory)(targets)
