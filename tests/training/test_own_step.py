"""Own steps, for training and validation: the bits of a plain loop, and rules that they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from asynckfold import CVResults
from tests.training.sweeps import (
    ONE_FOLD,
    epoch_batches,
    in_pieces,
    log_of,
    problems,
    results_of,
    seed_all,
    sgd,
    sweep,
    train,
)
from tests.training.tiny import CLASSES, FEATURES, Noisy, samples


def as_built_in(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
    inputs, targets = batch
    loss: torch.Tensor = state.criterion(model(inputs), targets)
    return loss


def logging(model: nn.Module, batch: Any, state: Any) -> dict[str, Any]:
    inputs, targets = batch
    outputs = model(inputs)
    state.log(epoch_index=state.epoch, batch_index=state.batch_index)
    hits = (outputs.argmax(1) == targets).float().mean()
    return {"loss": state.criterion(outputs, targets), "hits": hits}


def judged(model: nn.Module, batch: Any, state: Any) -> dict[str, Any]:
    """A validation step."""
    assert not model.training
    assert not torch.is_grad_enabled()
    return logging(model, batch, state)


class Gan(nn.Module):
    """A generator, and a discriminator whose outputs are the classes, and one for fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, FEATURES - 1))
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES - 1, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES + 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.discriminator(inputs[:, 1:])
        return outputs[:, :CLASSES]


def two(model: Gan) -> tuple[optim.Optimizer, ...]:
    return (
        optim.Adam(model.discriminator.parameters(), 0.01, foreach=False),
        optim.SGD(model.generator.parameters(), 0.05, momentum=0.9, foreach=False),
    )


def losses_of(model: Gan, inputs: torch.Tensor, targets: torch.Tensor, turn: str) -> torch.Tensor:
    fakes = model.generator(torch.randn(len(inputs), 4))
    fake = torch.full((len(inputs),), CLASSES)
    if turn == "discriminator":
        both = torch.cat([inputs[:, 1:], fakes.detach()])
        return nn.functional.cross_entropy(model.discriminator(both), torch.cat([targets, fake]))
    return -nn.functional.cross_entropy(model.discriminator(fakes), fake)


def adversarial(model: Gan, batch: Any, state: Any) -> dict[str, Any]:
    discriminating, generating = state.optimizers
    loss = losses_of(model, *batch, "discriminator")
    state.backward(loss, discriminating)
    fooled = losses_of(model, *batch, "generator")
    state.backward(fooled, generating)
    return {"loss": loss, "generator_loss": fooled}


GAN: dict[str, Any] = {"models": {"gan": Gan}, "opt_fn": two, "training_step": adversarial}


# One optimizer


def lbfgs(model: nn.Module) -> optim.Optimizer:
    return optim.LBFGS(model.parameters(), 0.1, max_iter=3)


@pytest.mark.parametrize(("opt_fn", "precision"), [(sgd, "fp32"), (sgd, "bf16"), (lbfgs, "fp32")])
def test_a_step_that_does_the_same_has_the_same_bits(
    tmp_path: Path, opt_fn: Any, precision: str
) -> None:
    params = {"lr_step": "batch", "clip_grad_norm": 0.5, "precision": precision}
    words: dict[str, Any] = {"schedules": ["onecycle"], "opt_fn": opt_fn, "params": params}
    built_in = train(tmp_path / "built in", {"noisy": Noisy}, **words)
    step = {"training_step": as_built_in}
    assert train(tmp_path / "step", {"noisy": Noisy}, **step, **words).digest == built_in.digest


def test_what_a_step_logs_is_in_the_epochs(tmp_path: Path) -> None:
    result = train(tmp_path / "run", training_step=logging)
    first, second = (dict(item.logged) for item in result.epochs)
    assert (first["epoch_index"], second["epoch_index"]) == (0, 1)
    assert first["batch_index"] == second["batch_index"] == 1.5
    assert 0 < first["hits"] < second["hits"] <= 1
    assert f"hits {first['hits']:.4g} " in log_of(tmp_path / "run")
    unlogged = train(tmp_path / "other", training_step=as_built_in)
    assert unlogged.weights == result.weights
    assert unlogged.digest != result.digest


def test_the_training_loss_is_the_mean_of_what_the_step_returns(tmp_path: Path) -> None:
    def constant(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
        return 0 * as_built_in(model, batch, state) + len(batch[0])

    # 40 samples: batches of 15, 15 and 10.
    mean = (15 * 15 + 15 * 15 + 10 * 10) / 40
    for reduction in ("mean", "sum"):
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        words = {"training_step": constant, "criterion": criterion, "batch_size": 15}
        result = train(tmp_path / reduction, **words)
        assert [item.train_loss for item in result.epochs] == [mean, mean]


def test_a_step_may_keep_a_state_that_no_other_job_sees(tmp_path: Path) -> None:
    class Counting:
        calls = 0

        def __call__(self, model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
            self.calls += 1
            state.log(calls=self.calls)
            return as_built_in(model, batch, state)

    for result in results_of(tmp_path / "run", training_step=Counting()).values():
        assert [item.logged["calls"] for item in result.epochs] == [2.5, 6.5]


# Several optimizers


def plainly(results: CVResults, epochs: int, clip: float | None) -> dict[str, torch.Tensor]:
    """Train as a plain PyTorch loop does; return the weights."""
    (inputs, targets), (job,) = map(torch.from_numpy, samples()), results.plan.jobs
    seed_all(job.seed)
    model = Gan()
    optimizers = two(model)
    schedules = [optim.lr_scheduler.CosineAnnealingLR(item, T_max=epochs) for item in optimizers]
    for epoch in range(epochs):
        model.train()
        for rows in epoch_batches(results.folds[0].train, job.seed, epoch):
            for optimizer, turn in zip(optimizers, ["discriminator", "generator"], strict=True):
                loss = losses_of(model, inputs[rows], targets[rows], turn)
                optimizer.zero_grad()
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
                optimizer.step()
        for schedule in schedules:
            schedule.step()
    return model.state_dict()


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_gan_has_the_weights_of_a_plain_loop(tmp_path: Path, clip: float | None) -> None:
    params = {"epochs": 3, "clip_grad_norm": clip}
    results = sweep(tmp_path / "run", schedules=["cosine"], params=params, cv=ONE_FOLD, **GAN)
    trained, plain = results.state_dict("gan/cosine", fold=0), plainly(results, 3, clip)
    assert all(torch.equal(value, trained[name]) for name, value in plain.items())
    (result,) = results.results.values()
    assert all(set(item.logged) == {"generator_loss"} for item in result.epochs)


@pytest.mark.parametrize("each", ["epoch", "batch"])
def test_several_optimizers_continue_after_every_batch(tmp_path: Path, each: str) -> None:
    words = {**GAN, "schedules": ["onecycle"], "params": {"lr_step": each}}
    words["validation_step"] = judged
    whole = train(tmp_path / "whole", **words)
    pieces, attempts = in_pieces(tmp_path / "pieces", **words)
    assert attempts > 4
    assert (pieces.digest, pieces.scores) == (whole.digest, whole.scores)
    assert set(whole.epochs[0].logged) >= {"generator_loss", "hits"}
    assert "generator_loss" not in whole.scores


def test_bfloat16_uses_the_weights_of_the_last_step(tmp_path: Path) -> None:
    """Autocast must not compute the generator's loss with old weights of the discriminator."""
    seen: list[bool] = []

    def watched(model: Gan, batch: Any, state: Any) -> Any:
        logged = adversarial(model.eval(), batch, state)
        outputs = model(batch[0])
        torch.clear_autocast_cache()
        seen.append(torch.equal(outputs, model(batch[0])))
        return logged

    params = {"epochs": 1, "precision": "bf16"}
    train(tmp_path / "run", **{**GAN, "training_step": watched}, params=params)
    assert set(seen) == {True}


# Validation


SMALL = {"eval_batch_size": 8}
"""The held-out fold of 20 samples in batches of 8, 8 and 4."""


def test_measures_are_means_over_the_samples_of_the_fold(tmp_path: Path) -> None:
    words = {"models": {"m": Noisy}, "params": SMALL}
    own = train(tmp_path / "own", validation_step=judged, **words)
    built_in = train(tmp_path / "built-in", **words)
    assert own.weights == built_in.weights
    for number, (one, other) in enumerate(zip(own.epochs, built_in.epochs, strict=True)):
        assert one.logged["hits"] == pytest.approx(other.accuracy)
        assert one.valid_loss == pytest.approx(other.valid_loss)
        assert one.logged["batch_index"] == (8 * 0 + 8 * 1 + 4 * 2) / 20
        assert one.logged["epoch_index"] == number
        assert (one.train_loss, one.accuracy) == (other.train_loss, other.accuracy)


def test_without_a_loss_the_criterion_scores_and_a_loss_of_nan_diverges(tmp_path: Path) -> None:
    def only_logging(model: nn.Module, batch: Any, state: Any) -> None:
        state.log(size=len(batch[0]))

    def broken(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
        return torch.tensor(float("nan"))

    own = train(tmp_path / "own", params=SMALL, validation_step=only_logging)
    built_in = train(tmp_path / "built-in", params=SMALL)
    losses = [[item.valid_loss for item in run.epochs] for run in (own, built_in)]
    assert losses[0] == losses[1]
    assert own.epochs[-1].logged == {"size": (64 + 64 + 16) / 20}
    assert train(tmp_path / "nan", validation_step=broken).status == "diverged"


# Rules


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
    logged = adversarial(model, batch, state)
    state.optimizers[1].step()
    return logged


def step(function: Any) -> dict[str, Any]:
    return {"training_step": function}


def validation(function: Any) -> dict[str, Any]:
    return {"validation_step": function}


ONE = "with one optimizer, a training_step returns the loss"
SEVERAL = "with several optimizers, a training_step trains by state.backward"
LOSS = "training_step must give one number with a gradient as loss"
COLUMN = "what a step logs must not have the name of another column of the epochs"
NUMBERS = "what is logged must be numbers"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (step(lambda model, batch, state: None), LOSS, "None"),
    (step(lambda model, batch, state: {"loss": None}), LOSS, "None"),
    (step(lambda *call: {"hits": 1.0}), "a dict that training_step returns", "a dict of hits"),
    (step(lambda model, batch, state: model(batch[0])), LOSS, "a tensor of shape (10, 3)"),
    (step(lambda *call: as_built_in(*call).detach()), LOSS, "requires_grad=False"),
    (step(lambda model, batch, state: state.log(lr=1)), COLUMN, "'lr'"),
    (step(lambda model, batch, state: state.log(name="a")), NUMBERS, "name='a'"),
    (step(with_backward), ONE, "a call of backward()"),
    (step(with_optimizer_step), ONE, "a call of optimizer.step()"),
    (
        step(lambda model, batch, state: state.backward(1, state.optimizer)),
        ONE,
        "a call of state.backward",
    ),
    ({**GAN, **step(None)}, "opt_fn must return a torch.optim.Optimizer", "a tuple of 2"),
    ({**GAN, **step(by_hand)}, SEVERAL, "1 steps of optimizers and 0 calls of it"),
    ({**GAN, **step(both_ways)}, SEVERAL, "3 steps of optimizers and 2 calls of it"),
    (
        {
            **step(lambda model, batch, state: model(batch[0]).mean()),
            "criterion": nn.CrossEntropyLoss(reduction="none"),
        },
        "the criterion of model plain must give one number",
        "a tensor of shape (10,)",
    ),
    (
        validation(lambda model, batch, state: None),
        "validation_step must measure something",
        "a function that returns and logs nothing",
    ),
    (
        validation(lambda model, batch, state: model(batch[0])),
        "validation_step must give one number as loss",
        "a tensor of shape (10, 3), requires_grad=False",
    ),
    (validation(lambda model, batch, state: {"accuracy": 1.0}), COLUMN, "'accuracy'"),
    (
        {**step(logging), **validation(judged)},
        "training_step and validation_step must log different names",
        "'batch_index', 'epoch_index', 'hits'",
    ),
]


def test_a_broken_rule_is_refused(tmp_path: Path) -> None:
    for number, (parts, rule, received) in enumerate(REFUSED):
        ((broken, what, remedy),) = problems(tmp_path / str(number), **parts)
        assert broken.startswith(rule)
        assert received in what
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


def test_a_right_step_passes(tmp_path: Path) -> None:
    for number, parts in enumerate(
        [step(with_penalty), {**GAN, "training_step": critic_twice}, validation(judged)]
    ):
        assert train(tmp_path / str(number), **parts).status == "done"


def test_all_optimizers_and_schedules_are_in_the_plan(tmp_path: Path) -> None:
    settings = sweep(tmp_path / "run", cv=ONE_FOLD, **GAN).plan.recipe["settings"]
    assert settings["gan"].startswith("Adam [")
    assert "; SGD [" in settings["gan"]
    assert settings["gan/constant"].count("ConstantLR") == 2
