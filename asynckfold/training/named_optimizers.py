"""The optimizers of torch.optim by name, for sweeps without user code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn, optim

OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    name.lower(): getattr(optim, name)
    for name in (
        "Adadelta",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
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
