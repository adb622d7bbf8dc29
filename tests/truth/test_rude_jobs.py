"""A job that is no good guest of its machine fails alone; the others have their numbers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AllJobsFailedError, AsyncKFold, RunStore
from asynckfold.engines import server_process, warm_pool
from tests.leftovers import gone
from tests.nursery import fresh_server
from tests.training.tiny import Plain, samples, sgd


def run(root: Path, models: dict[str, Callable[[], Any]], **settings: Any) -> dict[str, Any]:
    call = AsyncKFold(
        2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline=None, **settings
    )
    call(models, ["constant"], sgd, {"epochs": 1})
    with RunStore.read(root) as store:
        return dict(store.results())


# What a job starts


class Daemon(Plain):
    """Starts a process that leaves its worker's session, and notes what it has open."""

    def __init__(self, way: str, notes: Path) -> None:
        super().__init__()
        if way == "popen":
            subprocess.Popen([sys.executable, "-c", NOTE, str(notes)], start_new_session=True)
            return
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                exec(NOTE, {"sys": sys, "folder": str(notes)})
            os._exit(0)


NOTE = """
import os, sys, time
folder = globals().get("folder") or sys.argv[1]
with open(os.path.join(folder, str(os.getpid())), "w") as file:
    for name in os.listdir("/proc/self/fd"):
        try:
            file.write(os.readlink("/proc/self/fd/" + name) + chr(10))
        except OSError:
            pass
time.sleep(100)
os._exit(0)
"""


def notes_in(folder: Path, count: int) -> dict[int, list[str]]:
    deadline = time.monotonic() + 30
    while len(found := [item for item in folder.iterdir() if item.stat().st_size]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {int(item.name): item.read_text().splitlines() for item in found}


@pytest.mark.nightly(but=["popen"])
@pytest.mark.parametrize("way", ["popen", "fork"])
def test_a_daemon_ends_with_its_worker_and_holds_no_output(tmp_path: Path, way: str) -> None:
    """Whoever reads the output of the command to its end waits for all who could write there."""
    notes = tmp_path / "notes"
    notes.mkdir()
    outputs = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in (1, 2)} - {os.devnull}
    results = run(
        tmp_path / "run",
        {"daemon": lambda: Daemon(way, notes), "good": Plain},
        threads_per_job=1,
        fuse=False,
    )
    assert {result.status for result in results.values()} == {"done"}
    # One a job, and one of the dry run; some may not have come to note anything.
    found = notes_in(notes, 1)
    assert gone({int(item.name) for item in notes.iterdir()})
    assert all(outputs.isdisjoint(targets) for targets in found.values())


def test_a_daemon_of_a_killed_worker_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckfold.scheduling.retries.PAUSE_FACTOR", 1.0)
    notes = tmp_path / "notes"
    notes.mkdir()

    class Killed(Daemon):
        def __init__(self) -> None:
            super().__init__("fork", notes)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            notes_in(notes, 1)
            os.kill(os.getpid(), signal.SIGKILL)
            return inputs

    with pytest.raises(AllJobsFailedError, match="SIGKILL"):
        run(tmp_path / "run", {"killed": Killed}, threads_per_job=1, fuse=False)
    assert gone(set(notes_in(notes, 1)))


# What a job takes from its process

kept: list[int] = []


@pytest.mark.nightly
def test_files_that_come_few_at_a_time_end_a_worker_in_time(tmp_path: Path) -> None:
    """The job that finds none left is not the one that took them."""

    class Leaks(Plain):
        def __init__(self) -> None:
            super().__init__()
            kept.extend(os.dup(0) for _ in range(20))

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    warm_pool.close_warm()
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        # One that the nursery of these tests forks would have the nursery's limits.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_process, "start_server", fresh_server)
            words = {"n_jobs": 1, "threads_per_job": 1, "fuse": False, "n_repeats": 5}
            results = run(tmp_path / "run", {"leaks": Leaks}, **words)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        warm_pool.close_warm()
    assert [result.status for result in results.values()] == ["done"] * 10
