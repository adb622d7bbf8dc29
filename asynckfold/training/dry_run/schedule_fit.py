"""Whether an LR schedule fits the number of steps in its jobs.

The schedule is stepped through the whole training, on an optimizer that trains nothing. The checks
look at its learning rates, and at the length of a cosine and of a single cycle.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.optim import lr_scheduler

from asynckfold.training import lr_schedules
from asynckfold.training.optimizers import SeveralOptimizers, optimizers_of

Problem = tuple[str, str, str]

SECONDS = 0.2
"""Longest time for stepping a schedule: some ten thousand steps of a schedule of torch."""

LONGER = 1.5
"""A cosine this many times longer than the training is reported: it ends above a quarter of its
initial rate."""

_CONSTANT = (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR, lr_scheduler.ConstantLR)
"""Schedules that may be constant on purpose."""


@dataclass(frozen=True)
class Steps:
    """Number of LR-schedule steps in the jobs of a candidate.

    `least` and `most` are those of the smallest and the largest training fold, `batches` what
    `most` would be with a step per batch. With `refits`, all samples count as a training fold.
    """

    least: int
    most: int
    each: str
    batches: int
    refits: bool = False

    @property
    def text(self) -> str:
        """``"20 steps, one each epoch"``."""
        count = f"{self.most}" if self.least == self.most else f"{self.least} to {self.most}"
        refit = ", on all samples too" if self.refits and self.least < self.most else ""
        return f"{count} step{'s' * (self.most != 1)}, one each {self.each}{refit}"

    def instead(self, length: int) -> str:
        """Suggest a step per batch if a schedule's length fits that."""
        if self.each == "epoch" and 0.7 * self.batches <= length <= 1.5 * self.batches > self.most:
            return (
                ", or, to step it after each batch, trainer_params={'lr_step': 'batch'}: "
                f"{self.batches} steps"
            )
        return ""


@dataclass(frozen=True)
class Fit:
    """Problems of an LR schedule, and remarks on what may be wrong."""

    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


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


def judge(name: str, make: Callable[[Any], Any], optimizer: Any, steps: Steps) -> Fit:
    """Judge an LR schedule, which `make` makes for an optimizer that has none yet.

    The optimizer stays unchanged. Several optimizers have a schedule each.
    """
    title = f"LR schedule {name}"
    problems: dict[Problem, None] = {}
    notes: dict[str, None] = {}
    for part in optimizers_of(optimizer):
        schedule, rates, error = make(without_schedule(part)), list[tuple[float, ...]](), ""
        if not lr_schedules.needs_metric(schedule):
            spare = without_schedule(part)
            rates, error = _rates(make(spare), spare, steps.most)
        problems |= dict.fromkeys(_problems(title, schedule, steps, rates, error))
        if not problems and rates:
            notes |= dict.fromkeys(_notes(title, schedule, steps, rates))
    return Fit(tuple(problems), tuple(notes))


def _rates(schedule: Any, optimizer: Any, steps: int) -> tuple[list[tuple[float, ...]], str]:
    """Return the learning rates of each step, by parameter group, and what the schedule raised.

    There are fewer rates than `steps` if stepping takes longer than `SECONDS`, or the schedule
    raises. The error is empty if user code raised it: its jobs will report it.
    """
    rates: list[tuple[float, ...]] = []
    ends = time.monotonic() + SECONDS
    is_torchs = type(schedule).__module__ == lr_scheduler.__name__
    with warnings.catch_warnings():
        # torch warns that the optimizer takes no steps.
        warnings.simplefilter("ignore")
        for step in range(steps):
            rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
            if time.monotonic() > ends:
                break
            # A user's schedule may raise anything.
            try:
                schedule.step()
            except Exception as error:  # noqa: BLE001
                text = f"{type(error).__name__} after step {step}: {error}"
                return rates, text if is_torchs else ""
    return rates, ""


def _problems(
    title: str, schedule: Any, steps: Steps, rates: Sequence[tuple[float, ...]], error: str
) -> Iterator[Problem]:
    kind = type(schedule).__name__
    if lr_schedules.needs_metric(schedule):
        if schedule.mode != "min":
            yield (
                f"{title} is stepped with a loss, the less the better",
                f"{kind}(mode={schedule.mode!r}), which would cut the rate while it falls",
                "Pass mode='min'.",
            )
        return
    total = int(schedule.total_steps) if isinstance(schedule, lr_scheduler.OneCycleLR) else None
    # The last rate follows the last step; torch has no cycle of fewer than three rates.
    if total is not None and not steps.most <= total <= max(steps.most, 2) + 1:
        yield (
            f"{title} must fit the steps that its jobs take: {steps.text}",
            f"{kind}(total_steps={total})",
            f"Pass total_steps={steps.most}{steps.instead(total)}.",
        )
        return
    if error:
        yield f"{title} must last for {steps.text}", f"{kind}: {error}", "Make it longer."
    lowest = [min(items) for items in rates]
    if any(rate < 0 for rate in lowest):
        first = next(place for place, rate in enumerate(lowest) if rate < 0)
        yield (
            f"{title} must give learning rates of at least 0",
            f"{kind}: {lowest[first]:g} from step {first + 1} on of {steps.text}",
            f"Fit it to {steps.most} steps.",
        )
    idle = len(list(takewhile(lambda items: not any(items), reversed(rates))))
    if len(rates) > idle >= max(2, steps.most // 10):
        is_polynomial = isinstance(schedule, lr_scheduler.PolynomialLR)
        yield (
            f"{title} must leave a learning rate to train with",
            f"{kind}: 0 from step {len(rates) - idle + 1} on of {steps.text}",
            f"Pass total_iters={steps.most}."
            if is_polynomial
            else f"Fit it to {steps.most} steps.",
        )


def _notes(
    title: str, schedule: Any, steps: Steps, rates: Sequence[tuple[float, ...]]
) -> Iterator[str]:
    count, kind = steps.most, type(schedule).__name__
    if count < 2:
        return
    if isinstance(schedule, lr_scheduler.CosineAnnealingLR):
        length = int(schedule.T_max)
        call = f"{title}: {kind}(T_max={length})"
        if length < count - 1:
            yield f"{call} rises again after {length} of {steps.text}; T_max={count} falls once"
        elif length > LONGER * count:
            yield (
                f"{call} is cut off after {steps.text}; T_max={count} falls to its end"
                f"{steps.instead(length)}"
            )
    elif not isinstance(schedule, _CONSTANT) and len(rates) == count and len(set(rates)) == 1:
        yield (
            f"{title}: {kind} changes no learning rate in {steps.text}"
            f"{steps.instead(int(getattr(schedule, 'step_size', 0)))}"
        )
