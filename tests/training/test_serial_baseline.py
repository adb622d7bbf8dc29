"""The serial baseline: the same work as the sweep, in the ordinary way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn, optim
from torch.utils.data import Dataset

from asynckfold import TrainerParams
from asynckfold.training import serial_baseline
from tests.training.tiny import (
    FEATURES,
    Noisy,
    Plain,
    Seen,
    Tiny,
    never,
    samples,
    sgd,
    watched,
)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), 0.1)


class Counting(Dataset[Any]):
    """Counts how often each sample is read."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.inner[index]


@pytest.mark.parametrize("schedule", ["cosine", "reduce"])
@pytest.mark.parametrize("step", ["epoch", "batch"])
def test_it_sees_the_batches_of_the_sweep_in_their_order(
    tmp_path: Path, schedule: str, step: str
) -> None:
    ours, theirs = Seen(), Seen()

    def make(target: Seen) -> Tiny:
        return Tiny(
            tmp_path,
            {"noisy": watched(Noisy, target)},
            {schedule: schedule},
            params=TrainerParams(2, lr_step=step),
            batch_size=13,
        )

    sweep, serial = make(ours), make(theirs)
    for job in sweep.jobs:
        sweep.train(job)
    assert serial_baseline.measure(serial.bundle, serial.batches, never) is not None
    assert ours.of(training=True) == theirs.of(training=True)
    assert len(set(map(tuple, ours.of(training=True)))) == len(ours.of(training=True))
    counts = [
        Counter(number for batch in side.of(training=False) for number in batch)
        for side in (ours, theirs)
    ]
    assert counts[0] == counts[1]


def test_it_reads_sample_by_sample_from_the_views_of_the_user(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path)
    views = tuple(Counting(view) for view in tiny.bundle.ordinary)
    tiny.bundle = replace(tiny.bundle, ordinary=views)
    serial_baseline.measure(tiny.bundle, tiny.batches, never)
    train, valid = (view.read for view in views)
    epochs = tiny.params.epochs
    assert train == Counter(dict.fromkeys(range(60), 2 * epochs))
    assert valid == Counter(dict.fromkeys(range(60), epochs))


def test_its_accuracy_and_losses_are_those_of_the_sweep(tmp_path: Path) -> None:
    tiny = Tiny(
        tmp_path,
        {"plain": Plain, "noisy": Noisy},
        {"cosine": "cosine", "reduce": "reduce"},
        sgd,
        params=TrainerParams(6),
        data=samples(180),
    )
    measured = serial_baseline.measure(tiny.bundle, tiny.batches, never)
    assert measured is not None
    ours = {job.id: tiny.train(job) for job in tiny.jobs}
    assert measured.by_job == {name: result.epochs[-1].accuracy for name, result in ours.items()}
    for name, result in ours.items():
        losses = [loss for _, loss in measured.epochs[name]]
        # Rounding alone: Adam would amplify that of a bias before BatchNorm, whose gradient is 0.
        assert losses == pytest.approx([item.train_loss for item in result.epochs], rel=1e-4)
    for candidate in {job.candidate for job in tiny.jobs}:
        assert measured.accuracy[candidate] > 0.8
        own = [measured.by_job[job.id] for job in tiny.jobs if job.candidate == candidate]
        assert measured.accuracy[candidate] == pytest.approx(np.mean(own))


def test_seconds_add_up(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, {"a": Plain, "b": Plain})
    started = time.perf_counter()
    measured = serial_baseline.measure(tiny.bundle, tiny.batches, never)
    passed = time.perf_counter() - started
    assert measured is not None
    assert measured.kind == "measured"
    assert measured.threads == torch.get_num_threads()
    assert set(measured.by_candidate) == {"a/constant", "b/constant"}
    assert measured.seconds == pytest.approx(sum(measured.by_candidate.values()))
    assert 0.5 * passed < measured.seconds <= passed


def test_it_keeps_epochs_and_classes(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, params=TrainerParams(3), opt_fn=adam)
    found, jobs = serial_baseline.measure(tiny.bundle, tiny.batches, never), tiny.jobs
    assert found is not None
    assert set(found.epochs) == set(found.class_counts) == {job.id for job in jobs}
    for job in jobs:
        seconds, losses = zip(*found.epochs[job.id], strict=True)
        assert len(seconds) == 3
        assert list(seconds) == sorted(seconds)
        assert losses[-1] < losses[0]
    assert sum(of for counts in found.class_counts.values() for _, of in counts) == 60
    right = sum(right for counts in found.class_counts.values() for right, _ in counts)
    assert found.accuracy["plain/constant"] == pytest.approx(right / 60, abs=0.02)
    assert sum(seconds[-1][0] for seconds in found.epochs.values()) <= found.seconds


class Clock:
    """Moves by what models take, and not by what else the machine does."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def model(self, seconds: Callable[[], float]) -> Any:
        """Return a model that takes so many seconds for each batch."""

        class Slow(Plain):
            def forward(model, inputs: torch.Tensor) -> torch.Tensor:
                self.now += seconds()
                return super().forward(inputs)

        return Slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(serial_baseline, "time", made)
    return made


def test_an_estimate_is_near_what_is_measured(tmp_path: Path, clock: Clock) -> None:
    slow = clock.model(lambda: 0.004)
    tiny = Tiny(tmp_path, {"slow": slow}, params=TrainerParams(2), data=samples(90), batch_size=10)
    estimated = serial_baseline.estimate(tiny.bundle, tiny.batches, never)
    measured = serial_baseline.measure(tiny.bundle, tiny.batches, never)
    assert estimated is not None
    assert measured is not None
    assert (estimated.kind, estimated.accuracy) == ("estimated", {})
    assert measured.seconds / 2 < estimated.seconds < measured.seconds * 2


def failing(error: BaseException) -> Any:
    def make() -> nn.Module:
        raise error

    return make


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("trainer", [serial_baseline.measure, serial_baseline.estimate])
def test_a_model_that_fails_is_left_to_the_sweep(
    tmp_path: Path, trainer: Any, error: type[BaseException]
) -> None:
    tiny = Tiny(tmp_path, {"bad": failing(error(3)), "good": Plain})
    found = trainer(tiny.bundle, tiny.batches, never)
    assert set(found.by_candidate) == {"good/constant"}
    assert found.seconds == pytest.approx(found.by_candidate["good/constant"])
    assert "bad/constant" not in found.accuracy


def test_it_sees_preprocessed_samples(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, preprocess=StandardScaler(), opt_fn=adam, params=TrainerParams(8))
    inputs, targets = samples()
    tiny.data = (inputs * 1e4, targets)
    measured = serial_baseline.measure(tiny.bundle, tiny.batches, never)
    assert measured is not None
    assert measured.accuracy["plain/constant"] > 0.6


@pytest.mark.parametrize(
    "make",
    [
        lambda model: optim.LBFGS(model.parameters(), 0.1, max_iter=2),
        lambda model: optim.Adagrad(model.parameters(), 0.1),
    ],
)
def test_any_optimizer_and_numbers_as_targets(tmp_path: Path, make: Any) -> None:
    inputs, _ = samples()
    tiny = Tiny(
        tmp_path,
        {"line": lambda: nn.Linear(FEATURES, 1)},
        {"reduce": "reduce", "onecycle": "onecycle"},
        make,
        nn.MSELoss(),
        TrainerParams(2, lr_step="batch", clip_grad_norm=1.0),
        data=(inputs / 60, inputs[:, 1:2]),
        task="regression",
    )
    measured = serial_baseline.measure(tiny.bundle, tiny.batches, never)
    assert measured is not None
    assert measured.accuracy == {}
    assert all(value > 0.001 for value in measured.by_candidate.values())
