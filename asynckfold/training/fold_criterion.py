"""The criterion of a job: a copy of the user's, or what the user's factory makes for its fold."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.data.transforms import seeded
from asynckfold.jobs.columns import Columns
from asynckfold.jobs.criteria import Criterion, criterion_of
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.recipe import Recipe
from asynckfold.training.losses import NoLoss


class CriterionOfParts(nn.Module):
    """A criterion of targets of several parts, as a function of their rows."""

    def __init__(self, criterion: Callable[..., Any], columns: Columns) -> None:
        super().__init__()
        self.criterion, self.columns = criterion, columns

    def forward(self, outputs: Any, targets: torch.Tensor) -> Any:
        """Return the loss of outputs and the rows (B, width) of targets."""
        return self.criterion(outputs, self.columns.split(targets))


def of_rows(criterion: Callable[..., Any], data: Batches) -> Callable[..., Any]:
    """Return a criterion as a function of targets as they are stored."""
    if data.columns is None or isinstance(criterion, NoLoss):
        return criterion
    return CriterionOfParts(criterion, data.columns)


def as_given(criterion: Any) -> Any:
    """Return a criterion as the user passed it, or made it."""
    found = criterion.criterion if isinstance(criterion, CriterionOfParts) else criterion
    return None if isinstance(found, NoLoss) else found


def criterion_for(recipe: Recipe, data: Batches, train: Indices) -> Callable[..., Any]:
    """Return the criterion of a job that trains on the samples `train`."""
    if recipe.make_criterion is None:
        return of_rows(copy.deepcopy(recipe.criterion), data)
    targets = data.asked_of(data.targets_of(train).cpu().clone())
    found: Callable[..., Any] = _made(recipe.make_criterion, targets)
    return of_rows(found, data)


def trained_parameters(criterion: Any) -> list[nn.Parameter]:
    """Return the parameters of a criterion that a job trains."""
    parameters = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    return [item for item in parameters if item.requires_grad]


def kind_made_by(factory: Callable[[Any], Any]) -> Criterion | None:
    """Return what the criteria of a factory ask for, told by that for the targets 0 and 1.

    None for the user's own criteria, and where the factory does not take these targets.
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
