"""What was once seen to be wrong: whole runs through the public names, one test each.

The other files look at the parts that put it right; a test here needs none of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import nn, optim
from torch.utils.data import Dataset

from asynckfold import AsyncKFold, CVResults, InputError
from asynckfold.engines.warm_pool import close_warm
from tests.toy import samples
from tests.truth.leaks import LEAKS

X, Y = samples()
TRAIN, VALID = np.arange(40), np.arange(40, 60)
FOLD = [(TRAIN, VALID)]
NUMBERS = X[:, 0] + 2


def still(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.0)


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.05)


def run(
    root: Path,
    dataset: Any = (X, Y),
    models: Any = None,
    criterion: Any = None,
    *,
    schedule: Any = "constant",
    opt_fn: Any = sgd,
    epochs: int = 1,
    cv: Any = 3,
    **settings: Any,
) -> CVResults:
    models = models if isinstance(models, dict) else {"net": models or partial(nn.Linear, 8, 3)}
    settings = {"parallelize": False, "baseline": None, "verbose": 0, "fuse": False, **settings}
    kfold = AsyncKFold(
        None, dataset, root, criterion or nn.CrossEntropyLoss(), 10, cv=cv, **settings
    )
    return kfold(models, {"own": schedule}, opt_fn, {"epochs": epochs})


def same() -> nn.Module:
    """A model whose outputs are its inputs."""
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    return model


# What the run computes is what the user wrote


class Rows(Dataset[Any]):
    """Three features, with the attributes of torchvision's datasets."""

    def __init__(self, transform: Any = None, noise: Any = ()) -> None:
        self.data, self.targets = X[:, :3].copy(), Y.tolist()
        self.transform, self.noise = transform, set(noise)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = torch.from_numpy(self.data[index].copy())
        label = self.targets[index]
        return self.transform(row) if self.transform else row, (label + (index in self.noise)) % 3


def test_label_noise_of_a_dataset_is_trained_and_scored_with(root: Path) -> None:
    noisy = Rows(noise=[43, 47, 55])
    seen: list[int] = []

    def share(targets: Any, outputs: Any) -> float:
        seen[:] = targets.tolist()
        return 0.5

    run(root, noisy, same, cv=FOLD, scoring=share)
    assert seen == [noisy[index][1] for index in range(40, 60)]


def test_a_transform_that_is_random_for_one_sample_is_not_validated_with(root: Path) -> None:
    def jitter(row: torch.Tensor) -> torch.Tensor:
        return row + 50 + random.random() if row[0].item() == X[44, 0] else row

    results = run(root, Rows(jitter), same, opt_fn=still)
    np.testing.assert_array_equal(results.oof["net/own"], X[:, :3])


# Scored as the user means


@pytest.mark.parametrize("score", [metrics.mean_squared_error, metrics.mean_absolute_error])
def test_the_greatest_error_is_not_the_best_score(root: Path, score: Any) -> None:
    def flat() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))

    with pytest.raises(InputError, match=f"scoring='neg_{score.__name__}'"):
        run(root, (X, NUMBERS), flat, nn.MSELoss(), scoring=score)


# What one model leaves behind


@pytest.fixture
def _no_worker_stays() -> Iterator[None]:
    yield
    close_warm()


@pytest.mark.usefixtures("_no_worker_stays")
@pytest.mark.filterwarnings("ignore::asynckfold.JobsFailedWarning")
@pytest.mark.parametrize("leak", ["autocast", "forward hook", "inference mode", "saved tensors"])
def test_a_model_has_the_numbers_that_it_has_alone(tmp_path: Path, leak: str) -> None:
    act = LEAKS[leak]

    class Leaking(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(inputs)
            if not self.training:
                act()
            return outputs

    def judge() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    settings = {"parallelize": True, "n_jobs": 1, "threads_per_job": 1}
    alone = run(tmp_path / "alone", models={"judge": judge}, **settings)
    both = run(
        tmp_path / "both", models={"leaking": partial(Leaking, 8, 3), "judge": judge}, **settings
    )
    np.testing.assert_array_equal(both.oof["judge/own"], alone.oof["judge/own"])
