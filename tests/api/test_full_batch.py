"""``batch_size="full"``: one step an epoch, over all samples of the training fold."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from asynckfold import AsyncKFold, InputError
from tests.toy import samples

COUNT, FOLDS, EPOCHS = 61, 3, 4


class Net(nn.Sequential):
    """An MLP that always begins with the same weights."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.3, generator)


def decaying(optimizer: torch.optim.Optimizer) -> ExponentialLR:
    return ExponentialLR(optimizer, 0.7)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)


def rprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Rprop(model.parameters(), 0.01)


def kfold(root: Path, batch_size: Any = "full", **settings: Any) -> AsyncKFold:
    settings = {
        "engine": "serial", "verbose": 0, "baseline": None, "threads_per_job": 1, **settings
    }  # fmt: skip
    return AsyncKFold(FOLDS, samples(COUNT), root, nn.CrossEntropyLoss(), batch_size, **settings)


def by_hand(train: Any, opt_fn: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
    inputs, targets = (torch.from_numpy(part[train]) for part in samples(COUNT))
    model = Net()
    optimizer = opt_fn(model)
    schedule = decaying(optimizer)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


@pytest.mark.parametrize("opt_fn", [rprop, sgd], ids=["rprop", "sgd"])
@pytest.mark.parametrize("fuse", [False, 3])
def test_it_is_the_loop_that_one_writes_by_hand(
    root: Path, opt_fn: Callable[[nn.Module], Any], fuse: Any
) -> None:
    sweep = kfold(root, fuse=fuse)
    train = ([Net], {"decaying": decaying}, opt_fn, {"epochs": EPOCHS})
    results = sweep(*train)
    _, folds = sweep.plan(*train)
    assert {len(fold.train) for fold in folds} == {40, 41}
    for fold in folds:
        found = results.state_dict("Net/decaying", fold=fold.index)
        for name, value in by_hand(fold.train, opt_fn).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_it_is_the_number_of_samples_of_the_largest_fold(tmp_path: Path) -> None:
    train = ([Net], ["onecycle"], sgd, {"epochs": 2, "lr_step": "batch"})
    full, counted = kfold(tmp_path / "full")(*train), kfold(tmp_path / "41", 41)(*train)
    assert full.fingerprint == counted.fingerprint
    assert full.plan.batch_size == 41


def test_a_step_of_all_samples_is_divided_among_processes_by_allreduce_only(root: Path) -> None:
    def train(trainer: str) -> Any:
        sweep = kfold(root, engine="process", trainer=trainer, processes=2)
        return sweep.plan([Net], ["constant"], sgd, {"epochs": 1})

    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    assert train("allreduce")[0].batch_size == 41
    for trainer in ("hogwild", "averaging", "parameter_server"):
        with pytest.raises(InputError, match="takes all samples of the training fold in one step"):
            train(trainer)


@pytest.mark.parametrize("value", ["ful", 0, None])
def test_other_words_are_refused(root: Path, value: Any) -> None:
    with pytest.raises(
        InputError, match=r"batch_size must be a whole number of at least 1, or 'full'"
    ):
        kfold(root, value)
