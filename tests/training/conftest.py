"""One thread for every test of the training, as the plan of a small job has it; no waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asynckfold.training import seeding
from tests.training.tiny import Tiny


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with seeding.preserved():
        torch.set_num_threads(1)
        yield


@pytest.fixture(autouse=True)
def hasty_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What survives a power cut is tested elsewhere; here hundreds of checkpoints are written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """The smallest sweep: one model, one LR schedule, three folds."""
    return Tiny(tmp_path / "run")
