"""The serial baseline: the same work as the sweep, in the ordinary way."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from asynckfold import Baseline
from tests.training.sweeps import ONE_FOLD, sgd, sweep
from tests.training.tiny import FEATURES, Noisy, Plain, Seen, samples, watched


def baseline_of(root: Path, *args: Any, kind: str = "measure", **parts: Any) -> Baseline:
    baseline = sweep(root, *args, baseline=kind, **parts).baseline
    assert baseline is not None
    return baseline


class Counting(Dataset[Any]):
    """Counts how often each sample is read."""

    def __init__(self) -> None:
        inputs, targets = samples()
        self.inner = TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.inner[index]


def test_it_sees_the_batches_of_the_sweep_in_their_order(tmp_path: Path) -> None:
    seen = Seen()
    models, params = {"noisy": watched(Noisy, seen)}, {"lr_step": "batch"}
    baseline_of(tmp_path / "run", models, ["reduce"], params=params, batch_size=13)
    # Three folds, two epochs of 36 samples: some are set aside.
    batches = seen.of(training=True)[-2 * 3 * 2 * 3 :]
    ours, theirs = batches[: len(batches) // 2], batches[len(batches) // 2 :]
    assert ours == theirs
    assert len(set(map(tuple, ours))) == len(ours)


def test_it_reads_sample_by_sample_from_the_dataset(tmp_path: Path) -> None:
    counts = []
    for kind in ("none", "measure"):
        dataset = Counting()
        sweep(tmp_path / kind, data=dataset, baseline=kind)
        counts.append(dataset.read)
    # In each of two epochs, two folds train on a sample, and one is scored on it.
    assert counts[1] - counts[0] == Counter(dict.fromkeys(range(60), 3 * 2))


def test_its_accuracy_and_losses_are_those_of_the_sweep(tmp_path: Path) -> None:
    models, schedules = {"plain": Plain}, ["cosine"]
    started = time.perf_counter()
    results = sweep(
        *(tmp_path / "run", models, schedules),
        **{"data": samples(120), "params": {"epochs": 4}, "baseline": "measure"},
    )
    passed, measured = time.perf_counter() - started, results.baseline
    assert measured is not None
    assert measured.by_job == {
        name: result.epochs[-1].accuracy for name, result in results.results.items()
    }
    for name, result in results.results.items():
        seconds, losses = zip(*measured.epochs[name], strict=True)
        # Rounding alone: Adam would amplify that of a bias before BatchNorm, whose gradient is 0.
        assert losses == pytest.approx([item.train_loss for item in result.epochs], rel=1e-4)
        assert list(seconds) == sorted(seconds)
        right, of = np.sum(measured.class_counts[name], axis=0)
        assert (right / of, of) == (pytest.approx(measured.by_job[name]), 40)
    for candidate in {job.candidate for job in results.plan.jobs}:
        accuracies = [
            measured.by_job[job.id] for job in results.plan.jobs if job.candidate == candidate
        ]
        assert measured.accuracy[candidate] == pytest.approx(np.mean(accuracies))
        assert measured.accuracy[candidate] > 0.6
    assert (measured.kind, measured.threads) == ("measured", torch.get_num_threads())
    assert measured.seconds == pytest.approx(sum(measured.by_candidate.values()))
    assert measured.seconds == pytest.approx(sum(measured.seconds_by_job.values()))
    assert 0 < measured.seconds < passed


class Slow(Plain):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(inputs)


def test_an_estimate_is_near_what_is_measured(tmp_path: Path) -> None:
    estimated, measured = (
        baseline_of(tmp_path / kind, {"slow": Slow}, kind=kind, cv=ONE_FOLD)
        for kind in ("estimate", "measure")
    )
    assert (estimated.kind, estimated.accuracy) == ("estimated", {})
    assert measured.seconds / 3 < estimated.seconds < measured.seconds * 3


def failing() -> nn.Module:
    raise SystemExit(3)


@pytest.mark.filterwarnings("ignore:.*jobs failed")
@pytest.mark.parametrize("kind", ["measure", "estimate"])
def test_a_model_that_fails_is_left_to_the_sweep(tmp_path: Path, kind: str) -> None:
    baseline = baseline_of(tmp_path / "run", {"bad": failing, "good": Plain}, kind=kind)
    assert set(baseline.by_candidate) == {"good/constant"}
    assert baseline.seconds == pytest.approx(baseline.by_candidate["good/constant"])
    assert "bad/constant" not in baseline.accuracy


def test_any_optimizer_and_numbers_as_targets(tmp_path: Path) -> None:
    inputs, _ = samples()
    words = {"data": (inputs / 60, inputs[:, 1:2]), "task": "regression"}
    params = {"lr_step": "batch", "clip_grad_norm": 1.0, "accumulate": 2}
    results = sweep(
        *(tmp_path / "run", {"line": lambda: nn.Linear(FEATURES, 1)}, ["onecycle"]),
        *(sgd, nn.MSELoss()),
        **{**words, "params": params, "baseline": "measure"},
    )
    measured = results.baseline
    assert measured is not None
    assert measured.accuracy == {}
    for name, result in results.results.items():
        losses = [loss for _, loss in measured.epochs[name]]
        assert losses == pytest.approx([item.train_loss for item in result.epochs], rel=1e-4)


def test_it_sees_preprocessed_samples(tmp_path: Path) -> None:
    inputs, targets = samples()
    words = {"data": (inputs * 1e4, targets), "preprocess": StandardScaler()}
    measured = baseline_of(tmp_path / "run", params={"epochs": 4}, **words)
    assert measured.accuracy["plain/constant"] > 0.6
