"""A job that is no good guest of its machine fails alone; the others have their numbers."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.engines import pool as pools
from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.result import DONE, FAILED
from asynckfold.store import RunStore
from asynckfold.training.worker import FEW_FILES, refuse_own_fault
from tests.nursery import fresh_server
from tests.training.tiny import Noisy, Plain, samples, sgd

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


@pytest.fixture(scope="module", autouse=True)
def _few_files() -> Iterator[None]:
    """Let workers have few open files, so that they are soon used up."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    pools.close_warm()
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        # One that the nursery of these tests forks would have the nursery's limits.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pools, "_start_server", fresh_server)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        pools.close_warm()


class Rude(Plain):
    """Harms its process in its first evaluation, after which it is to be saved."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            RUDE[self.what]()
        return super().forward(inputs)


def run(root: Path, models: dict[str, Callable[[], Any]], **settings: Any) -> dict[str, Any]:
    call = AsyncKFold(
        2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline=None, **settings
    )
    call(models, ["constant"], sgd, {"epochs": 1})
    with RunStore.read(root) as store:
        return dict(store.results())


@pytest.mark.parametrize("what", RUDE)
@pytest.mark.filterwarnings("ignore::asynckfold.kfold.JobsFailedWarning")
def test_a_job_that_takes_its_process_its_files_fails_alone(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckfold.retries.PAUSE_FACTOR", 1.0)
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
    from asynckfold import proc

    error = StorageError(number, "could not write")
    if not own:
        refuse_own_fault(error, proc.open_files() + files, limited)
        return
    with pytest.raises(WorkerDiedError, match="it l"):
        refuse_own_fault(error, proc.open_files() + files, limited)
