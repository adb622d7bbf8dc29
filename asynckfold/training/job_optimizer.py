"""The optimizer of a job: of its model, and of its copy of the criterion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from asynckfold.jobs.grid import keywords_of
from asynckfold.jobs.recipe import Recipe
from asynckfold.training.fold_criterion import as_given


def opt_fn_for(recipe: Recipe, lr_schedule: str, criterion: Any) -> Callable[[nn.Module], Any]:
    """Return the function model → optimizer of the jobs with an LR schedule.

    It gets a job's `criterion` where it has a parameter of that name, and what it takes of the
    caller's criterion stands for the same parameter of the job's.
    """
    keywords = dict(recipe.optimizers.get(lr_schedule, {}))
    if "criterion" in keywords_of(recipe.opt_fn, 1)[0]:
        keywords["criterion"] = as_given(criterion)
    make = functools.partial(recipe.opt_fn, **keywords) if keywords else recipe.opt_fn
    if not isinstance(recipe.criterion, nn.Module) or not isinstance(criterion, nn.Module):
        return make
    pairs = zip(recipe.criterion.parameters(), criterion.parameters(), strict=False)
    copies = {id(callers): copied for callers, copied in pairs}
    return functools.partial(_with_copies, make, copies) if copies else make


def _with_copies(
    make: Callable[[nn.Module], Any], copies: dict[int, nn.Parameter], model: nn.Module
) -> Any:
    made = make(model)
    for optimizer in made if isinstance(made, (tuple, list)) else [made]:
        if not isinstance(optimizer, Optimizer):
            continue
        for group in optimizer.param_groups:
            # In place: wrappers such as SAM share the list with the optimizer that they step.
            group["params"][:] = [copies.get(id(item), item) for item in group["params"]]
        # Adagrad has a state before its first step.
        for item in [*optimizer.state]:
            if id(item) in copies:
                optimizer.state[copies[id(item)]] = optimizer.state.pop(item)
    return made
