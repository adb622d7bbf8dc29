"""A criterion for each fold, made of the targets of its training part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asynckfold import AsyncKFold, CVResults, InputError
from tests.api.test_sampler import PAIRS, Net, X, Y, collate
from tests.plain import BATCH, EPOCHS, adam, assert_bits, plain_loop


def weighted(train_targets: Tensor, power: float = 1.0) -> nn.Module:
    counts = torch.bincount(train_targets, minlength=2)
    return nn.CrossEntropyLoss((len(train_targets) / counts) ** power)


def odds(train_targets: Tensor) -> nn.Module:
    positive = train_targets.sum()
    return nn.BCEWithLogitsLoss(pos_weight=(len(train_targets) - positive) / positive)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs).squeeze(1)
        return logits


def swept(root: Path, criterion: Any, model: Any = Net, **settings: Any) -> CVResults:
    settings = {"engine": "serial", **settings}
    kfold = AsyncKFold(
        [(np.arange(20, 60), np.arange(20)), (np.arange(30), np.arange(30, 60))], (X, Y), root,
        criterion, BATCH, verbose=0, report=False, threads_per_job=1, **settings,
    )  # fmt: skip
    return kfold([model], ["constant"], adam, {"epochs": EPOCHS})


@pytest.mark.parametrize(("factory", "model"), [(weighted, Net), (odds, One)])
def test_a_job_has_the_bits_of_a_plain_loop(root: Path, factory: Any, model: Any) -> None:
    results = swept(root, factory, model)
    targets = torch.from_numpy(Y[results.folds[0].train])
    pairs = PAIRS
    if model is One:
        targets, pairs = targets.float(), [(inputs, float(y)) for inputs, y in PAIRS]
    weights, outputs = plain_loop(
        model, pairs, results, nn.Module.__call__, collate, criterion=factory(targets)
    )
    assert_bits(results, weights, outputs)


def test_each_fold_has_its_own_and_the_baseline_too(root: Path) -> None:
    results = swept(root, weighted, baseline="measure", refit=True)
    for job, fold in zip(results.plan.jobs, results.folds, strict=True):
        found = results.results[job.id]
        assert found.outputs is not None
        criterion = weighted(torch.from_numpy(Y[fold.train]))
        loss = criterion(torch.tensor(found.outputs), torch.from_numpy(Y[fold.valid]))
        assert found.epochs[-1].valid_loss == pytest.approx(float(loss), rel=1e-5)
        assert results.baseline is not None
        theirs = [mean for _, mean in results.baseline.epochs[job.id]]
        assert theirs == pytest.approx([item.train_loss for item in found.epochs], rel=1e-5)
    assert not results.plan.groups
    assert results.refitted is not None
    with pytest.raises(InputError, match="criterion"):
        swept(root, lambda train_targets: weighted(train_targets, 0.5))


def test_an_inner_part_that_is_set_aside_does_not_count(root: Path) -> None:
    results = swept(root, weighted, inner_valid=0.2, sampler="balanced")
    fold, found = results.folds[0], results.results[results.plan.jobs[0].id]
    assert found.outputs is not None
    assert fold.inner_valid.size
    criterion = weighted(torch.from_numpy(Y[fold.fitted]))
    loss = criterion(torch.tensor(found.outputs), torch.from_numpy(Y[fold.valid]))
    assert found.epochs[-1].valid_loss == pytest.approx(float(loss), rel=1e-5)


def test_a_factory_may_need_numbers(root: Path) -> None:
    y = X.sum(1)

    def huber(train_targets: Tensor) -> nn.Module:
        return nn.HuberLoss(delta=float(train_targets.std()))

    kfold = AsyncKFold(2, (X, y), root, huber, BATCH, engine="serial", verbose=0, report=False)
    results = kfold([One], ["constant"], adam, {"epochs": 1})
    job, fold = results.plan.jobs[0], results.folds[0]
    found = results.results[job.id]
    assert found.outputs is not None
    loss = huber(torch.from_numpy(y[fold.train]))(
        torch.tensor(found.outputs), torch.from_numpy(y[fold.valid])
    )
    assert found.epochs[-1].valid_loss == pytest.approx(float(loss), rel=1e-5)
    assert "r2" in results.plan.scoring


def fails(train_targets: Tensor) -> Any:
    raise ValueError("no weights")


@pytest.mark.parametrize(
    ("criterion", "settings", "match"),
    [
        (fails, {}, r"ValueError: no weights \(test_fold_criterion.py, line \d+\)"),
        (lambda train_targets: train_targets.sum(), {}, "'Tensor' object is not callable"),
        (lambda train_targets: nn.CTCLoss(), {}, "CTCLoss"),
        (lambda train_targets: nn.CrossEntropyLoss(torch.ones(3)), {}, "3"),
        (weighted, {"trainer": "hogwild", "processes": 2, "engine": "process"}, "plain trainer"),
        (weighted, {"fuse": 2}, "each fold has a criterion of its own"),
    ],
)
def test_bad_input_is_refused_before_the_start(
    root: Path, criterion: Any, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        swept(root, criterion, **settings)
    assert not (root / "run.db").exists()
