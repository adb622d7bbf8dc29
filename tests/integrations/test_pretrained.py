"""Models of torchvision and timm that start from weights in a file: the bits of a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import shufflenet_v2_x0_5

from asynckfold import AsyncKFold, InputError
from tests.plain import epoch_order, one_thread, seed_all, stream

pytestmark = pytest.mark.nightly


def of_timm(num_classes: int) -> nn.Module:
    timm = pytest.importorskip("timm")
    model: nn.Module = timm.create_model("resnet10t", num_classes=num_classes)
    return model


def pretrained(
    make: Callable[..., nn.Module], weights: dict[str, torch.Tensor], classes: int = 2
) -> nn.Module:
    """As the how-to writes it."""
    model = make(num_classes=classes)
    kept = {name: value for name, value in weights.items() if not name.startswith("fc.")}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert (missing, unexpected) == (["fc.weight", "fc.bias"], [])
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3, fused=True)


def swept(make: Callable[..., nn.Module], root: Path, file: Path, data: Any) -> Any:
    weights = torch.load(file, weights_only=True)
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False}
    kfold = AsyncKFold(2, data, root, nn.CrossEntropyLoss(), 8, **given)
    models = {"net": functools.partial(pretrained, make, weights)}
    return kfold(models, ["constant"], adam, {"epochs": 1, "memory_format": "contiguous"})


@pytest.mark.parametrize("make", [shufflenet_v2_x0_5, of_timm], ids=["torchvision", "timm"])
def test_each_fold_starts_from_the_weights_of_the_file(
    make: Callable[..., nn.Module], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(32, 3, 32, 32)).astype(np.float32), np.arange(32) % 2
    file = tmp_path / "weights.pt"
    torch.manual_seed(0)
    torch.save(make(num_classes=5).state_dict(), file)
    results = swept(make, tmp_path / "run", file, data)
    inputs, targets = map(torch.from_numpy, data)
    for job in results.plan.jobs:
        with one_thread():
            seed_all(job.seed)
            model = pretrained(make, torch.load(file, weights_only=True))
            optimizer = adam(model)
            seed_all(stream(job.seed, 1))
            order = epoch_order(results.folds[job.fold].train, job.seed, 0)
            for rows in torch.from_numpy(order).split(8):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model.train()(inputs[rows]), targets[rows]).backward()
                optimizer.step()
        found = results.state_dict(job.candidate, fold=job.fold)
        assert all(torch.equal(found[name], item) for name, item in model.state_dict().items())
    assert swept(make, tmp_path / "run", file, data).counts["pending"] == 0
    # Other weights are another run.
    torch.save(make(num_classes=5).state_dict(), file)
    with pytest.raises(InputError, match="model 'net'"):
        swept(make, tmp_path / "run", file, data)
