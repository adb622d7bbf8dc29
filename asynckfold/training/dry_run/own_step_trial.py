"""One batch of the user's own `training_step`, and the rules that it must keep."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from asynckfold.training.dry_run.checks import Refused
from asynckfold.training.gradients import take_step
from asynckfold.training.own_step import (
    ONE_REMEDY,
    ONE_RULE,
    SEVERAL_REMEDY,
    SEVERAL_RULE,
    OwnStep,
    StepError,
    StepState,
)
from asynckfold.training.own_validation import OwnValidation, joined


def step(own: OwnStep, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Train on the batch; return the loss. Refuse a step that breaks a rule."""
    state, stepped = own.state, []
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    with ExitStack() as hooks:
        for optimizer in state.optimizers:
            hook = optimizer.register_step_pre_hook(lambda *given: stepped.append(given))
            hooks.callback(hook.remove)
        try:
            loss = own.loss(model, batch, 0, 0)
        except StepError as error:
            raise Refused(*error.args) from error
    if own.is_several:
        _check_several(state.backwards, len(stepped))
        return loss
    _check_untouched(state, stepped)

    def backward(loss: torch.Tensor | None = None) -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = own.loss(model, batch, 0, 0) if loss is None else loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    backward(loss)
    if not isinstance(state.optimizer, torch.optim.LBFGS):
        take_step(state.optimizer, backward)
    return loss


def validate(
    own: OwnValidation,
    model: nn.Module,
    batch: tuple[Any, Any],
    size: int,
    logged: dict[str, Any],
) -> None:
    """Measure a batch of `size` samples; refuse a `validation_step` that breaks a rule.

    `logged` is what the `training_step` logs.
    """
    try:
        loss = own.loss(model, [(batch, size)], 0)
        joined(logged, own.found)
    except StepError as error:
        raise Refused(*error.args) from error
    if loss is None and not own.found:
        raise Refused(
            "validation_step must measure something",
            "a function that returns and logs nothing",
            "Return a loss or a dict of numbers, or call state.log(name=number).",
        )


def _check_untouched(state: StepState, stepped: list[Any]) -> None:
    """Refuse a step with one optimizer that has called backward or stepped it."""
    parameters = [item for group in state.optimizer.param_groups for item in group["params"]]
    if stepped:
        raise Refused(ONE_RULE, "a call of optimizer.step()", ONE_REMEDY)
    if any(item.grad is not None for item in parameters):
        raise Refused(ONE_RULE, "a call of backward()", ONE_REMEDY)


def _check_several(backwards: int, stepped: int) -> None:
    if not backwards:
        raise Refused(SEVERAL_RULE, "a step that never calls it", SEVERAL_REMEDY)
    if stepped != backwards:
        received = f"{stepped} steps of optimizers and {backwards} calls of state.backward"
        raise Refused(SEVERAL_RULE, received, SEVERAL_REMEDY)
