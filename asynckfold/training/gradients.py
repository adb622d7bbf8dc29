"""One step of a job: the gradients of a batch, and what the optimizer makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from asynckfold.training.calls import AUTOCAST, outputs_of, step
from asynckfold.training.losses import portions

if TYPE_CHECKING:
    from asynckfold.training.training_run import Training
    from asynckfold.training.user_steps import TrainingStep


def training_step(training: Training, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Take one step of the optimizer; return the loss, detached."""
    if training.user_step is not None and training.user_step.is_several:
        return _loss_of(training.user_step, training, inputs, targets).detach()

    def backward() -> torch.Tensor:
        loss = fresh_gradient(training, inputs, targets)
        clip(training)
        return loss

    return update(training.optimizer, backward, training.scaler)


def accumulated_step(training: Training, batches: Sequence[int]) -> list[torch.Tensor]:
    """Take one step on several batches of the epoch; return their losses, detached.

    The gradient is the mean over all their samples.
    """
    bounds = [training.bounds[batch] for batch in batches]
    weights = portions(
        training.criterion,
        training.bundle.plan,
        [high - low for low, high in bounds],
        lambda: weighted_targets(training, torch.cat([training.order[slice(*b)] for b in bounds])),
    )
    losses: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        training.optimizer.zero_grad()
        losses[:] = [
            add_gradient(training, inputs, targets, weight)
            for (inputs, targets), weight in zip(
                map(training.samples_of, batches), weights, strict=True
            )
        ]
        clip(training)
        return torch.stack(losses).dot(losses[0].new_tensor(weights))

    update(training.optimizer, backward, training.scaler)
    return losses


def weighted_targets(training: Training, rows: torch.Tensor) -> Any:
    """Return the targets of samples, with their weights if they have some."""
    return training.data.weighted(training.data.targets_of(rows), rows)


def update(
    optimizer: torch.optim.Optimizer,
    backward: Callable[[], torch.Tensor],
    scaler: GradScaler | None = None,
) -> torch.Tensor:
    """Set the gradients by `backward`, take a step, return the loss that `backward` gave."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return torch.as_tensor(optimizer.step(backward)).detach()  # type: ignore[no-untyped-call]
    loss = backward()
    take_step(optimizer, backward, scaler)
    return loss


def take_step(
    optimizer: torch.optim.Optimizer,
    backward: Callable[[], torch.Tensor],
    scaler: GradScaler | None = None,
) -> None:
    """Take a step with the gradients as they are.

    An optimizer of the user's may need them at other parameters, too, as sharpness-aware
    minimisation does (Foret et al. 2021): where its ``step`` raises without a closure and takes
    one, it gets `backward`.
    """
    if needs_closure(optimizer):
        optimizer.step(backward)  # type: ignore[arg-type]
        return
    try:
        step(optimizer, scaler)
    except Exception:
        is_own = not type(optimizer).__module__.startswith("torch.")
        takes_one = is_own and "closure" in inspect.signature(optimizer.step).parameters
        if scaler is not None or not takes_one:
            raise
        optimizer.step(backward)  # type: ignore[arg-type]
        setattr(optimizer, NEEDS_CLOSURE, True)


NEEDS_CLOSURE = "_asynckfold_needs_closure"


def needs_closure(optimizer: object) -> bool:
    """Whether a step evaluates the loss itself; of optimizers of the user's, after a step."""
    return isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, NEEDS_CLOSURE)


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
    model, precision = training.model, training.params.precision
    if training.user_step is not None:
        loss = _loss_of(training.user_step, training, inputs, targets)
    elif isinstance(inputs, torch.Tensor) and precision not in AUTOCAST:
        # Directly: in a debugger, nothing lies between the model and this line.
        loss = training.criterion(model(inputs), targets)
    else:
        loss = training.criterion(outputs_of(model, inputs, precision), targets)
    weighted = loss if weight == 1.0 else loss * weight
    scaled = weighted if training.scaler is None else training.scaler.scale(weighted)
    scaled.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _loss_of(
    user_step: TrainingStep, training: Training, inputs: Any, targets: torch.Tensor
) -> torch.Tensor:
    """Return the loss that the user's `training_step` computes."""
    batch = inputs, training.data.asked_of(targets)
    return torch.as_tensor(user_step.loss(training.model, batch, training.epoch, training.batch))


def clip(training: Training) -> None:
    """Clip the norm of the gradient, if the plan says so."""
    if training.params.clip_grad_norm is not None:
        if training.scaler is not None:
            training.scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), training.params.clip_grad_norm)
