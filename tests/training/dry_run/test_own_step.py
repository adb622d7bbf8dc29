"""The dry run of a `training_step`: what breaks a rule is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from asynckfold import TrainerParams
from asynckfold.jobs.messages import Facts
from asynckfold.training.dry_run import preflight
from tests.training.test_own_step import (
    Gan,
    adversarial,
    as_built_in,
    logging,
    losses_of,
    two_adams,
)
from tests.training.tiny import Plain, Tiny, sgd


def check(tmp_path: Path, **parts: Any) -> Facts:
    tiny = Tiny(tmp_path, **parts)
    return preflight.check(tiny.bundle, tiny.batches)


def with_backward(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
    loss = as_built_in(model, batch, state)
    loss.backward()
    return loss


def with_optimizer_step(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
    with_backward(model, batch, state)
    state.optimizer.step()
    return as_built_in(model, batch, state)


def by_hand(model: Gan, batch: Any, state: Any) -> torch.Tensor:
    loss = losses_of(model, *batch, "discriminator")
    loss.backward()
    state.optimizer.step()
    return loss


def both_ways(model: Gan, batch: Any, state: Any) -> Any:
    found = adversarial(model, batch, state)
    state.optimizers[1].step()
    return found


ONE = "with one optimizer, a training_step returns the loss"
SEVERAL = "with several optimizers, a training_step trains by state.backward"
GAN: dict[str, Any] = {"models": {"gan": Gan}, "opt_fn": two_adams, "training_step": adversarial}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no loss": (
        {"training_step": lambda model, batch, state: None},
        "training_step must give one number with a gradient as loss",
        "None",
    ),
    "a dict without loss": (
        {"training_step": lambda *given: {"hits": 1.0}},
        "a dict that training_step returns must hold the loss",
        "a dict of hits",
    ),
    "backward": ({"training_step": with_backward}, ONE, "a call of backward()"),
    "step": ({"training_step": with_optimizer_step}, ONE, "a call of optimizer.step()"),
    "state.backward": (
        {"training_step": lambda model, batch, state: state.backward(1, state.optimizer)},
        ONE,
        "a call of state.backward",
    ),
    "a tuple without a step": (
        {**GAN, "training_step": None},
        "opt_fn must return a torch.optim.Optimizer",
        "a tuple of 2",
    ),
    "LBFGS among several": (
        {**GAN, "opt_fn": lambda gan: (sgd(gan.generator), optim.LBFGS(gan.parameters()))},
        "several optimizers must each take one gradient a step",
        "LBFGS, which computes several",
    ),
    "several by hand": ({**GAN, "training_step": by_hand}, SEVERAL, "a step that never calls it"),
    "several both ways": (
        {**GAN, "training_step": both_ways},
        SEVERAL,
        "3 steps of optimizers and 2 calls of state.backward",
    ),
    "a criterion that scores nothing": (
        {
            "training_step": lambda model, batch, state: model(batch[0]).mean(),
            "criterion": nn.CrossEntropyLoss(reduction="none"),
        },
        "the criterion must give one number for the outputs of model plain: it scores the "
        "held-out fold, also with a training_step",
        "a tensor of shape (10,)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_rule_is_refused(tmp_path: Path, name: str) -> None:
    parts, rule, received = REFUSED[name]
    facts = check(tmp_path, **parts)
    assert not facts.failures
    ((found, got, remedy),) = facts.problems
    assert found.startswith(rule)
    assert got == received
    assert remedy


def critic_twice(model: Gan, batch: Any, state: Any) -> torch.Tensor:
    """Trains the generator in the second batch only."""
    loss = losses_of(model, *batch, "discriminator")
    state.backward(loss, state.optimizers[0])
    if state.batch_index % 2:
        state.backward(losses_of(model, *batch, "generator"), state.optimizers[1])
    return loss.detach()


def with_penalty(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
    inputs, targets = batch
    inputs = inputs.requires_grad_()
    loss = state.criterion(model(inputs), targets)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.square().mean()


@pytest.mark.parametrize(
    "parts",
    [
        {"training_step": as_built_in},
        {"training_step": logging},
        {"training_step": with_penalty},
        {"training_step": as_built_in, "opt_fn": lambda model: optim.LBFGS(model.parameters())},
        {"training_step": as_built_in, "params": TrainerParams(precision="bf16")},
        GAN,
        {**GAN, "training_step": critic_twice},
    ],
)
def test_a_right_step_passes(tmp_path: Path, parts: dict[str, Any]) -> None:
    facts = check(tmp_path, **parts)
    assert (facts.problems, facts.failures) == ((), {})
    name = next(iter(parts.get("models", {"plain": Plain})))
    assert facts.flops[name] > 0
    assert facts.fusible[name] == "it has a training step of the user's own"


def test_all_optimizers_and_schedules_are_in_the_plan(tmp_path: Path) -> None:
    def described(opt_fn: Callable[[Any], Any]) -> Any:
        return check(tmp_path, **{**GAN, "opt_fn": opt_fn}).recipe["settings"]

    found = described(two_adams)
    assert found["gan"].startswith("Adam [")
    assert "; SGD [" in found["gan"]
    assert found["gan/constant"].count("ConstantLR") == 2
    assert described(lambda model: two_adams(model)[::-1]) != found
