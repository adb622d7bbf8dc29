"""What a job changes in its process is put back after it, also where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.sweeps import results_of, sweep, train
from tests.training.tiny import Plain

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "threads": (lambda: torch.set_num_threads(2), torch.get_num_threads),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "anomaly": (lambda: torch.set_anomaly_enabled(True), torch.is_anomaly_enabled),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "cudnn": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "mkldnn": (
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "variable": (lambda: os.environ.update(ODD="1"), lambda: os.environ.get("ODD")),
    "no variables": (os.environ.clear, lambda: os.environ.get("PATH")),
    "path": (lambda: sys.path.insert(0, "/odd"), lambda: list(sys.path)),
    "filters": (lambda: warnings.simplefilter("ignore"), lambda: list(warnings.filters)),
    "numpy": (lambda: np.seterr(all="raise"), np.geterr),
    "output": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "folder": (lambda: os.chdir("/"), Path.cwd),
}


@pytest.fixture(autouse=True)
def _denormals_as_before() -> Any:
    before = flushes()
    yield
    torch.set_flush_denormal(before)


def flushes() -> bool:
    return bool(torch.tensor(1e-310, dtype=torch.float64).mul(0.5) == 0)


@pytest.mark.filterwarnings("ignore:.*jobs failed")
def test_a_setting_is_restored_after_an_error(tmp_path: Path) -> None:
    def changing(change: Callable[[], Any]) -> Callable[[], Any]:
        def make() -> Any:
            change()
            raise KeyError("mine")

        return make

    results_of(tmp_path / "first", {"plain": Plain})  # imports add filters of warnings
    before = {name: read() for name, (_, read) in CHANGES.items()}
    models = {name: changing(change) for name, (change, _) in CHANGES.items()}
    results = results_of(tmp_path / "run", models)
    assert {result.error for result in results.values()} == {"KeyError: 'mine'"}
    assert {name: read() for name, (_, read) in CHANGES.items()} == before


def test_a_renamed_working_folder_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Renaming(Plain):
        def __init__(self) -> None:
            super().__init__()
            os.chdir("/")
            if home.exists():
                home.rename(tmp_path / "moved")

    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    train(tmp_path / "run", {"renaming": Renaming})
    assert Path.cwd() == tmp_path / "moved"


SMALLEST = torch.tensor(1, dtype=torch.int32).view(torch.float32)
"""The least positive number there is."""


class Watching(Plain):
    """Fails where a number lost digits, and was not taken for 0."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert not (SMALLEST * 1.0).view(torch.int32)
        return super().forward(inputs)


@pytest.mark.parametrize("before", [False, True])
def test_jobs_and_the_serial_baseline_have_no_denormals(tmp_path: Path, before: bool) -> None:
    torch.set_flush_denormal(before)
    for kind in ("measure", "estimate"):
        results = sweep(tmp_path / kind, {"watching": Watching}, baseline=kind)
        assert results.counts["done"] == 3
        assert results.baseline is not None
        # A job that fails leaves no seconds behind.
        assert set(results.baseline.by_candidate) == {"watching/constant"}
    assert flushes() is before


OLD_POOL = """
import torch
torch.set_num_threads(2)
torch.rand(1 << 20).exp()
from asynckfold.training.torch_settings import *
assert can_flush_denormals(1)
assert not can_flush_denormals(2)
assert not denormals_are_flushed()
from asynckfold.training.software import software
assert software(2)["denormal numbers"] == "taken for 0"
assert software(2, in_workers=False)["denormal numbers"] == "kept"
"""

NEW_POOL = """
import torch
from asynckfold.training.torch_settings import *
assert can_flush_denormals(2)
assert not denormals_are_flushed()
flush_denormals()
torch.set_num_threads(2)
assert denormals_are_flushed(2 * SHARE)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("code", [OLD_POOL, NEW_POOL], ids=["old pool", "new pool"])
def test_threads_started_earlier_keep_their_mode(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
