"""Machines that refuse, and clocks that jump: no number changes, nobody waits for ever."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from asynckfold.system import readers
from asynckfold.training.worker.fork_server import exit_with_parent


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``ulimit -u 4``."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_a_server_starts_where_no_thread_can_be_started() -> None:
    here, there = os.pipe()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with exit_with_parent(here):
        entered = True
    assert entered
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    os.close(here)
    os.close(there)


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_the_age_of_a_process_is_not_the_wall_clocks(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """What is subtracted as one's own load depends on it."""
    now: Any = time.time
    before = readers.read_age(os.getpid())
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    assert before <= readers.read_age(os.getpid()) < before + 60
