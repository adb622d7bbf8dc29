"""Trainers of several processes that promise the same bits: gradients added up, clones averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from asynckfold import TrainerParams
from asynckfold.jobs.messages import CheckpointRef, Note, RunEvent
from asynckfold.jobs.result import AveragingSummary
from asynckfold.training import checkpoint
from tests.training.multiprocess.attempts import (
    OPTIMIZERS,
    attempt,
    counting,
    params,
    problems,
    train,
    train_with_stops,
)
from tests.training.tiny import Noisy, Plain, Tiny, checkpoints


def weights(tiny: Tiny, events: list[RunEvent]) -> dict[str, Any]:
    """The parameters and buffers at the end of a job."""
    ref = checkpoints(events)[0]
    return checkpoint.load(tiny.root / ref.file, ref.sha256)["model"]


# Both


PARTS = {"partition_size": 15, "steps_per_round": 1}


@pytest.mark.nightly(but=["allreduce-momentum-how0", "averaging-adam-how1"])
@pytest.mark.parametrize(
    ("trainer", "optimizer", "how"),
    [
        ("allreduce", "momentum", {}),
        ("averaging", "adam", {"epochs_per_round": 2}),
        ("averaging", "momentum", {}),
        ("averaging", "momentum", PARTS),
    ],
)
def test_again_or_stopped_after_every_step_the_bits_are_the_same(
    tmp_path: Path, trainer: str, optimizer: str, how: dict[str, int]
) -> None:
    def tiny(name: str) -> Tiny:
        return Tiny(
            tmp_path / name,
            {"noisy": Noisy},
            # It has to know how many batches there will be.
            {"onecycle": "onecycle"},
            OPTIMIZERS[optimizer],
            params=params(trainer, 3, epochs=2, lr_step="batch", **how),
        )

    result, attempts = train_with_stops(tiny("stopped"))
    assert attempts > 2
    once = train(tiny("once"))
    assert result.weights == once.weights
    np.testing.assert_array_equal(result.outputs, once.outputs)
    losses = [[item.train_loss for item in found.epochs] for found in (result, once)]
    assert losses[0] == losses[1]
    # What was done before a stop counts.
    assert result.averaged == once.averaged
    assert (once.averaged is not None) == (trainer == "averaging")


# Gradients added up


def close(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name])


class Smooth(nn.Module):
    """Has no gradients near zero, whose sign Rprop follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs / 30)
        return found


RPROP = {"models": {"mlp": Smooth}, "opt_fn": OPTIMIZERS["rprop"], "batch_size": 1000}


@pytest.mark.parametrize(
    ("parts", "epochs", "clip"),
    [
        ({}, 3, 0.5),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, 3, None),
        (RPROP, 8, None),
    ],
    ids=["mean", "sum", "rprop on all samples"],
)
def test_several_take_the_steps_of_one_to_rounding(
    tmp_path: Path, parts: dict[str, Any], epochs: int, clip: float | None
) -> None:
    def opt_fn(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), 0.01, momentum=0.5)

    def tiny(name: str, given: TrainerParams) -> Tiny:
        words = {"opt_fn": opt_fn, "batch_size": 7, **parts}
        return Tiny(tmp_path / name, params=given, **words)

    several = tiny("several", params("allreduce", 3, epochs=epochs, clip_grad_norm=clip))
    alone = tiny("alone", TrainerParams(epochs=epochs, clip_grad_norm=clip))
    runs = attempt(several), alone.attempt()
    close(*(weights(item, run[1]) for item, run in zip((several, alone), runs, strict=True)))
    mine, theirs = ([item.train_loss for item in result.epochs] for result, _ in runs)
    assert mine == pytest.approx(theirs, rel=1e-5)


# Clones averaged


def test_a_mean_of_clones_is_weighted_by_samples(tmp_path: Path) -> None:
    """One epoch of plain SGD by hand: the first batch alone, then a round."""

    def opt_fn(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), 0.1)

    # 40 samples of the fold in batches of 15: one alone, then 15 and 10.
    given = params("averaging", 2, epochs=1, steps_per_round=4)
    tiny = Tiny(tmp_path / "run", opt_fn=opt_fn, params=given, batch_size=15)
    averaged = weights(tiny, attempt(tiny)[1])
    alone = Tiny(tmp_path / "alone", opt_fn=opt_fn, params=TrainerParams(epochs=1), batch_size=15)
    refs: list[CheckpointRef] = []
    _, events = alone.attempt(stop=lambda: True)
    refs = checkpoints(events)
    first = checkpoint.load(alone.root / refs[0].file, refs[0].sha256)["model"]
    from asynckfold.training.batches import epoch_order

    order = epoch_order(tiny.bundle.folds[0].train, tiny.jobs[0].seed, 0)
    clones = []
    for low, high in ((15, 30), (30, 40)):
        clone = Plain()
        clone.load_state_dict(first)
        optimizer = opt_fn(clone)
        inputs, targets = tiny.batches.train(order[low:high], 0, 0)
        nn.functional.cross_entropy(clone(inputs), targets).backward()
        optimizer.step()
        clones.append(clone.state_dict())
    for name, value in averaged.items():
        torch.testing.assert_close(value, 0.6 * clones[0][name] + 0.4 * clones[1][name])


def test_it_tells_rounds_time_and_samples_of_each(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, params=params("averaging", 2, epochs=2, print_frequency=3), batch_size=5)
    result, events = attempt(tiny)
    (told,) = [item for item in events if isinstance(item, Note)]
    assert told.kind == "averaging"
    # 8 batches an epoch: the very first alone, then rounds of 4.
    assert "4 rounds in" in told.text
    assert "samples × epochs of each process: 45, 35" in told.text
    assert result is not None
    assert result.averaged == AveragingSummary(4, (45, 35))
    assert told.text in tiny.log()
    assert [f"batch {batch}/8" in tiny.log() for batch in (1, 4, 5, 8)] == [False, True, True, True]


# Hogwild, several batches an update


def test_an_update_of_several_batches_is_one_of_a_greater_batch(tmp_path: Path) -> None:
    def tiny(name: str, given: TrainerParams, batch_size: int) -> Tiny:
        return Tiny(tmp_path / name, params=given, batch_size=batch_size)

    # 40 samples: batches of 7 with an end of 5, three an update, against batches of 21.
    small = tiny("small", params("hogwild", 1, accumulate=3), 7)
    great = tiny("great", TrainerParams(epochs=3), 21)
    close(weights(small, attempt(small)[1]), weights(great, great.attempt()[1]))


# Refusals and formats


def test_what_an_optimizer_keeps_must_suit_the_trainer(tmp_path: Path) -> None:
    def tiny(trainer: str) -> Tiny:
        return Tiny(tmp_path / trainer, opt_fn=counting, params=params(trainer))

    assert problems(tiny("allreduce")) == []
    ((rule, received, remedy),) = problems(tiny("averaging"))
    assert rule.startswith("trainer='averaging' needs an optimizer that keeps tensors only")
    assert rule.endswith("keeps tensors only")
    assert "Counting, whose seen is a int" in received
    assert "such as SGD or Adam" in remedy
