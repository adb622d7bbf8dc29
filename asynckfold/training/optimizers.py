"""The optimizers of a job: made of the model and its criterion, with torch's fused kernels.

Several optimizers, which a `training_step` steps one by one, are one object to whatever saves,
restores and describes a job; so are their LR schedules.

Fused kernels pass over each parameter once instead of once per operation. They round differently
from the default, but reproducibly; so the choice depends on model and optimizer alone, in all
trainers, and the plan records it among the optimizer's settings.

On one core of an AMD EPYC (torch 2.15) an update took 0.2 to 0.6 times as long for Adam and
Adagrad, 0.5 to 0.7 times for SGD with momentum, from an MLP to MobileNet; fused was never slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from asynckfold.jobs.grid import keywords_of
from asynckfold.jobs.recipe import Recipe
from asynckfold.training.losses import as_given


class _Several:
    """Parts that are saved and loaded together, under a name in checkpoints."""

    name = ""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all."""
        return {self.name: [part.state_dict() for part in self.parts]}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for part, state in zip(self.parts, tree[self.name], strict=True):
            part.load_state_dict(state)


class SeveralOptimizers(_Several):
    """The optimizers that ``opt_fn`` returned as a tuple."""

    name = "optimizers"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all, in their order."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all by parameter."""
        return {key: value for part in self.parts for key, value in part.state.items()}

    def zero_grad(self) -> None:
        """Drop the gradients of all."""
        for part in self.parts:
            part.zero_grad()


class SeveralSchedules(_Several):
    """An LR schedule of each optimizer, stepped together."""

    name = "lr_schedules"

    def step(self, *metric: float) -> None:
        """Step all."""
        for part in self.parts:
            part.step(*metric)


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers of a job, one or several."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def schedules_of(schedule: Any) -> tuple[Any, ...]:
    """Return the LR schedules of a job, one for each optimizer."""
    return schedule.parts if isinstance(schedule, SeveralSchedules) else (schedule,)


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


OFFERED = frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad})
"""Optimizers with a fused CPU kernel; all but the last have one for GPUs in torch 2.6."""


def with_fused_kernel(opt_fn: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """Return the optimizer that `opt_fn` makes, with ``fused=True`` if the user left it open.

    That is: none of ``fused``, ``foreach`` and ``differentiable`` is set, the learning rate is a
    number, and all parameters are dense floating-point tensors on a CPU or a GPU. A tuple of
    optimizers becomes `SeveralOptimizers`.
    """
    optimizer = opt_fn(model)
    if isinstance(optimizer, (tuple, list)):
        if len(optimizer) != 1:
            return SeveralOptimizers([_with_kernel(part, model) for part in optimizer])
        (optimizer,) = optimizer
    return _with_kernel(optimizer, model)


def _with_kernel(optimizer: Any, model: nn.Module) -> Any:
    if _is_open(optimizer, model):
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = True
        # As their constructors set it: the kernels scale gradients back without asking the host.
        optimizer._step_supports_amp_scaling = True
    return optimizer


def follow_parameters(optimizer: Optimizer) -> None:
    """Give the optimizer's state of each parameter the memory layout of the parameter.

    Checkpoints lose the layout, and torch's fused kernels assume that it is the same.
    """
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _is_open(optimizer: Any, model: nn.Module) -> bool:
    return (
        isinstance(optimizer, Optimizer)
        and type(optimizer) in OFFERED
        and not any(getattr(module, "sparse", False) for module in model.modules())
        and all(
            group["fused"] is None
            and group["foreach"] is None
            and not group["differentiable"]
            and not isinstance(group["lr"], torch.Tensor)
            and all(
                item.layout is torch.strided
                and item.is_floating_point()
                and (item.is_cpu or (item.is_cuda and type(optimizer) is not optim.Adagrad))
                for item in group["params"]
            )
            for group in optimizer.param_groups
        )
    )


_NAMES = "Adadelta Adagrad Adam Adamax AdamW NAdam RAdam RMSprop Rprop SGD"

OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    name.lower(): getattr(optim, name) for name in _NAMES.split()
}
"""Element-wise optimizers by lower-case name."""

MOMENTUM = ("rmsprop", "sgd")

FULL_BATCH = ("rprop",)
"""Those that follow the sign of each gradient, which must be that of all samples."""


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer function: model → ``torch.optim.<name>`` over all its parameters.

    `momentum` is for SGD and RMSprop; `weight_decay` is decoupled in AdamW, an L2 penalty
    elsewhere, and not for Rprop.
    """

    name: str
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __call__(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
    ) -> optim.Optimizer:
        """Return a new optimizer for the model; a grid may pass other settings."""
        settings = {"lr": self.lr if lr is None else lr}
        if self.name not in FULL_BATCH:
            settings["weight_decay"] = self.weight_decay if weight_decay is None else weight_decay
        if self.name in MOMENTUM:
            settings["momentum"] = self.momentum if momentum is None else momentum
        make: Callable[..., optim.Optimizer] = OPTIMIZERS[self.name]
        return make(model.parameters(), **settings)
