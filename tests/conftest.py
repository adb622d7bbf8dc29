"""What every test gets: a folder for a run, and no leftovers from the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is; no test asserts a speed.
settings.register_profile("asynckfold", deadline=None)
settings.load_profile("asynckfold")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a run that does not exist yet."""
    return tmp_path / "run"
