"""What every test gets: a folder for a run, and no leftovers from the one before."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a run that does not exist yet."""
    return tmp_path / "run"
