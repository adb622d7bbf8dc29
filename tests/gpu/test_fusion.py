"""Sweeps on a real GPU whose jobs are fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults
from asynckfold.system.machine import Machine
from tests.toy import Tiny, adam, samples

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
    pytest.mark.skipif(not Machine().gpus().gpus, reason="needs NVML"),
]


def sweep(root: Path, epochs: int = 3, **settings: Any) -> CVResults:
    settings = {"baseline": None, "verbose": 0, "devices": [0], "fuse": True, **settings}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold([Tiny], ["cosine", "step"], adam, {"epochs": epochs})


@pytest.mark.usefixtures("deterministic_kernels")
def test_a_group_gives_the_same_bits_again_and_after_interruptions(
    root: Path,
) -> None:
    whole = sweep(root / "whole", 200)
    assert [len(group) for group in whole.plan.groups] == [6]
    assert set(whole.to_frame("fold")["device"]) == {"cuda:0"}
    assert whole.best_score_ > 0.6
    alone = sweep(root / "alone", 200, n_jobs=1)
    begun = sweep(root / "cut", 200, time_budget_s=5.0)
    while begun.counts["pending"]:
        begun = sweep(root / "cut", 200, fuse=False, time_budget_s=5.0)
    assert whole.fingerprint == alone.fingerprint == begun.fingerprint
