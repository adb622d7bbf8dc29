"""What a dry run finds of a candidate that would run to its end and learn nothing, or too much."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

Problem = tuple[str, str, str]

_STATISTICS = "running_"
"""How the buffers that a forward pass changes are called, in torch's normalising layers."""


def why_not_its_own(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Problem | None:
    """Return what is wrong with an optimizer that trains another model, or None."""
    own = {id(item) for item in model.parameters()}
    if not own or own & set(map(id, _held(optimizer))):
        return None
    return (
        "opt_fn must optimise the model that it gets",
        f"{type(optimizer).__name__}, which holds no parameter of model {name}",
        "Write for instance: def opt_fn(model): return Adam(model.parameters(), 1e-3)",
    )


def why_not_learning(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Problem | None:
    """Return what is wrong after a backward pass that reached nothing to optimise, or None."""
    own = {id(item) for item in model.parameters()}
    held = [item for item in _held(optimizer) if id(item) in own]
    if not held or any(item.grad is not None for item in held):
        return None
    return (
        f"the loss of model {name} must have a gradient for what is optimised",
        f"none for the {len(held)} parameters that {type(optimizer).__name__} holds",
        "Look for detach(), no_grad() or a frozen part between them and the loss.",
    )


def why_not_new(name: str, model: nn.Module, again: Any) -> Problem | None:
    """Return what is wrong with two models of one factory that share what is trained, or None.

    The second job of a worker would go on with what the first one learned, of other folds.
    """
    if not isinstance(again, nn.Module):
        return None
    known = {id(item) for item in chain(model.parameters(), model.buffers())}
    shared = [
        path for path, item in again.named_parameters() if id(item) in known and item.requires_grad
    ] + [
        path
        for path, item in again.named_buffers()
        if id(item) in known and path.rpartition(".")[2].startswith(_STATISTICS)
    ]
    if not shared:
        return None
    more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
    return (
        f"each call of the factory of model {name} must make a new model",
        f"two models that share {shared[0]}{more}",
        "Build it in the factory, or return copy.deepcopy(...) of what was made before: folds "
        "would learn from each other.",
    )


def why_not_logarithms(name: str, criterion: Any, outputs: torch.Tensor) -> Problem | None:
    """Return what is wrong with outputs that `NLLLoss` reads as logarithms, or None."""
    if type(criterion) is not nn.NLLLoss or not float(outputs.max()) > 0:
        return None
    return (
        f"model {name} must return logarithms of probabilities for NLLLoss",
        f"outputs up to {float(outputs.max()):.3g}, where none can exceed 0",
        "End it with log_softmax(1), or use CrossEntropyLoss.",
    )


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [item for group in optimizer.param_groups for item in group["params"]]
