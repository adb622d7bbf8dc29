"""Inputs, targets and losses as people pass them: they work, or are refused before the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer
from torch import nn
from torch.nn import functional

from asynckfold import AsyncKFold, CVResults
from asynckfold.errors import InputError
from tests.toy import adam, samples

X, Y = samples()
ODDS = (Y > 0).astype(np.float32)


def train(
    root: Path,
    data: Any,
    criterion: Any,
    model: Callable[[], nn.Module] = lambda: nn.Linear(8, 3),
    *,
    opt_fn: Any = adam,
    schedule: str = "constant",
    epochs: int = 2,
    **arguments: Any,
) -> CVResults:
    """Train a model of 3 outputs on 3 folds, in this process."""
    quiet = {"engine": "serial", "report": False, "verbose": 0}
    kfold = AsyncKFold(3, data, root, criterion, 16, **{**quiet, **arguments})
    return kfold({"m": model}, [schedule], opt_fn, {"epochs": epochs})


def refused(root: Path, *positional: Any, **arguments: Any) -> str:
    """Return the message of a call that must be refused before anything is written."""
    with pytest.raises(InputError) as caught:
        train(root, *positional, **arguments)
    assert not list(root.glob("run.db"))
    return str(caught.value)


# Numbers that are missing


@pytest.mark.parametrize("index", [0, 37, 59])
def test_one_row_of_nan_is_refused_with_its_index(tmp_path: Path, index: int) -> None:
    holed = X.copy()
    holed[index, 2] = np.nan
    message = refused(tmp_path / "run", (holed, Y), nn.CrossEntropyLoss())
    assert f"NaN in its inputs of sample {index}." in message
    assert "preprocess=sklearn.impute.SimpleImputer()" in message
    filled = train(
        tmp_path / "filled", (holed, Y), nn.CrossEntropyLoss(), preprocess=SimpleImputer()
    )
    assert filled.counts["done"] == 3


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], int(Y[index])


def test_so_is_one_of_a_data_set_or_of_several_inputs(tmp_path: Path) -> None:
    holed = X.copy()
    holed[41, 2] = -np.inf
    told = "infinity in its inputs of sample 41."
    assert told in refused(tmp_path / "items", Items(holed), nn.CrossEntropyLoss())
    both = {"input": holed}
    assert told in refused(tmp_path / "named", (both, Y), nn.CrossEntropyLoss())


def test_a_model_that_fills_nan_in_gets_them(tmp_path: Path) -> None:
    class Filling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.nan_to_num())

    holed = X.copy()
    holed[37, 2] = np.nan
    made = train(tmp_path, (holed, Y), nn.CrossEntropyLoss(), lambda: Filling(8, 3))
    assert made.counts["done"] == 3


# Shapes that a loss does not take


@pytest.mark.parametrize(
    "criterion",
    [
        nn.BCEWithLogitsLoss(),
        functional.binary_cross_entropy_with_logits,
        lambda outputs, targets: functional.binary_cross_entropy_with_logits(outputs, targets),
    ],
)
def test_a_loss_that_takes_no_outputs_of_this_shape_is_refused_before_the_start(
    tmp_path: Path, criterion: Any
) -> None:
    data, one = (X, ODDS), lambda: nn.Linear(8, 1)
    said = {} if isinstance(criterion, nn.Module) else {"scoring": {"zero": lambda *_: 0.0}}
    message = refused(tmp_path / "wide", data, criterion, one, **said)
    assert "outputs (16, 1), targets (16,). Squeeze the outputs" in message
    flat = lambda: nn.Sequential(one(), nn.Flatten(0))  # noqa: E731
    message = refused(tmp_path / "flat", (X, ODDS[:, None]), criterion, flat, **said)
    assert "outputs (16,), targets (16, 1). Return outputs[:, None]" in message
    # The remedies.
    assert train(tmp_path / "1", data, criterion, flat, **said).counts["done"] == 3
    assert train(tmp_path / "2", (X, ODDS[:, None]), criterion, one, **said).counts["done"] == 3


def test_what_torch_raises_in_a_loss_of_ones_own_is_refused(
    tmp_path: Path,
) -> None:
    def unfit(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, :2] * targets[:, None] @ torch.ones(3)).mean()

    message = refused(tmp_path, (X, Y), unfit)
    assert "outputs float32 (16, 3) and targets int64 (16,): size mismatch" in message
    assert "(test_inputs_and_targets.py, line " in message
