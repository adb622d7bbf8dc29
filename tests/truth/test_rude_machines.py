"""Clocks that jump: no number changes."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from asynckfold.system import readers


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_the_age_of_a_process_is_not_the_wall_clocks(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """What is subtracted as one's own load depends on it."""
    now: Any = time.time
    before = readers.CounterReaders().age(os.getpid())
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    assert before <= readers.CounterReaders().age(os.getpid()) < before + 60
