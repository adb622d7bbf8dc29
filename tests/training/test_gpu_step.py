"""A step on a GPU: what it asks of the host, and that it draws the numbers of the CPU."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asynckfold import TrainerParams
from asynckfold.data.batches import Batches, _ArrayView
from asynckfold.data.transforms.random_numbers import Draw
from asynckfold.data.transforms.steps import Normalize, RandomCrop, RandomFlip, ToFloat
from asynckfold.data.views import View
from asynckfold.jobs.messages import Task
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import setup
from asynckfold.training.fusion import group as group_trainer
from asynckfold.training.job_log import NoLog
from asynckfold.training.training_run import Training
from tests.training.counting import Counting
from tests.training.fusion.test_trainer import Grouped, raised
from tests.training.sweeps import sgd
from tests.training.tiny import Tiny

META = torch.device("meta")
STEPS = (
    ToFloat(),
    RandomCrop((8, 8), (2, 2, 2, 2)),
    RandomFlip(),
    Normalize((0.5,) * 3, (0.2,) * 3),
)


def images(count: int = 60) -> Batches:
    array = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (count, 3, 8, 8)).astype(np.uint8)
    )
    train, valid = (_ArrayView(array, View((), None, steps, ())) for steps in (STEPS, STEPS[:1]))
    return Batches(torch.arange(count) % 3, train, valid)


class Conv(nn.Module):
    """A convolution with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()
        )
        self.last = nn.Linear(4 * 6 * 6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layers(inputs))
        return found


class Event:
    """Says that it happened."""

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def training_on_meta(root: Path, data: Batches, criterion: Any) -> Training:
    params = TrainerParams(epochs=2, print_frequency=1, clip_grad_norm=1.0)
    tiny = Tiny(root, {"conv": Conv}, params=params, criterion=criterion)
    return setup.build(tiny.bundle, Task(tiny.jobs[0]), data, META, NoLog(), Heartbeat())


@pytest.mark.parametrize(
    ("criterion", "sent"),
    [
        (nn.functional.cross_entropy, 2),
        # Whether all samples count equally is found on the device.
        (nn.CrossEntropyLoss(), 3),
        (nn.CrossEntropyLoss(torch.ones(3)), 3),
    ],
)
def test_the_host_waits_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, criterion: Any, sent: int
) -> None:
    """The numbers of samples and the draws of an epoch are sent once."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    training = training_on_meta(tmp_path, images(), criterion)
    with training.log, Counting() as mode:
        training.begin_epoch()
        begun = mode.take()
        # The order, and the draws of two steps.
        assert (begun.sent, begun.synchronisations) == (3, 0), begun
        training.step()
        mode.take()
        for _ in range(training.batches - 1):
            training.step()
            training.report_progress(lambda event: None)
            step = mode.take()
            # A loss for the log, for which nothing waits.
            assert (step.sent, step.fetched, step.synchronisations) == (0, 1, 0), step
        training.end_epoch(0.0, lambda event: None)
        ended = mode.take()
        # One tensor: losses, outputs, loss and accuracy of the evaluation.
        assert (ended.sent, ended.fetched, ended.synchronisations) == (sent, 1, 1), ended


@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="sum")],
)
def test_an_epoch_that_is_fetched_at_once_has_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, criterion: Any
) -> None:
    words = {"criterion": criterion, "opt_fn": sgd, "batch_size": 12}
    on_cores = Tiny(tmp_path / "cores", **words).train()
    tiny = Tiny(tmp_path / "device", **words)
    # As if the tensors were on a device: all that follows from it is how they are fetched.
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    found = tiny.train()
    for one, other in zip(found.epochs, on_cores.epochs, strict=True):
        assert replace(one, seconds=0.0) == replace(other, seconds=0.0)
    assert found.outputs is not None
    assert on_cores.outputs is not None
    assert found.outputs.tobytes() == on_cores.outputs.tobytes()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.floats(0, 1))
@settings(deadline=None)
def test_a_gpu_draws_what_a_cpu_draws(bits: list[int], p: float) -> None:
    class Fixed(Draw):
        def bits(self) -> Any:
            return np.array(bits, np.int64).view(np.uint64)

    draw, sent = Fixed(0, 0, np.arange(len(bits))), torch.tensor(bits)
    assert torch.equal(draw.bits_on(torch.device("cpu")), sent)
    chances = (draw.bits() >> np.uint64(11)) * 2.0**-53
    assert RandomFlip(p).flips(sent).tolist() == (chances < p).tolist()
    for counts in ((1, 1), (5, 9), (4000, 3)):
        words = draw.bits() >> np.uint64(32), draw.bits() & np.uint64(2**32 - 1)
        for count, word, corners in zip(
            counts, words, RandomCrop.corners(*counts, sent), strict=True
        ):
            assert corners.tolist() == ((word * np.uint64(count)) >> np.uint64(32)).tolist()


# A fusion group


def test_the_host_waits_for_no_step_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a single job: sample numbers and draws of an epoch are sent once."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    params = TrainerParams(epochs=2, clip_grad_norm=1.0)
    # The mean of nn.CrossEntropyLoss depends on values of the targets, which are not there.
    tiny = Grouped(tmp_path, {"conv": Conv}, params=params, criterion=nn.functional.cross_entropy)
    with ExitStack() as logs:
        tasks = [Task(job) for job in tiny.jobs]
        group = group_trainer.build(tiny.bundle, tasks, images(), META, Heartbeat(), logs, raised)
        # torch does not know the device's autocast.
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
        with Counting() as mode:
            group.begin_epoch()
            begun = mode.take()
            # For each job its order, and the draws of two steps.
            assert (begun.sent, begun.synchronisations) == (3 * len(tiny.jobs), 0), begun
            group.step()
            mode.take()
            for _ in range(group.batches - 1):
                group.step()
                step = mode.take()
                assert (step.sent, step.fetched, step.synchronisations) == (0, 0, 0), step


def test_batches_by_draws_that_were_sent_are_those_that_are_gathered_together() -> None:
    data, generator = images(), np.random.default_rng(1)
    orders = [generator.permutation(60) for _ in range(3)]
    seeds = [7, 8, 9]
    for low, high in ((0, 16), (50, 60)):
        parts = [order[low:high] for order in orders]
        rows = torch.from_numpy(np.stack(parts))
        keys = [(seed, 3, part) for seed, part in zip(seeds, parts, strict=True)]
        bits = [np.stack([Draw(*key, place).bits() for key in keys]) for place in (1, 2)]
        draws = [torch.from_numpy(item.view(np.int64)) for item in bits]
        found = data.train_on_device(rows, *draws)
        for one, other in zip(found, data.train_together(rows, seeds, 3), strict=True):
            assert torch.equal(one, other)
