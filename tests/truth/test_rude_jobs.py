"""A job that is no good guest of its machine fails alone; the others have their numbers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, RunStore, StorageError
from asynckfold.engines import server_process, warm_pool
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.result import DONE, FAILED
from asynckfold.training.worker.execute import FEW_FILES, refuse_own_fault
from tests.engines.test_pool import look
from tests.leftovers import gone
from tests.nursery import fresh_server
from tests.toy import task, toy_bundle
from tests.training.tiny import Noisy, Plain, samples, sgd


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
    assert {result.status for result in results.values()} == {DONE}
    # One a job, and one of the dry run; some may not have come to note anything.
    found = notes_in(notes, 1)
    assert gone({int(item.name) for item in notes.iterdir()})
    assert all(outputs.isdisjoint(targets) for targets in found.values())


def test_a_daemon_of_a_killed_worker_ends_too(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()

    class Killed(Daemon):
        def __init__(self) -> None:
            super().__init__("fork", notes)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            notes_in(notes, 1)
            os.kill(os.getpid(), signal.SIGKILL)
            return inputs

    with toy_bundle(tmp_path / "run", models={"model": Killed}) as (bundle, data):
        pool = WorkerPool()
        try:
            made = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
            placement = Placement((bundle.plan.jobs[0].id,), ())
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                made.submit(placement, [task(bundle.plan.jobs[0])]).result(60)
            # While the pool stays.
            assert gone(set(notes_in(notes, 1)))
            made.close()
        finally:
            pool.close()


# What a job takes from its process

kept: list[int] = []


def open_all() -> None:
    try:
        while True:
            kept.append(os.dup(0))
    except OSError:
        pass


RUDE: dict[str, Callable[[], Any]] = {
    "leaks files": open_all,
    "few open files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5)),
    "small files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)),
}


@pytest.fixture(scope="module")
def _few_files() -> Iterator[None]:
    """Let workers have few open files, so that they are soon used up."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    warm_pool.close_warm()
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        # One that the nursery of these tests forks would have the nursery's limits.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_process, "start_server", fresh_server)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        warm_pool.close_warm()


class Rude(Plain):
    """Harms its process in its first evaluation, after which it is to be saved."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            RUDE[self.what]()
        return super().forward(inputs)


@pytest.mark.nightly
@pytest.mark.usefixtures("_few_files")
@pytest.mark.parametrize("what", RUDE)
@pytest.mark.filterwarnings("ignore::asynckfold.api.kfold.JobsFailedWarning")
def test_a_job_that_takes_its_process_its_files_fails_alone(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckfold.scheduling.retries.PAUSE_FACTOR", 1.0)
    expected = run(tmp_path / "alone", {"good": Noisy})
    # One worker, so that the good jobs are after the others in it.
    found = run(
        tmp_path / "both",
        {"rude": lambda: Rude(what), "good": Noisy},
        n_jobs=1,
        threads_per_job=1,
        fuse=False,
    )
    for name, result in expected.items():
        assert (found[name].status, found[name].weights) == (DONE, result.weights)
    rude = [result for name, result in found.items() if name.startswith("rude")]
    assert [result.status for result in rude] == [FAILED] * 2
    for result in rude:
        assert "limits" in result.error or "files" in result.error


@pytest.mark.nightly
@pytest.mark.usefixtures("_few_files")
def test_files_that_come_few_at_a_time_end_a_worker_in_time(tmp_path: Path) -> None:
    """The job that finds none left is not the one that took them."""

    class Leaks(Plain):
        def __init__(self) -> None:
            super().__init__()
            kept.extend(os.dup(0) for _ in range(FEW_FILES // 2 + 4))

    found = run(
        tmp_path / "run", {"leaks": Leaks}, n_jobs=1, threads_per_job=1, fuse=False, n_repeats=5
    )
    assert len(found) == 10
    assert {result.status for result in found.values()} == {DONE}


@pytest.mark.parametrize(
    ("number", "files", "limited", "own"),
    [
        (28, 0, False, False),  # ENOSPC: the disk's
        (24, -FEW_FILES - 1, False, True),  # EMFILE with files left open
        (24, 0, False, False),  # EMFILE where the limit was low from the begin
        (27, 0, True, True),  # EFBIG by a limit of its own
        (27, 0, False, False),  # EFBIG by the limit of the shell
    ],
)
def test_whose_fault_a_refusal_is(number: int, files: int, limited: bool, own: bool) -> None:
    from asynckfold.system import process

    error = StorageError(number, "could not write")
    if not own:
        refuse_own_fault(error, process.open_files() + files, limited)
        return
    with pytest.raises(WorkerDiedError, match="it l"):
        refuse_own_fault(error, process.open_files() + files, limited)
