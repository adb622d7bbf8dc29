"""Whether an LR schedule fits the number of steps in its jobs.

The schedule is stepped through the whole training, on an optimizer that trains nothing. The checks
look at its learning rates, and at the length of a single cycle.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

from asynckfold.errors import Problem
from asynckfold.training import lr_schedules
from asynckfold.training.optimizers import SeveralOptimizers, optimizers_of

SECONDS = 0.2
"""Longest time for stepping a schedule: some ten thousand steps of a schedule of torch."""


@dataclass(frozen=True)
class Steps:
    """Number of LR-schedule steps in the jobs of a candidate.

    `least` and `most` are those of the smallest and the largest training fold, `batches` what
    `most` would be with a step per batch.
    """

    least: int
    most: int
    each: str
    batches: int

    def __str__(self) -> str:
        """Return ``"20 steps, one each epoch"``."""
        count = f"{self.most}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"{count} steps, one each {self.each}"


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


def schedule_problems(
    name: str, make: Callable[[Any], Any], optimizer: Any, steps: Steps
) -> list[Problem]:
    """Return what is wrong with an LR schedule, which `make` makes for an optimizer without one.

    The optimizer stays unchanged. Several optimizers have a schedule each.
    """
    parts = optimizers_of(optimizer)
    problems = (
        item for part in parts for item in _problems(f"LR schedule {name}", make, part, steps)
    )
    return list(dict.fromkeys(problems))


def _problems(
    title: str, make: Callable[[Any], Any], optimizer: Any, steps: Steps
) -> Iterator[Problem]:
    spare = without_schedule(optimizer)
    schedule = make(spare)
    kind = type(schedule).__name__
    if lr_schedules.needs_metric(schedule):
        if schedule.mode != "min":
            rule = f"{title} is stepped with a loss, the less the better"
            yield Problem(rule, f"{kind}(mode={schedule.mode!r})", "Pass mode='min'.")
        return
    rule, remedy = f"{title} must fit the steps that its jobs take: {steps}", f"{steps.most} steps"
    # The last rate follows the last step; torch has no cycle of fewer than three rates.
    if isinstance(schedule, lr_scheduler.OneCycleLR):
        total = int(schedule.total_steps)
        if not steps.most <= total <= max(steps.most, 2) + 1:
            remedy = f"Pass total_steps={steps.most}"
            if steps.each == "epoch" and total >= steps.batches:
                remedy += ", or, to step it after each batch, trainer_params={'lr_step': 'batch'}"
            yield Problem(rule, f"{kind}(total_steps={total})", f"{remedy}.")
            return
    rates, error = _rates(schedule, spare, steps.most)
    idle = next((number for number, rate in enumerate(reversed(rates)) if rate > 0), 0)
    if error:
        yield Problem(rule, f"{kind}: {error}", f"Make it last for {remedy}.")
    elif min(rates) < 0 or idle >= max(2, steps.most // 10):
        received = f"{kind}: {rates[-1]:g} from step {len(rates) - idle + 1} on"
        yield Problem(rule, received, f"Let its rates stay above 0 for {remedy}.")


def _rates(schedule: Any, optimizer: Any, steps: int) -> tuple[list[float], str]:
    """Return the learning rate before each step, of the group with the greatest, and an error.

    There are fewer rates than `steps` if stepping takes longer than `SECONDS`, or the schedule
    raises. The error is empty if user code raised it: its jobs will report it.
    """
    rates: list[float] = []
    ends = time.monotonic() + SECONDS
    is_torchs = type(schedule).__module__ == lr_scheduler.__name__
    with warnings.catch_warnings():
        # torch warns that the optimizer takes no steps.
        warnings.simplefilter("ignore")
        while len(rates) < steps and time.monotonic() < ends:
            rates.append(max(float(group["lr"]) for group in optimizer.param_groups))
            # A user's schedule may raise anything.
            try:
                schedule.step()
            except Exception as error:  # noqa: BLE001
                text = f"{type(error).__name__} after step {len(rates) - 1}: {error}"
                return rates, text if is_torchs else ""
    return rates, ""
