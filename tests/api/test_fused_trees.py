"""Jobs whose samples are several tensors, fused: close to plain jobs, and repeatable to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asynckfold import AsyncKFold, CVResults, InputError
from asynckfold.training.fusion.group import FusionGroup
from tests.interrupted import interrupted
from tests.several_inputs import BATCH, EPOCHS, OneDict, TwoInputs, adam, arrays

X, Y = arrays()
PAIR = (X["image"], X["age"])
FOLDS = 4


def swept(
    root: Path, dataset: Any = (X, Y), model: Any = TwoInputs, fuse: Any = FOLDS, **settings: Any
) -> CVResults:
    kfold = AsyncKFold(
        FOLDS, dataset, root, nn.CrossEntropyLoss(), BATCH, fuse=fuse, verbose=0, report=False,
        threads_per_job=1, **{"engine": "serial", **settings},
    )  # fmt: skip
    return kfold([model], ["constant"], adam, {"epochs": EPOCHS})


def weights(results: CVResults) -> list[dict[str, Tensor]]:
    name = results.candidates[0].name
    return [results.state_dict(name, fold=fold) for fold in range(FOLDS)]


def same(one: CVResults, other: CVResults) -> bool:
    return all(
        torch.equal(mine[name], theirs[name])
        for mine, theirs in zip(weights(one), weights(other), strict=True)
        for name in mine
    )


@pytest.mark.parametrize(
    ("dataset", "model"),
    [((X, Y), TwoInputs), ((PAIR, Y), TwoInputs), ((X, Y), OneDict)],
    ids=["by name", "by position", "one argument"],
)
def test_fused_jobs_are_close_to_plain_ones(root: Path, dataset: Any, model: Any) -> None:
    plain = swept(root / "plain", dataset, model, fuse=False)
    fused = swept(root / "fused", dataset, model)
    assert len(plain.plan.groups) == 0
    assert [len(group) for group in fused.plan.groups] == [FOLDS]
    for mine, theirs in zip(weights(plain), weights(fused), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    (expected,), (found,) = plain.oof.values(), fused.oof.values()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_an_interrupted_group_continues_to_the_same_bits(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = swept(root / "whole")
    # In the second epoch.
    with interrupted(monkeypatch, FusionGroup, "step", 9):
        swept(root / "cut")
    assert same(whole, swept(root / "cut"))
    log = (root / "cut/TwoInputs/constant/fold-0/log.txt").read_text()
    assert log.count("epoch 1 train_loss") == 1


class Choosing(TwoInputs):
    """Branches on a value: no two replicas are sure to do the same."""

    def forward(self, image: Tensor, age: Tensor) -> Tensor:
        return super().forward(image, age) * (2 if age.sum() > 300 else 1)


def test_a_model_that_cannot_be_fused_is_refused_by_its_reason(root: Path) -> None:
    with pytest.raises(InputError, match="model Choosing: the model cannot be traced"):
        swept(root, model=Choosing)
    assert not root.exists()
