"""The built-in LR schedules, each fitted to the number of steps of the training.

They come from `torch.optim.lr_scheduler`; a step is an epoch, or a batch on request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from asynckfold.errors import InputError, refuse
from asynckfold.jobs.recipe import named_lr_schedules
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.optimizers import SeveralOptimizers, SeveralSchedules, schedules_of

Schedule = lr_scheduler.LRScheduler


def constant(optimizer: Optimizer, steps: int) -> Schedule:
    """The optimizer's learning rate, unchanged."""
    return lr_scheduler.ConstantLR(optimizer, factor=1.0)


def cosine(optimizer: Optimizer, steps: int) -> Schedule:
    """Half a cosine from the learning rate to 0 over the training (Loshchilov & Hutter 2017)."""
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def warm(optimizer: Optimizer, steps: int) -> Schedule:
    """Cosine with warm restarts, twice over the training (SGDR, Loshchilov & Hutter 2017)."""
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=max(1, (steps + 1) // 2))


def reduce(optimizer: Optimizer, steps: int) -> Schedule:
    """A tenth of the rate when the inner-validation loss stops falling."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=max(1, steps // 10))


def multistep(optimizer: Optimizer, steps: int) -> Schedule:
    """A tenth of the rate after one half and after three quarters (He et al. 2016)."""
    milestones = sorted({max(1, steps // 2), max(1, steps * 3 // 4)})
    return lr_scheduler.MultiStepLR(optimizer, milestones)


def step(optimizer: Optimizer, steps: int) -> Schedule:
    """A tenth of the rate after each third of the training."""
    return lr_scheduler.StepLR(optimizer, step_size=max(1, -(-steps // 3)))


def exponential(optimizer: Optimizer, steps: int) -> Schedule:
    """A constant factor per step, down to a hundredth of the rate."""
    return lr_scheduler.ExponentialLR(optimizer, gamma=0.01 ** (1 / max(1, steps)))


def onecycle(optimizer: Optimizer, steps: int) -> Schedule:
    """Up to the optimizer's learning rate and down again (Smith & Topin 2018).

    Momentum, if the optimizer has any, is cycled the other way.
    """
    group = optimizer.param_groups[0]
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=[float(item["lr"]) for item in optimizer.param_groups],
        total_steps=max(steps, 2) + 1,
        cycle_momentum=group.get("momentum", 0) > 0 or "betas" in group,
    )


BUILT_IN: dict[str, Callable[[Optimizer, int], Schedule]] = {
    function.__name__: function
    for function in (constant, cosine, exponential, multistep, onecycle, reduce, step, warm)
}


def make(schedule: str | Callable[[Any], Any], optimizer: Any, steps: int) -> Any:
    """Return an LR schedule: a built-in one by name, or from a function optimizer → schedule.

    `steps` is how often ``step`` will be called. Each of several optimizers gets one.
    """
    if isinstance(optimizer, SeveralOptimizers):
        return SeveralSchedules([make(schedule, part, steps) for part in optimizer.parts])
    if isinstance(schedule, str):
        return BUILT_IN[schedule](optimizer, steps)
    return schedule(optimizer)


ATTACHED = "_asynckfold_lr_schedule"
"""Attribute of an optimizer that is made together with its LR schedule."""


def attach(schedule: Any, optimizer: Any) -> None:
    """Keep an LR schedule with the optimizer that it was made for; None stands for a constant."""
    setattr(optimizer, ATTACHED, schedule)


def attached(optimizer: Any) -> Any:
    """Return the LR schedule that came with an optimizer, as a copy for a copy of the optimizer."""
    schedule = getattr(optimizer, ATTACHED)
    if schedule is None:
        return constant(optimizer, 0)
    if schedule.optimizer is optimizer:
        return schedule
    return copy.deepcopy(schedule, {id(schedule.optimizer): optimizer})


def get_scheduler(scheduler: str, optimizer: Optimizer, steps: int = 10) -> Any:
    """Return a built-in LR schedule of an optimizer, for a training loop you write.

    Parameters
    ----------
    scheduler : str
        A name that `AsyncKFold` takes, such as ``"cosine"``.
    optimizer : torch.optim.Optimizer
        Its learning rates are the schedule's to set.
    steps : int
        Number of times that ``step`` will be called: the schedule is fitted to it.

    Raises
    ------
    InputError
        There is no schedule of this name.

    Examples
    --------
    >>> from torch import nn, optim
    >>> optimizer = optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    >>> get_scheduler("cosine", optimizer, steps=30).T_max
    30
    """
    refuse(named_lr_schedules(scheduler)[1])
    if type(steps) is not int or steps < 1:
        rule = "steps must be a whole number of at least 1"
        raise InputError.one(rule, repr(steps), "Pass the number of epochs.")
    return make(scheduler, optimizer, steps)


def needs_metric(schedule: Any) -> bool:
    """Whether ``step`` takes a metric."""
    return all(isinstance(part, lr_scheduler.ReduceLROnPlateau) for part in schedules_of(schedule))


def steps_each_batch(schedule: Any, params: TrainerParams) -> bool:
    """Whether the schedule steps after every batch, not after every epoch."""
    return params.lr_step == "batch" and not needs_metric(schedule)
