"""Work beside the caller: after the calls, by one process, and a failure is said."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from asynckfold.system import background
from tests import leftovers


def run(data: bytes) -> None:
    """Write the number of this process into a new file; called in a process beside the tests."""
    with Path(data.decode()).open("x") as file:
        file.write(str(os.getpid()))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(background.os, "sched_getaffinity", lambda _: range(2))


def start(path: Path) -> None:
    background.start(__name__, bytes(path), str(path), f"{path.name} was not written")


def test_one_process_begins_once_no_call_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with background.held():
        with background.held():
            start(first)
        start(second)
        start(second)
        time.sleep(0.5)  # in which one that did not wait would have begun
        assert not [*tmp_path.iterdir()]
    leftovers.until(second.exists)
    assert background.wait() == []
    assert first.read_text() == second.read_text() != str(os.getpid())


def test_many_cores_have_one_for_it_during_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background.os, "sched_getaffinity", lambda _: range(16))
    with background.held():
        start(tmp_path / "first")
        leftovers.until((tmp_path / "first").exists)


def test_the_exit_waits_for_no_pause_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PAUSE_SECONDS", 1000.0)
    for name in ("old", "new"):
        start(tmp_path / name)
    (tmp_path / "old").touch()
    (said,) = background.wait()
    assert said.startswith("old was not written: FileExistsError")
    assert (tmp_path / "new").exists()
