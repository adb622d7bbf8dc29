"""A job asks once how many GPUs there are, however many steps it makes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold
from tests.toy import adam

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="this torch is not built for CUDA, and never asks"
)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The libraries that are loaded, where torch asks NVML, as it does in workers."""
    found: list[Any] = []
    load = ctypes.CDLL

    def noted(name: Any, *args: Any, **words: Any) -> Any:
        found.append(name)
        return load(name, *args, **words)

    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", noted)
    return found


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def test_more_steps_do_not_count_gpus_again(tmp_path: Path, loads: list[Any]) -> None:
    inputs = np.zeros((30, 4), np.float32)
    targets = np.arange(30) % 3

    def loaded(epochs: int) -> int:
        loads.clear()
        kfold = AsyncKFold(
            2,
            (inputs, targets),
            tmp_path / f"{epochs}",
            nn.CrossEntropyLoss(),
            5,
            parallelize=False,
            verbose=0,
        )
        results = kfold({"linear": linear}, ["constant"], adam, {"epochs": epochs})
        assert np.isfinite(results.cv_results_["mean_test_accuracy"]).all()
        return len(loads)

    assert loaded(8) == loaded(1)
