"""A `training_step` of the user's own: the bits of the built-in step, and of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from asynckfold import TrainerParams
from asynckfold.jobs.messages import EpochEnd
from asynckfold.jobs.result import DONE
from asynckfold.training import seeding
from asynckfold.training.batches import epoch_order
from asynckfold.training.checkpoint import weights_digest
from asynckfold.training.optimizers import with_fused_kernel
from asynckfold.training.user_steps import StepError
from tests.training.test_loop import OPTIMIZERS
from tests.training.tiny import CLASSES, FEATURES, Noisy, Tiny, samples


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


class Gan(nn.Module):
    """A generator, and a discriminator whose outputs are the classes, and one for fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, FEATURES - 1))
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES - 1, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES + 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.discriminator(inputs[:, 1:])
        return found[:, :CLASSES]


def two_adams(model: Gan) -> tuple[optim.Optimizer, ...]:
    return (
        optim.Adam(model.discriminator.parameters(), 0.01),
        optim.SGD(model.generator.parameters(), 0.05, momentum=0.9),
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


def gan(root: Path, **parts: Any) -> Tiny:
    given = {"opt_fn": two_adams, "training_step": adversarial, **parts}
    return Tiny(root, {"gan": Gan}, **given)


# ---- one optimizer ----


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "lbfgs"])
def test_a_step_that_does_the_same_has_the_same_bits(
    tmp_path: Path, optimizer: str, precision: Any
) -> None:
    def make(name: str, **parts: Any) -> Tiny:
        params = TrainerParams(epochs=2, lr_step="batch", clip_grad_norm=0.5, precision=precision)
        given = {"opt_fn": OPTIMIZERS[optimizer], "params": params, **parts}
        return Tiny(tmp_path / name, {"noisy": Noisy}, {"onecycle": "onecycle"}, **given)

    expected = make("built-in").train()
    assert make("own", training_step=as_built_in).train().digest == expected.digest
    assert make("unclipped", params=TrainerParams(epochs=2)).train().digest != expected.digest


def test_what_a_step_logs_is_in_the_epochs(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", training_step=logging)
    result, events = tiny.attempt()
    assert result is not None
    first, second = (dict(item.logged) for item in result.epochs)
    assert (first["epoch_index"], second["epoch_index"]) == (0, 1)
    assert first["batch_index"] == second["batch_index"] == 1.5
    assert 0 < first["hits"] < second["hits"] <= 1
    ended = [item.epoch for item in events if isinstance(item, EpochEnd)]
    assert [item.logged for item in ended] == [first, second]
    assert f"hits {first['hits']:.4g} " in tiny.log()
    unlogged = Tiny(tmp_path / "other", training_step=as_built_in).train()
    assert unlogged.weights == result.weights
    assert unlogged.digest != result.digest


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_training_loss_is_the_mean_of_what_the_step_returns(
    tmp_path: Path, reduction: str
) -> None:
    def constant(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
        return 0 * as_built_in(model, batch, state) + len(batch[0])

    # 40 samples: batches of 15, 15 and 10.
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    tiny = Tiny(tmp_path, training_step=constant, criterion=criterion, batch_size=15)
    mean = (15 * 15 + 15 * 15 + 10 * 10) / 40
    assert [item.train_loss for item in tiny.train().epochs] == [mean, mean]


def test_a_step_may_keep_a_state_that_no_other_job_sees(tmp_path: Path) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
            self.calls += 1
            state.log(calls=self.calls)
            return as_built_in(model, batch, state)

    tiny = Tiny(tmp_path, training_step=Counting())
    for job in tiny.jobs[:2]:
        assert [item.logged["calls"] for item in tiny.train(job).epochs] == [2.5, 6.5]


@pytest.mark.parametrize(
    ("step", "received"),
    [
        (lambda model, batch, state: None, "None"),
        (lambda model, batch, state: {"loss": None}, "None"),
        (lambda model, batch, state: {"los": 1}, "a dict of los"),
        (lambda model, batch, state: model(batch[0]), r"shape \(10, 3\)"),
        (lambda model, batch, state: as_built_in(model, batch, state).detach(), "=False"),
        (lambda model, batch, state: as_built_in(model, batch, state).item(), r"\d\.\d"),
        (lambda model, batch, state: state.log(lr=1), "'lr'"),
        (lambda model, batch, state: state.log(name="a"), "name='a'"),
        (lambda model, batch, state: state.log(name=torch.ones(2)), r"name=tensor\("),
        (lambda model, batch, state: state.backward(0, state.optimizer), "state.backward"),
    ],
)
def test_a_step_that_breaks_a_rule_raises(
    tmp_path: Path, step: Callable[..., Any], received: str
) -> None:
    with pytest.raises(StepError, match=f": received .*{received}"):
        Tiny(tmp_path, training_step=step).train()


# ---- several optimizers ----


def plainly(tiny: Tiny, epochs: int, clip: float | None) -> str:
    """Train as a plain PyTorch loop does; return the digest of the weights."""
    (inputs, targets), job = samples(), tiny.jobs[0]
    seeding.seed_all(job.seed)
    model = Gan()
    optimizers = with_fused_kernel(two_adams, model).parts
    schedules = [optim.lr_scheduler.CosineAnnealingLR(item, T_max=epochs) for item in optimizers]
    train = tiny.bundle.fold_of(job).train
    for epoch in range(epochs):
        seeding.seed_all(seeding.epoch_seed(job.seed, epoch))
        order = epoch_order(train, job.seed, epoch)
        model.train()
        for low in range(0, len(order), 10):
            rows = order[low : low + 10]
            batch = torch.from_numpy(inputs[rows]), torch.from_numpy(targets[rows])
            for optimizer, turn in zip(optimizers, ["discriminator", "generator"], strict=True):
                loss = losses_of(model, *batch, turn)
                optimizer.zero_grad()
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
                optimizer.step()
        for schedule in schedules:
            schedule.step()
    return weights_digest(model.state_dict())


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_gan_has_the_weights_of_a_plain_loop(tmp_path: Path, clip: float | None) -> None:
    params = TrainerParams(epochs=3, clip_grad_norm=clip)
    tiny = gan(tmp_path, lr_schedules={"cosine": "cosine"}, params=params)
    result = tiny.train()
    assert result.status == DONE
    assert result.weights == plainly(tiny, 3, clip)
    assert result.weights != plainly(tiny, 3, 0.2)
    assert all(set(item.logged) == {"generator_loss"} for item in result.epochs)


@pytest.mark.parametrize("schedule", ["cosine", "onecycle", "reduce"])
@pytest.mark.parametrize("each", ["epoch", "batch"])
def test_several_optimizers_continue_after_every_batch(
    tmp_path: Path, schedule: str, each: Any
) -> None:
    def make(name: str) -> Tiny:
        params = TrainerParams(epochs=2, lr_step=each)
        return gan(tmp_path / name, lr_schedules={schedule: schedule}, params=params)

    parts, attempts = make("parts").train_with_stops()
    assert attempts > 4
    assert parts.digest == make("whole").train().digest


def test_bfloat16_uses_the_weights_of_the_last_step(tmp_path: Path) -> None:
    """Autocast must not compute the generator's loss with old weights of the discriminator."""
    seen: list[bool] = []

    def watched(model: Gan, batch: Any, state: Any) -> Any:
        found = adversarial(model.eval(), batch, state)
        outputs = model(batch[0])
        torch.clear_autocast_cache()
        seen.append(torch.equal(outputs, model(batch[0])))
        return found

    params = TrainerParams(epochs=1, precision="bf16")
    gan(tmp_path, training_step=watched, params=params).train()
    assert seen == [True] * 4
