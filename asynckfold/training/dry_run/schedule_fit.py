"""Whether an LR schedule fits the number of steps in its jobs.

It is stepped through the whole training, on an optimizer that trains nothing.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from asynckfold.training import lr_schedules
from asynckfold.training.optimizers import SeveralOptimizers, optimizers_of
from asynckfold.training.user_steps import Refusal

SECONDS = 0.2
"""Longest time for stepping a schedule: some ten thousand steps of a schedule of torch."""


def without_schedule(optimizer: Any) -> Any:
    """Return a copy with separate learning rates, but the same parameters and state."""
    if isinstance(optimizer, SeveralOptimizers):
        return SeveralOptimizers([without_schedule(part) for part in optimizer.parts])
    spare = copy.copy(optimizer)
    spare.param_groups = [
        {
            name: item.clone() if isinstance(item, torch.Tensor) else item
            for name, item in group.items()
        }
        for group in optimizer.param_groups
    ]
    if hasattr(optimizer, lr_schedules.ATTACHED):
        lr_schedules.attach(getattr(optimizer, lr_schedules.ATTACHED), spare)
    return spare


def check_lr_schedule(
    name: str, make: Callable[[Any], Any], optimizer: Any, steps: int, each: str
) -> None:
    """Refuse an LR schedule that does not fit so many steps, one `each` epoch or batch.

    The optimizer, for which `make` makes it, stays unchanged. Several have a schedule each.
    """
    for part in optimizers_of(optimizer):
        spare = without_schedule(part)
        schedule = make(spare)
        kind = type(schedule).__name__
        if not lr_schedules.needs_metric(schedule):
            received = _misfit(schedule, steps)
        elif schedule.mode == "min":
            continue
        else:
            received = f"(mode={schedule.mode!r}), where a loss is the better the less it is"
        if received:
            raise Refusal(
                f"LR schedule {name} must fit {steps} steps, one each {each}",
                f"{kind}{received}",
                f"Pass total_steps={steps} or the like, mode='min' for a plateau, or, to step it "
                "after each batch, trainer_params={'lr_step': 'batch'}.",
            )


def _misfit(schedule: Any, steps: int) -> str:
    """Say why a schedule does not fit; empty if it does, or user code raised: its jobs will."""
    if isinstance(schedule, lr_scheduler.OneCycleLR):
        total = int(schedule.total_steps)
        # The last rate follows the last step; torch has no cycle of fewer than three rates.
        return "" if steps <= total <= max(steps, 2) + 1 else f"(total_steps={total})"
    ends, is_torchs = time.monotonic() + SECONDS, type(schedule).__module__ == lr_scheduler.__name__
    with warnings.catch_warnings():
        # torch warns that the optimizer takes no steps.
        warnings.simplefilter("ignore")
        for step in range(steps):
            # A user's schedule may raise anything.
            try:
                schedule.step()
            except Exception as error:  # noqa: BLE001
                return f": {type(error).__name__} after step {step}: {error}" if is_torchs else ""
            if time.monotonic() > ends:
                break
    return ""
