"""The criterion of a job: a copy of the user's, or what the user's factory makes for its fold."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch

from asynckfold.data.batches import Batches
from asynckfold.data.transforms import seeded
from asynckfold.jobs.criteria import Criterion, criterion_of
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.recipe import Recipe


def criterion_for(recipe: Recipe, data: Batches, train: Indices) -> Callable[..., Any]:
    """Return the criterion of a job that trains on the samples `train`."""
    if recipe.make_criterion is None:
        return copy.deepcopy(recipe.criterion)
    found: Callable[..., Any] = _made(recipe.make_criterion, data.targets_of(train).cpu().clone())
    return found


def kind_made_by(factory: Callable[[Any], Any]) -> Criterion | None:
    """Return what the criteria of a factory ask for, told by that for the targets 0 and 1.

    None for the user's own criteria, and where the factory does not take these targets.
    """
    # User code may raise anything for targets that are not the data's: classes, or numbers.
    for targets in (torch.arange(2), torch.arange(2.0)):
        with contextlib.suppress(Exception):
            return criterion_of(_made(factory, targets))
    return None


def _made(factory: Callable[[Any], Any], targets: torch.Tensor) -> Any:
    with seeded(0):
        # It may keep a state, which no other job must see.
        return copy.deepcopy(factory)(targets)
