"""One thread for every test of the training, as the plan of a small job has it; no waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.tiny import Tiny


@pytest.fixture(autouse=True)
def _as_in_a_small_job(one_thread: None, hasty_disk: None) -> None:
    """Of all tests here."""


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """The smallest sweep: one model, one LR schedule, three folds."""
    return Tiny(tmp_path / "run")
