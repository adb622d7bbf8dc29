"""A dataset is read in worker processes: what its code does there ends neither call nor caller."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from asynckfold import AsyncKFold, InputError, RunStore
from asynckfold.engines.server_process import ServerProcess
from tests.toy import adam

COUNT, BAD = 60, 43


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows whose place is told by their values; the one at `BAD` does something else."""

    def __init__(self, bad: Any = None, count: int = COUNT) -> None:
        self.bad = bad
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == BAD and self.bad is not None:
            self.bad()
        return torch.tensor([index / 10, 1.0]), index % 2


def segfault() -> None:
    ctypes.string_at(0)


def never_end() -> None:
    while True:
        time.sleep(60)


def exit_now() -> None:
    os._exit(3)


def leave() -> None:
    sys.exit(3)


def kfold(dataset: Any, root: Path, **settings: Any) -> AsyncKFold:
    settings = {"verbose": 0, "baseline": None, "threads_per_job": 1, "n_jobs": 2, **settings}
    return AsyncKFold(3, dataset, root, nn.CrossEntropyLoss(), 16, **settings)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def read(dataset: Any, root: Path, **settings: Any) -> str:
    """Return the fingerprint of the data that a call reads."""
    sweep = kfold(dataset, root, **settings)
    return sweep.plan({"linear": linear}, ["constant"], adam, {"epochs": 1})[0].dataset


def notes(dataset: Any, root: Path, model: Any = linear, **settings: Any) -> list[str]:
    """Return what a call says of its data."""
    kfold(dataset, root, **settings)({"linear": model}, ["constant"], adam, {"epochs": 1})
    with RunStore.read(root) as store:
        return [event.text for event in store.events() if event.kind == "note"]


def message(dataset: Any, root: Path, **settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        kfold(dataset, root, **settings)({"linear": linear}, ["constant"], adam, {"epochs": 1})
    assert len(caught.value.problems) == 1
    assert not root.exists()
    return str(caught.value)


@pytest.mark.nightly(
    but=[
        "segfault-dataset[43] must be readable: received the process that read it died: SIGSEGV",
        "<lambda>-dataset[43] must be readable: received ZeroDivisionError",
    ]
)
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            segfault,
            "dataset[43] must be readable: received the process that read it died: SIGSEGV",
        ),
        (exit_now, "dataset[43] must be readable: received the process that read it died: exit c"),
        (leave, "dataset[43] must be readable: received SystemExit: 3"),
        (lambda: 1 / 0, "dataset[43] must be readable: received ZeroDivisionError"),
    ],
)
def test_a_sample_that_ends_its_process_is_named(bad: Any, text: str, root: Path) -> None:
    assert message(Rows(bad), root).startswith(text)


def test_a_sample_that_never_ends_is_named(root: Path) -> None:
    text = message(Rows(never_end), root, stall_timeout=1.0)
    assert text.startswith("dataset[43] must be read in time: received no end within stall_timeout")


def test_a_step_that_ends_its_process_is_named(root: Path) -> None:
    def step(row: torch.Tensor) -> torch.Tensor:
        return exit_now() if row[0].item() > 4.25 else row

    inputs = torch.stack([Rows()[index][0] for index in range(COUNT)])
    dataset = (inputs, torch.arange(COUNT) % 2)
    text = message(dataset, root, eval_transform=step)
    assert text.startswith("dataset[0] and others, with their transform, must be readable")


def test_each_sample_is_read_as_the_caller_reads_it(tmp_path: Path) -> None:
    for root, dtype in (("a", torch.float32), ("b", torch.float64)):
        torch.set_default_dtype(dtype)
        try:
            here = read(Rows(), tmp_path / root, parallelize=False)
            there = read(Rows(), tmp_path / root)
        finally:
            torch.set_default_dtype(torch.float32)
        assert here == there


class Slow(Rows):
    """So slow that several readers pay."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        time.sleep(0.01)
        inputs, target = super().__getitem__(index)
        return torch.cat([inputs, torch.tensor([float(os.getpid())])]), target


def test_several_processes_read_ranges(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynckfold.sweep.reading.SECONDS_EACH", 0.05)
        told = notes(Slow(count=100), tmp_path / "run", lambda: nn.Linear(3, 2))
    # The samples that are compared with those of this process differ, so that it reads all.
    assert any("samples were read in this process" in note for note in told)


def test_what_cannot_be_sent_is_read_here_and_that_is_said(tmp_path: Path) -> None:
    dataset = Rows()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    told = notes(dataset, tmp_path / "run")
    (note,) = [note for note in told if "which a crash would end" in note]
    assert "cannot be sent" in note


@pytest.mark.chooses_process
def test_this_process_reads_what_it_has_read_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (10.0, 0.1):
        monkeypatch.setattr(ServerProcess, "seconds_to_serve", seconds)
        told = notes(Slow(count=100), tmp_path / str(seconds), lambda: nn.Linear(3, 2))
        assert any("asks for them" in note for note in told) == (seconds > 1)


@pytest.mark.parametrize("name", ["tuple", "tensors"])
def test_what_runs_no_code_of_the_users_needs_no_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*found: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("asynckfold.sweep.reading.WorkerReaders.__call__", refused)
    x, y = torch.rand(COUNT, 4), torch.arange(COUNT) % 2
    read((x, y) if name == "tuple" else TensorDataset(x, y), tmp_path / "run")
    with pytest.raises(AssertionError):
        read(Rows(), tmp_path / "run")


def test_the_same_bits_with_and_without_processes(tmp_path: Path) -> None:
    class Drawn(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            target = int(torch.randint(2, ()))
            return torch.tensor([float(target), index / COUNT]), target

    found = [
        kfold(Drawn(), tmp_path / str(parallel), parallelize=parallel)(
            {"linear": linear}, ["constant"], adam, {"epochs": 2}
        )
        for parallel in (True, False)
    ]
    assert found[0].fingerprint == found[1].fingerprint
    one, other = (results.oof["linear/constant"] for results in found)
    assert np.array_equal(one, other)


def test_data_that_were_edited_between_two_calls_are_refused(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(COUNT, 2)).astype(np.float32)

    class Mapped(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
            return torch.tensor(mapped[index]) + 0 * torch.rand(2), index % 2

    def call() -> Any:
        np.save(tmp_path / "rows.npy", rows)
        made = kfold(Mapped(), tmp_path / "run", parallelize=False)
        return made({"linear": linear}, ["constant"], adam, {"epochs": 1})

    first = call()
    assert call().fingerprint == first.fingerprint
    rows[BAD, 1] += 0.5
    with pytest.raises(InputError, match="data"):
        call()


SCRIPT = """
import sys, time
import torch
from torch.utils.data import Dataset
from asynckfold import AsyncKFold

class Slow(Dataset):
    def __len__(self): return 50
    def __getitem__(self, index):
        if index == 43:
            print("there", file=open(sys.argv[1] + "/there", "w"))
            time.sleep(600)
        return torch.zeros(2), index % 2

def main():
    kfold = AsyncKFold(2, Slow(), sys.argv[1] + "/run", torch.nn.CrossEntropyLoss(), 8, verbose=0)
    kfold({"a": lambda: torch.nn.Linear(2, 2)}, ["constant"], lambda m: None, {"epochs": 1})

main()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_of_the_caller_ends_its_readers(number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as caller:
        end = time.monotonic() + 90
        while not (tmp_path / "there").exists() and time.monotonic() < end:
            assert caller.poll() is None
            time.sleep(0.05)
        started = psutil.Process(caller.pid).children(recursive=True)
        assert started
        caller.send_signal(number)
        _, told = caller.communicate(timeout=30)
    assert b"InterruptedRunError" in told if number == signal.SIGINT else told == b""
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert not (tmp_path / "run" / "run.db").exists() or number == signal.SIGKILL
