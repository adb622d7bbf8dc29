"""A sweep on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.engines.machine import Machine
from tests.toy import Tiny, adam, samples

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
    pytest.mark.skipif(not Machine().gpus().gpus, reason="needs NVML: asynckfold[gpu]"),
]


def test_jobs_run_on_the_gpu_and_this_process_makes_no_context(root: Path) -> None:
    kfold = AsyncKFold(
        3, samples(), root, nn.CrossEntropyLoss(), 10, baseline=None, verbose=0, devices=[0]
    )
    results = kfold([Tiny], ["cosine", "step"], adam, {"epochs": 3})
    assert set(results.to_frame("fold")["device"]) == {"cuda:0"}
    assert results.counts["done"] == 6
    assert not torch.cuda.is_initialized()


def test_the_cpu_is_used_when_it_is_asked_for(root: Path) -> None:
    kfold = AsyncKFold(
        3, samples(), root, nn.CrossEntropyLoss(), 10, baseline=None, verbose=0, devices="cpu"
    )
    results = kfold([Tiny], ["cosine"], adam, {"epochs": 1})
    assert set(results.to_frame("fold")["device"]) == {"cpu"}
