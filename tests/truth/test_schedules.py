"""LR schedules that cannot fit the steps of their jobs are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as torch_schedules

from asynckfold import InputError, get_scheduler
from asynckfold.training.dry_run.schedule_fit import check_lr_schedule
from tests.training.sweeps import in_pieces, problems, train
from tests.training.tiny import samples

BUILT_IN = ("constant", "cosine", "exponential", "multistep", "onecycle", "reduce", "step", "warm")

Make = Callable[[Any], Any]


pytestmark = pytest.mark.usefixtures("one_thread", "hasty_disk")


def judged(make: Make, count: int) -> str:
    """Return what a schedule of so many steps is refused for; nothing if it fits."""
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
    try:
        check_lr_schedule("s", make, optimizer, count, "epoch")
    except InputError as error:
        return str(error)
    return ""


def rule(name: str, **settings: Any) -> Make:
    return partial(getattr(torch_schedules, name), **settings)


def sequential(optimizer: optim.Optimizer) -> Any:
    """Two epochs of warming up, then a cosine."""
    return torch_schedules.SequentialLR(
        optimizer,
        [
            torch_schedules.LinearLR(optimizer, 0.1, total_iters=2),
            torch_schedules.CosineAnnealingLR(optimizer, 8),
        ],
        [2],
    )


def too_short(optimizer: optim.Optimizer) -> Any:
    """A cycle in a chain, which raises when it is through."""
    return torch_schedules.ChainedScheduler(
        [torch_schedules.OneCycleLR(optimizer, 0.1, total_steps=5)]
    )


REFUSED: dict[str, tuple[Make, str]] = {
    "plateau of a score": (rule("ReduceLROnPlateau", mode="max"), "mode='max'"),
    "cycle too long": (rule("OneCycleLR", max_lr=0.1, total_steps=100), "total_steps=100"),
    "by epochs": (rule("OneCycleLR", max_lr=0.1, epochs=10, steps_per_epoch=4), "total_steps=40"),
    "in a chain": (too_short, "ValueError after step 5"),
}


def test_wrong_schedules_are_refused() -> None:
    for make, received in REFUSED.values():
        message = judged(make, 10)
        assert message.startswith("LR schedule s must fit 10 steps, one each epoch: received ")
        assert received in message
        assert "Pass total_steps=10" in message


FINE: dict[str, tuple[Make, int]] = {
    "plateau": (rule("ReduceLROnPlateau", patience=2), 10),
    "cycle": (rule("OneCycleLR", max_lr=0.1, total_steps=10), 10),
    "cosine": (rule("CosineAnnealingLR", T_max=10), 10),
    "cosine above nothing": (rule("CosineAnnealingLR", T_max=12, eta_min=1e-5), 10),
    "restarts": (rule("CosineAnnealingWarmRestarts", T_0=3, T_mult=2), 10),
    "own warmth from nothing": (rule("LambdaLR", lr_lambda=lambda step: min(1.0, step / 5)), 10),
    "steps": (rule("StepLR", step_size=3), 10),
    "in sequence": (sequential, 10),
    "long": (rule("StepLR", step_size=30_000), 100_000),
}


def test_ordinary_schedules_are_accepted_and_built_in_ones_fit_any_training() -> None:
    for make, count in FINE.values():
        assert not judged(make, count)
    for name in BUILT_IN:
        for count in (1, 2, 7):
            make = partial(get_scheduler, name, steps=count)
            assert not judged(make, count)


# In the dry run


def test_the_steps_are_those_of_the_largest_fold(tmp_path: Path) -> None:
    """61 samples in 3 folds: 40 or 41 to train on, 4 or 5 batches of 10."""
    for each, total, fits in (
        ("epoch", 6, True),
        ("epoch", 30, False),
        ("batch", 30, True),
        ("batch", 24, False),
    ):
        refused = problems(
            *(tmp_path / f"{each} {total}", None),
            {"own": rule("OneCycleLR", max_lr=0.1, total_steps=total)},
            **{"cv": 3, "data": samples(61), "params": {"epochs": 6, "lr_step": each}},
        )
        assert (not refused) == fits
        for text, received, remedy in refused:
            assert f"total_steps={total}" in received
            steps = 6 if each == "epoch" else 30
            assert f"Pass total_steps={steps} or the like" in remedy
            assert f"must fit {steps} steps, one each {each}" in text


def test_a_users_schedule_that_raises_does_not_refuse_the_sweep(tmp_path: Path) -> None:
    class Own(torch_schedules.StepLR):
        def step(self, epoch: Any = None) -> None:
            if self.last_epoch == 2:
                raise ValueError("mine")
            super().step()

    words = {"schedules": {"own": lambda optimizer: Own(optimizer, 2)}, "params": {"epochs": 6}}
    assert not problems(tmp_path / "run", **words)


def test_the_rates_of_a_job_are_those_of_an_ordinary_loop(tmp_path: Path) -> None:
    seen: list[float] = []

    def noting(model: nn.Module) -> optim.Optimizer:
        class Noting(optim.SGD):
            def step(self, closure: Any = None) -> Any:
                if self.param_groups[0]["params"][0].grad is not None:
                    seen.append(float(self.param_groups[0]["lr"]))
                return super().step(closure)

        return Noting(model.parameters(), 0.1, momentum=0.9)

    params = {"epochs": 3, "lr_step": "batch"}
    words = {"schedules": {"own": sequential}, "opt_fn": noting, "params": params}
    whole = train(tmp_path / "whole", **words)
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
    schedule, expected = sequential(optimizer), []
    for _ in range(3):
        for _ in range(4):
            expected.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            schedule.step()
    # After the steps of the dry run.
    assert seen[-12:] == pytest.approx(expected)
    assert in_pieces(tmp_path / "pieces", **words)[0].digest == whole.digest
