"""`sampler=`: weighted draws, with the generator of the job and its epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from asynckfold import AsyncKFold, CVResults, InputError
from tests.interrupted import interrupted
from tests.plain import BATCH, EPOCHS, adam, assert_bits, plain_loop, stream

DRAWS = np.random.default_rng(3)
X = DRAWS.normal(size=(60, 4)).astype(np.float32)
Y = (np.arange(60) % 6 == 0).astype(np.int64)
WEIGHTS = 1.0 + np.arange(60) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layers(inputs)
        return logits


def collate(samples: list[Any]) -> Any:
    return torch.stack([inputs for inputs, _ in samples]), torch.tensor([y for _, y in samples])


PAIRS = list(zip(map(torch.from_numpy, X), Y.tolist(), strict=True))


def swept(
    root: Path, sampler: Any, model: Any = Net, y: Any = Y, criterion: Any = None, **settings: Any
) -> CVResults:
    settings = {"engine": "serial", "fuse": False, **settings}
    kfold = AsyncKFold(
        2, (X, y), root, criterion or nn.CrossEntropyLoss(), BATCH, verbose=0, report=False,
        threads_per_job=1, sampler=sampler, **settings,
    )  # fmt: skip
    return kfold([model], ["constant"], adam, {"epochs": EPOCHS})


def weights_of(results: CVResults) -> dict[str, Tensor]:
    return results.state_dict(results.candidates[0].name, fold=0)


def torch_sampler(train_targets: Tensor) -> Sampler[int]:
    return RandomSampler(train_targets, replacement=True, num_samples=len(train_targets))  # type: ignore[arg-type]


def balanced(train: Any) -> Tensor:
    counts = np.bincount(Y[train])
    return torch.from_numpy(1 / counts[Y[train]])


def weighted(weights_of: Callable[[Any], Any]) -> Callable[[Any, int, int], Any]:
    def order(train: Any, seed: int, epoch: int) -> Any:
        generator = torch.Generator().manual_seed(stream(seed, 3, epoch))
        drawn = WeightedRandomSampler(weights_of(train), len(train), generator=generator)
        return train[list(drawn)]

    return order


def uniform(train: Any, seed: int, epoch: int) -> Any:
    generator = torch.Generator().manual_seed(stream(seed, 3, epoch))
    return train[list(RandomSampler(train, True, len(train), generator))]


@pytest.mark.parametrize(
    ("sampler", "order_of"),
    [
        (WEIGHTS, weighted(lambda train: WEIGHTS[train])),
        ("balanced", weighted(balanced)),
        (
            lambda train_targets: 1.0 + 4.0 * (train_targets == 1),
            weighted(lambda train: 1.0 + 4.0 * Y[train]),
        ),
        (torch_sampler, uniform),
    ],
    ids=["weights", "balanced", "factory", "torch sampler"],
)
def test_a_job_has_the_bits_of_a_plain_loop(root: Path, sampler: Any, order_of: Any) -> None:
    results = swept(root, sampler)
    weights, outputs = plain_loop(Net, PAIRS, results, nn.Module.__call__, collate, order_of)
    assert_bits(results, weights, outputs)


def test_fused_jobs_draw_the_same(root: Path) -> None:
    alone, together = (swept(root / str(fuse), "balanced", fuse=fuse) for fuse in (False, 2))
    assert together.plan.groups
    found = [weights_of(results) for results in (alone, together)]
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-5) for name in found[0])


def test_refit_takes_the_weights_along(root: Path) -> None:
    results = swept(root, WEIGHTS, refit=True, baseline="measure")
    assert results.refitted is not None
    assert results.refitted.counts["done"] == 1
    assert results.baseline is not None
    # The baseline draws the same samples.
    theirs = [loss for _, loss in results.baseline.epochs[results.plan.jobs[0].id]]
    ours = results.results[results.plan.jobs[0].id].epochs
    assert theirs == pytest.approx([epoch.train_loss for epoch in ours], rel=1e-5)
    with pytest.raises(InputError, match="sampler"):
        swept(root, WEIGHTS + 1, baseline="measure")


def test_an_interrupted_run_continues_to_the_same_bits(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights_of(swept(root / "whole", torch_sampler))
    # At the end of the second epoch.
    with interrupted(monkeypatch, "training.training_run.Training", "score", 2):
        swept(root / "cut", torch_sampler)
    continued = weights_of(swept(root / "cut", torch_sampler))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    with pytest.raises(InputError, match="sampler"):
        swept(root / "cut", "balanced")


def fails(train_targets: Tensor) -> Any:
    raise ValueError("no weights")


@pytest.mark.parametrize(
    ("sampler", "settings", "match"),
    [
        ("balance", {}, "sampler must be 'balanced'"),
        (WEIGHTS[:-1], {}, r"one for each sample of the data set: received shape \(59,\)"),
        (-WEIGHTS, {}, "from -"),
        (WEIGHTS * np.nan, {}, "from nan to nan"),
        (0 * WEIGHTS, {}, "from 0 to 0"),
        (lambda y: y[:-1], {}, r"weights of shape \(29,\) from .* for 30 samples"),
        (lambda y: None, {}, "not NoneType"),
        (lambda y: "text", {}, "TypeError: .*'str'"),
        (fails, {}, r"ValueError: no weights \(test_sampler.py, line \d+\)"),
        (lambda y: RandomSampler(range(31)), {}, "31 draws of 0 to 30 for 30 samples"),
        (lambda y: np.random.default_rng().random(len(y)), {}, "the same draws from the same seed"),
        (WEIGHTS, {"trainer": "hogwild", "processes": 2, "engine": "process"}, "plain trainer"),
        ("balanced", {"y": X[:, 0], "criterion": nn.MSELoss(), "stratify": False}, "one class"),
    ],
)
def test_bad_input_is_refused_before_the_start(
    root: Path, sampler: Any, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        swept(root, sampler, **settings)
    assert not (root / "run.db").exists()
