"""Fusion on a real GPU: the comparison in each format, and sweeps whose jobs are fused there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults
from asynckfold.data.transforms.trees import mapped, on_device
from asynckfold.system.machine import Machine
from asynckfold.training.calls import call_model
from asynckfold.training.fusion.backward import backward, fuse_criterion, parts_of
from asynckfold.training.fusion.module import fuse
from tests.toy import Tiny, adam, samples
from tests.training.fusion.test_zoo import replicas
from tests.training.fusion.zoo import ZOO

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that torch can use"
)

needs_nvml = pytest.mark.skipif(not Machine().gpus().gpus, reason="needs NVML")

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ZOO)
def test_fused_is_plain(name: str) -> None:
    animal = ZOO[name]
    models = [model.to(GPU, torch.float64).eval() for model in replicas(animal)]
    (inputs, targets), *_ = [animal.batch(5, 0)]
    inputs = mapped(lambda item: item.double() if item.is_floating_point() else item, inputs)
    inputs, targets = on_device((inputs, targets), GPU)
    expected = [
        nn.functional.cross_entropy(call_model(copy.deepcopy(model), inputs), targets)
        for model in models
    ]
    fused = fuse(models, [inputs])
    outputs = torch.zeros(5, animal.classes, device=GPU, dtype=torch.float64)
    criterion = fuse_criterion(nn.CrossEntropyLoss(), len(models), outputs, targets)
    losses = backward(fused, criterion, parts_of([(inputs, targets)] * len(models)))
    torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "residual", "transformer"])
def test_each_replica_draws_masks_of_its_own_from_its_generator(name: str) -> None:
    animal = ZOO[name]
    models = [model.to(GPU) for model in replicas(animal)]
    batches = [tuple(item.to(GPU) for item in animal.batch(5, 0)) for _ in models]
    losses = []
    for seeds in ((0, 1, 2), (0, 1, 2), (0, 9, 2)):
        fused = fuse(copy.deepcopy(models), [batches[0][0]])
        for generator, seed in zip(fused.generators, seeds, strict=True):
            assert generator.device == GPU
            generator.manual_seed(seed)
        outputs = torch.zeros(5, animal.classes, device=GPU)
        criterion = fuse_criterion(nn.CrossEntropyLoss(), 3, outputs, batches[0][1])
        losses.append(backward(fused, criterion, parts_of(batches)))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0][::2], losses[2][::2])


def sweep(root: Path, epochs: int = 3, **settings: Any) -> CVResults:
    settings = {"baseline": None, "verbose": 0, "devices": [0], "fuse": True, **settings}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold([Tiny], ["cosine", "step"], adam, {"epochs": epochs})


@needs_nvml
@pytest.mark.usefixtures("deterministic_kernels")
def test_a_group_gives_the_same_bits_again_in_this_process_and_after_interruptions(
    root: Path,
) -> None:
    whole = sweep(root / "whole", 200)
    assert [len(group) for group in whole.plan.groups] == [6]
    assert set(whole.to_frame("fold")["device"]) == {"cuda:0"}
    assert whole.best_score_ > 0.6
    alone = sweep(root / "alone", 200, n_jobs=1, parallelize=False)
    begun = sweep(root / "cut", 200, time_budget_s=5.0)
    while begun.counts["pending"]:
        begun = sweep(root / "cut", 200, fuse=False, time_budget_s=5.0)
    assert whole.fingerprint == alone.fingerprint == begun.fingerprint
