"""What a call says of models that look like a mistake, and trains all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, load_results


class Net(nn.Sequential):
    def __init__(self, outputs: int = 3, width: int = 4) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, outputs))


def _said(
    root: Path,
    capfd: pytest.CaptureFixture[str],
    models: dict[str, Any],
    lr: float = 0.05,
    noise: float = 0.1,
    folds: int = 3,
) -> str:
    """Return what a call says that trains these models on three clear clusters."""
    labels = np.arange(63) % 3
    shifts = np.random.default_rng(0).normal(0, noise, (63, 2))
    samples = (np.array([[0, 0], [0, 4], [4, 0]])[labels] + shifts).astype("float32")
    kfold = AsyncKFold(
        *(folds, (samples, labels), root, nn.CrossEntropyLoss(), 8), engine="serial", verbose=1
    )
    kfold(models, ["constant"], lambda model: torch.optim.Adam(model.parameters(), lr))
    return " ".join(capfd.readouterr().err.split())


def test_nothing_is_said_of_models_that_differ_and_learn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = _said(tmp_path / "run", capfd, {"a": Net, "b": lambda: Net(width=16)})
    assert not any(word in said for word in ("same layers", "outputs for", "not clearly above"))


def test_models_with_the_same_layers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models = {"a": Net, "b": lambda: Net(width=8), "c": lambda: Net(3, 4)}
    assert "models a, c have the same layers" in _said(tmp_path / "run", capfd, models)


def test_more_outputs_than_classes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models = {"fits": Net, "wide": lambda: Net(outputs=10)}
    said = _said(tmp_path / "run", capfd, models)
    assert "model wide has 10 outputs for 3 classes" in said
    assert "model fits has" not in said


def test_a_learning_rate_at_which_nothing_is_learned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = _said(tmp_path / "run", capfd, {"net": Net}, lr=1e-12)
    # A third of the samples are of each class.
    assert "net/constant: accuracy is not clearly above 0.3333" in said
    assert "try another learning rate" in said


def test_two_folds_that_disagree_on_what_was_learned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = _said(tmp_path / "run", capfd, {"net": Net}, noise=2.0, folds=2)
    scores = load_results(tmp_path / "run").cv_results_["mean_test_accuracy"]
    # An interval over two folds reaches a third all the same.
    assert 0.45 < scores[0] < 0.95
    assert "not clearly above" not in said
