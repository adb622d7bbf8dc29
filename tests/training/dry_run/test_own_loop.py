"""The dry run of a `fit_fn`: two runs of one batch, with the same bits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold.jobs.messages import Facts
from asynckfold.training.dry_run import preflight
from tests.training.test_own_loop import as_built_in, one_step, saving_on_the_way
from tests.training.test_own_step import Gan, two_adams
from tests.training.tiny import Noisy, Plain, Tiny


def check(tmp_path: Path, **parts: Any) -> Facts:
    tiny = Tiny(tmp_path, **parts)
    return preflight.check(tiny.bundle, tiny.batches)


def by_the_clock(context: Any) -> None:
    generator = torch.Generator().manual_seed(time.perf_counter_ns())
    for inputs, targets in context.train_loader:
        one_step(context, inputs + torch.rand(inputs.shape, generator=generator), targets)


def saving_a_function(context: Any) -> None:
    context.save({"model": context.model.forward})


def both_optimizers(context: Any) -> None:
    discriminating, generating = context.optimizer
    for inputs, targets in context.train_loader:
        loss = context.criterion(context.model(inputs), targets)
        loss.backward()
        discriminating.step()
        generating.step()
    [schedule.step() for schedule in context.lr_schedule]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "other bits": (
        {"fit_fn": by_the_clock},
        "fit_fn must give the same bits each time",
        "other weights after one batch of the same seed",
    ),
    "no batch": (
        {"fit_fn": lambda context: None},
        "fit_fn must train on the batches of context.train_loader",
        "a function that takes none",
    ),
    "a wrong report": (
        {"fit_fn": lambda context: context.report(lr=1)},
        "a reported metric must not have the name of another column of the epochs",
        "'lr'",
    ),
    "nothing to store": (
        {"fit_fn": saving_a_function},
        "context.save must get a dict that a checkpoint can hold",
        "",
    ),
    "a schedule that needs a loss": (
        {"fit_fn": as_built_in, "lr_schedules": {"reduce": "reduce"}},
        "LR schedules that react to a loss need inner-validation samples, which a fit_fn lacks",
        "LR schedule reduce",
    ),
    "a model that cannot be scored": (
        {"fit_fn": as_built_in, "models": {"m": lambda: nn.Linear(8, 2)}},
        "model m must return (samples, classes) scores for the 3 classes",
        "shape (10, 2)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_rule_is_refused(tmp_path: Path, name: str) -> None:
    parts, rule, received = REFUSED[name]
    facts = check(tmp_path, **parts)
    assert not facts.failures
    ((found, got, remedy),) = facts.problems
    assert found == rule
    assert received in got
    assert remedy.endswith(".")


@pytest.mark.parametrize(
    "parts",
    [
        {"fit_fn": as_built_in, "models": {"m": Noisy}},
        {"fit_fn": saving_on_the_way, "models": {"m": Noisy}},
        {"fit_fn": as_built_in, "models": {"m": Plain}},
        {"fit_fn": both_optimizers, "models": {"m": Gan}, "opt_fn": two_adams},
    ],
)
def test_a_right_loop_passes(tmp_path: Path, parts: dict[str, Any]) -> None:
    facts = check(tmp_path, **parts)
    assert (facts.problems, facts.failures) == ((), {})
    assert facts.flops["m"] > 0
    assert facts.fusible["m"] == "it has a loop of the user's own"


def test_what_the_loop_raises_fails_its_jobs_only(tmp_path: Path) -> None:
    def raising(context: Any) -> None:
        raise RuntimeError("no")

    facts = check(tmp_path, fit_fn=raising)
    assert not facts.problems
    assert facts.failures["plain/constant"].endswith("RuntimeError: no\n")
