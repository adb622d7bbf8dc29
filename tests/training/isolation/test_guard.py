"""What a job changes in its process does not reach the next one."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynckfold.training.isolation.guard import isolated

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "device": (lambda: torch.set_default_device("meta"), lambda: torch.empty(0).device),
    "threads": (lambda: torch.set_num_threads(2), torch.get_num_threads),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "anomaly": (lambda: torch.set_anomaly_enabled(True), torch.is_anomaly_enabled),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "denormals": (
        lambda: torch.set_flush_denormal(True),
        lambda: bool(torch.tensor(1e-310, dtype=torch.float64).mul(0.5) == 0),
    ),
    "cudnn": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "mkldnn": (
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "folder": (lambda: os.chdir("/"), Path.cwd),
    "variable": (lambda: os.environ.update(ODD="1"), lambda: os.environ.get("ODD")),
    "no variables": (os.environ.clear, lambda: os.environ.get("PATH")),
    "path": (lambda: sys.path.insert(0, "/odd"), lambda: list(sys.path)),
    "filters": (lambda: warnings.simplefilter("ignore"), lambda: list(warnings.filters)),
    "numpy": (lambda: np.seterr(all="raise"), np.geterr),
    "output": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_restored_after_an_error(name: str) -> None:
    change, read = CHANGES[name]
    before = read()

    def fail() -> None:
        with isolated():
            change()
            assert read() != before
            raise KeyError(name)

    with pytest.raises(KeyError, match=name):
        fail()
    assert read() == before


def test_a_renamed_working_folder_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    with isolated():
        os.chdir("/")
        home.rename(tmp_path / "moved")
    assert Path.cwd() == tmp_path / "moved"


def test_the_mode_of_a_default_device_is_removed() -> None:
    """A device that is set back to the CPU by name would slow down every call of torch."""
    with isolated():
        torch.set_default_device("meta")
    assert torch.empty(1).device.type == "cpu"
    assert torch.overrides._get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]
