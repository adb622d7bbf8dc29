"""A `validation_step` of the user's own: means over the held-out fold, and what they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import TrainerParams
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.result import DIVERGED
from asynckfold.training.dry_run import preflight
from asynckfold.training.user_steps import StepError
from tests.training.test_own_step import Gan as Adversaries
from tests.training.test_own_step import adversarial, logging, two_adams
from tests.training.tiny import Noisy, Tiny, checkpoints

SMALL = TrainerParams(epochs=2, eval_batch_size=8)
"""The held-out fold of 20 samples in batches of 8, 8 and 4."""


def judged(model: nn.Module, batch: Any, state: Any) -> dict[str, Any]:
    inputs, targets = batch
    assert not model.training
    assert not torch.is_grad_enabled()
    outputs = model(inputs)
    state.log(batch_index=state.batch_index, epoch_index=state.epoch)
    hits = (outputs.argmax(1) == targets).double().mean()
    return {"loss": state.criterion(outputs, targets), "hits": hits}


def test_measures_are_means_over_the_samples_of_the_fold(tmp_path: Path) -> None:
    own = Tiny(tmp_path / "own", {"m": Noisy}, params=SMALL, validation_step=judged).train()
    built_in = Tiny(tmp_path / "built-in", {"m": Noisy}, params=SMALL).train()
    assert own.weights == built_in.weights
    for number, (one, other) in enumerate(zip(own.epochs, built_in.epochs, strict=True)):
        assert one.logged["hits"] == pytest.approx(other.accuracy)
        assert one.valid_loss == pytest.approx(other.valid_loss)
        assert one.logged["batch_index"] == (8 * 0 + 8 * 1 + 4 * 2) / 20
        assert one.logged["epoch_index"] == number
        assert (one.train_loss, one.accuracy) == (other.train_loss, other.accuracy)
    assert own.scores == own.epochs[-1].logged


def test_without_a_loss_the_criterion_scores(tmp_path: Path) -> None:
    def only_logging(model: nn.Module, batch: Any, state: Any) -> None:
        state.log(size=len(batch[0]))

    own = Tiny(tmp_path / "own", params=SMALL, validation_step=only_logging).train()
    built_in = Tiny(tmp_path / "built-in", params=SMALL).train()
    found, expected = ([item.valid_loss for item in run.epochs] for run in (own, built_in))
    assert found == expected
    assert own.scores == {"size": (64 + 64 + 16) / 20}


def test_a_job_continues_with_the_same_measures(tmp_path: Path) -> None:
    def make(name: str) -> Tiny:
        given = {"training_step": adversarial, "opt_fn": two_adams, "validation_step": judged}
        return Tiny(tmp_path / name, {"gan": Adversaries}, params=SMALL, **given)

    whole, (parts, attempts) = make("whole").train(), make("parts").train_with_stops()
    assert attempts > 4
    assert (parts.digest, parts.scores) == (whole.digest, whole.scores)
    assert set(whole.epochs[0].logged) >= {"generator_loss", "hits"}
    assert "generator_loss" not in whole.scores
    tiny = make("again")
    _, events = tiny.attempt()
    again, _ = tiny.attempt(None, 2, checkpoints(events))
    assert again is not None
    assert again.scores == whole.scores


def test_a_loss_that_is_nan_diverges(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
        return torch.tensor(float("nan"))

    assert Tiny(tmp_path, validation_step=broken).train().status == DIVERGED


def test_both_steps_must_log_different_names(tmp_path: Path) -> None:
    names = "'batch_index', 'epoch_index', 'hits'"
    tiny = Tiny(tmp_path, validation_step=judged, training_step=logging)
    with pytest.raises(StepError, match=f"must log different names: received {names}. Rename"):
        tiny.train()
    ((_, received, _),) = preflight.check(tiny.bundle, tiny.batches).problems
    assert received == names


def check(tmp_path: Path, step: Callable[..., Any]) -> Facts:
    tiny = Tiny(tmp_path, validation_step=step)
    return preflight.check(tiny.bundle, tiny.batches)


@pytest.mark.parametrize(
    ("step", "rule", "received"),
    [
        (
            lambda model, batch, state: None,
            "validation_step must measure something",
            "a function that returns and logs nothing",
        ),
        (
            lambda model, batch, state: model(batch[0]),
            "validation_step must give one number as loss",
            "a tensor of shape (10, 3), requires_grad=False",
        ),
        (
            lambda model, batch, state: {"accuracy": 1.0},
            "what a step logs must not have the name of another column of the epochs",
            "'accuracy'",
        ),
        (
            lambda model, batch, state: state.backward(torch.ones(()), state.optimizer),
            "with one optimizer, a training_step returns the loss and leaves the rest to "
            "asynckfold",
            "a call of state.backward",
        ),
    ],
)
def test_a_broken_rule_is_refused(
    tmp_path: Path, step: Callable[..., Any], rule: str, received: str
) -> None:
    facts = check(tmp_path, step)
    assert not facts.failures
    assert [found[:2] for found in facts.problems] == [(rule, received)]


def test_a_right_step_passes(tmp_path: Path) -> None:
    facts = check(tmp_path, judged)
    assert (facts.problems, facts.failures) == ((), {})
    assert facts.fusible["plain"] == "it has a validation step of the user's own"
