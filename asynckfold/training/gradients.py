"""One step of a job: the gradients of a batch, and what the optimizer makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asynckfold.training.precision import outputs_of, step

Training = Any
"""A `training_run.Training`, which lies above."""


def training_step(training: Training, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Take one step of the optimizer; return the loss, detached."""
    if training.own_step is not None and training.own_step.is_several:
        return _loss(training, inputs, targets).detach()

    def backward() -> torch.Tensor:
        loss: torch.Tensor = training.gradient(training, inputs, targets)
        clip(training)
        return loss

    if isinstance(training.optimizer, torch.optim.LBFGS):
        # The only optimizer of torch.optim that evaluates the loss several times a step.
        return torch.as_tensor(training.optimizer.step(backward)).detach()  # type: ignore[no-untyped-call]
    loss = backward()
    step(training.optimizer, training.scaler)
    return loss


def fresh_gradient(training: Training, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Set the gradients of the parameters to those of a batch; return the loss, detached."""
    training.optimizer.zero_grad()
    return add_gradient(training, inputs, targets)


def add_gradient(
    training: Training, inputs: Any, targets: torch.Tensor, weight: float = 1.0
) -> torch.Tensor:
    """Add the gradient of `weight` × loss to the parameters; return the loss, detached.

    A weight of 1 gives the same bits as no weight.
    """
    loss = _loss(training, inputs, targets)
    weighted = loss if weight == 1.0 else loss * weight
    scaled = weighted if training.scaler is None else training.scaler.scale(weighted)
    scaled.backward()
    return loss.detach()


def _loss(training: Training, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
    if training.own_step is not None:
        batch = inputs, training.data.asked_of(targets)
        own = training.own_step.loss(training.model, batch, training.epoch, training.batch)
        return torch.as_tensor(own)
    outputs = outputs_of(training.model, inputs, training.params.precision)
    loss: torch.Tensor = training.criterion(outputs, targets)
    return loss


def clip(training: Training) -> None:
    """Clip the norm of the gradient, if the plan says so."""
    if training.params.clip_grad_norm is not None:
        if training.scaler is not None:
            training.scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), training.params.clip_grad_norm)
