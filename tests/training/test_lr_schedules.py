"""The built-in LR schedules: any length, any optimizer, no warning, sane curves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, optim

from asynckfold import get_scheduler


def curve(name: str, steps: int) -> list[float]:
    """The learning rate of each step, and the one after the last."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([parameter], 0.1)
    schedule = get_scheduler(name, optimizer, steps)
    rates = [float(optimizer.param_groups[0]["lr"])]
    for _ in range(steps):
        optimizer.step(lambda: (parameter**2).sum())
        schedule.step(*([1.0] if name == "reduce" else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("steps", [2, 5, 100])
def test_cosine_falls_from_the_rate_to_zero(steps: int) -> None:
    rates = curve("cosine", steps)
    expected = [0.05 * (1 + math.cos(math.pi * step / steps)) for step in range(steps + 1)]
    assert rates == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("steps", [5, 6, 100])
def test_warm_restarts_in_the_middle(steps: int) -> None:
    rates = curve("warm", steps)[:-1]
    middle = (steps + 1) // 2
    assert [step for step, rate in enumerate(rates) if rate == pytest.approx(0.1)] == [0, middle]
    assert min(rates) == rates[middle - 1]
    assert rates[: steps - middle] == pytest.approx(rates[middle:])


@pytest.mark.parametrize(
    ("name", "steps", "drops"),
    [
        ("step", 3, [1, 2]),
        ("step", 100, [34, 68]),
        ("step", 2, [1]),
        ("multistep", 4, [2, 3]),
        ("multistep", 100, [50, 75]),
        ("multistep", 2, [1]),
    ],
)
def test_a_tenth_at_each_drop(name: str, steps: int, drops: list[int]) -> None:
    expected = [0.1 * 0.1 ** sum(step >= drop for drop in drops) for step in range(steps)]
    assert curve(name, steps)[:-1] == pytest.approx(expected)


def test_onecycle_climbs_to_the_rate_of_the_optimizer_and_ends_near_zero() -> None:
    rates = curve("onecycle", 100)
    peak = rates.index(max(rates))
    assert peak in (29, 30)
    assert max(rates) == pytest.approx(0.1, rel=1e-2)
    assert rates[0] == pytest.approx(0.004)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-5


def test_reduce_waits_and_then_takes_a_tenth() -> None:
    assert curve("reduce", 100)[10:14] == pytest.approx([0.1, 0.1, 0.01, 0.01])
