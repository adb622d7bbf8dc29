"""Several optimizers of one job, as one object with a state; the same for their LR schedules.

A `training_step` steps them one by one. What saves, restores and describes a job sees only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class SeveralOptimizers:
    """The optimizers that ``opt_fn`` returned as a tuple."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all."""
        return {"optimizers": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for part, state in zip(self.parts, tree["optimizers"], strict=True):
            part.load_state_dict(state)


class SeveralSchedules:
    """An LR schedule of each optimizer, stepped together."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def step(self, *metric: float) -> None:
        """Step all."""
        for part in self.parts:
            part.step(*metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all."""
        return {"lr_schedules": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for part, state in zip(self.parts, tree["lr_schedules"], strict=True):
            part.load_state_dict(state)


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers of a job, one or several."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def schedules_of(schedule: Any) -> tuple[Any, ...]:
    """Return the LR schedules of a job, one for each optimizer."""
    return schedule.parts if isinstance(schedule, SeveralSchedules) else (schedule,)
