"""The packed run against the serial loop in the report of a real run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from asynckfold import fit
from asynckfold.models import MLP


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def test_a_run_whose_baseline_was_measured_shows_both(root: Path) -> None:
    inputs, targets = load_digits(return_X_y=True)
    found = fit(
        MLP(64),
        (inputs[:400].astype("float32") / 16, targets[:400]),
        adam,
        torch.nn.CrossEntropyLoss(),
        root,
        valid=range(300, 400),
        epochs=3,
        baseline="measure",
        engine="serial",
        report=False,
        verbose=0,
    )
    page = found.results.report()
    data = json.loads((page.parent / "results.json").read_text())
    (pair,), (row,) = data["loss_over_time"], data["candidates"]
    assert pair["candidate"] == row["name"] == "MLP/constant"
    assert len(pair["packed"]) == len(pair["serial"]) == 3
    assert pair["packed"][-1] == [
        pytest.approx(found.results.seconds),
        found.epochs[-1].train_loss,
    ]
    assert all(before[1] > after[1] for before, after in pairwise(pair["serial"]))
    assert len(row["serial_class_accuracy"]) == 10
    assert 'id="figure-loss_vs_time"' in page.read_text()
