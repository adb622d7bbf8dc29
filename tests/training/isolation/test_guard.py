"""What a job changes in its process does not reach the next one."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold.jobs.result import DONE
from asynckfold.training.isolation.guard import isolated
from tests.training.tiny import Noisy, Plain, Tiny

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
    "no variables": (os.environ.clear, lambda: dict(os.environ)),
    "path": (lambda: sys.path.insert(0, "/odd"), lambda: list(sys.path)),
    "filters": (lambda: warnings.simplefilter("ignore"), lambda: list(warnings.filters)),
    "numpy": (lambda: np.seterr(all="raise"), np.geterr),
    "output": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
}


@contextmanager
def put_back() -> Iterator[None]:
    """Undo a change even where the code under test does not."""
    folder, variables, path, filters = (
        Path.cwd(),
        dict(os.environ),
        sys.path[:],
        warnings.filters[:],
    )
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_anomaly_enabled(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_flush_denormal(False)
        torch.backends.cudnn.benchmark = False
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = path
        warnings.filters[:] = filters  # type: ignore[index]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_a_setting_is_restored(name: str, fails: bool) -> None:
    change, read = CHANGES[name]
    before = read()
    with put_back():
        try:
            with isolated():
                change()
                assert read() != before
                if fails:
                    raise KeyError(name)
        except KeyError:
            assert fails
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


def test_the_mode_of_a_default_device_is_removed(tiny: Tiny) -> None:
    """A device that is set back to the CPU by name would slow down every call of torch."""
    with isolated():
        torch.set_default_device("meta")
    assert torch.empty(1).device.type == "cpu"
    assert torch.overrides._get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


class Polluting(Plain):
    """Changes its process when it is made, in a way that matters to others."""

    def __init__(self, change: Callable[[], Any]) -> None:
        super().__init__()
        change()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return super().forward(inputs)


def fill_random_state() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    random.gauss(0, 1)
    np.random.normal()  # noqa: NPY002


@pytest.mark.nightly(but=["threads", "gradients", "seed", "precision", "folder", "variable"])
@pytest.mark.parametrize(
    "change",
    [*(change for change, _ in CHANGES.values()), fill_random_state],
    ids=[*CHANGES, "seed"],
)
def test_a_job_after_one_that_changes_its_process_is_the_same_job(
    tmp_path: Path, change: Callable[[], Any]
) -> None:
    alone = Tiny(tmp_path / "alone", {"noisy": Noisy})
    both = Tiny(tmp_path / "both", {"polluting": lambda: Polluting(change), "noisy": Noisy})
    with put_back():
        (expected,) = alone.execute(alone.jobs[0])
        _, found = both.execute(
            both.jobs[0], next(job for job in both.jobs if job.model == "noisy")
        )
    assert expected.status == DONE
    assert (found.weights, found.epochs[-1].valid_loss) == (
        expected.weights,
        expected.epochs[-1].valid_loss,
    )


def test_a_dry_run_does_not_change_the_next_one(tmp_path: Path) -> None:
    class Typed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)

    def alone() -> Any:
        return Tiny(tmp_path, {"typed": Typed}).execute(trainer="preflight")[0]

    change, _ = CHANGES["dtype"]
    both = Tiny(tmp_path, {"polluting": lambda: Polluting(change), "typed": Typed})
    with put_back():
        (facts,) = both.execute(trainer="preflight")
        assert facts.recipe["architecture"]["typed"] == alone().recipe["architecture"]["typed"]
