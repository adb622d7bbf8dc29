"""Signals, errors in scripts, and the files of a run: what others do to them, and who may read."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.utils.data import Dataset

from asynckfold import (
    AsyncKFold,
    AsyncKFoldError,
    CVResults,
    InputError,
    InterruptedRunError,
    StorageError,
    StoreCorruptError,
    load_results,
)
from asynckfold.store import lock, opening
from asynckfold.system.signals import ENDINGS
from tests.toy import Tiny, adam, samples


def call(root: Path, data: Any = None, models: Any = Tiny, **settings: Any) -> CVResults:
    kfold = AsyncKFold(
        2,
        data or samples(),
        root,
        nn.CrossEntropyLoss(),
        10,
        **{"baseline": None, "verbose": 0, "parallelize": False, **settings},
    )
    return kfold([models], ["cosine"], adam, {"epochs": 2})


# Signals


def struck(outputs: Any, targets: Any) -> float:
    """Score a fold; get the signal that the environment names, which the call must handle."""
    number = int(os.environ.pop("STRIKE", 0))
    if number:
        assert signal.getsignal(number) is not signal.SIG_DFL
        signal.raise_signal(number)
    return 1.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_script_as_it_ends_the_command(
    number: signal.Signals, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = call(root.with_name("golden"), scoring={"own": struck}).fingerprint
    before = [signal.getsignal(item) for item in ENDINGS]
    monkeypatch.setenv("STRIKE", str(int(number)))
    with pytest.raises(InterruptedRunError, match="the same call continues") as caught:
        call(root, scoring={"own": struck})
    assert caught.value.exit_code == 143
    assert [signal.getsignal(item) for item in ENDINGS] == before
    with pytest.warns(RuntimeWarning, match="1 of 2 jobs have no result yet"):
        load_results(root)
    assert call(root, scoring={"own": struck}).fingerprint == golden


def test_after_sigterm_a_script_has_its_exit_code() -> None:
    code = "from asynckfold import InterruptedRunError as E; raise E('interrupted by SIGTERM', 143)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 143
    assert "InterruptedRunError: interrupted by SIGTERM\n" in ended.stderr


# Tracebacks


def printed(act: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what a script prints that ends by an error."""
    before, sys.excepthook = sys.excepthook, sys.__excepthook__
    try:
        act()
    except Exception as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = before
    return capsys.readouterr().err.splitlines()


def test_an_error_of_ours_is_the_users_line_and_the_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ours() -> None:
        load_results(tmp_path / "nothing")

    lines = printed(ours, capsys)
    places = [line for line in lines if line.startswith("  File ")]
    assert lines[0] == "Traceback (most recent call last):"
    assert [Path(line.split('"')[1]).name for line in places] == [Path(__file__).name] * 2
    assert lines[-1].startswith("asynckfold.errors.InputError: run must be the folder of a run")

    def with_a_cause() -> None:
        try:
            raise ZeroDivisionError("mine")
        except ZeroDivisionError as error:
            raise InputError.one("rule", "value", "remedy") from error

    lines = printed(with_a_cause, capsys)
    assert [line for line in lines if "Error: " in line] == [
        "ZeroDivisionError: mine",
        "asynckfold.errors.InputError: rule: received value. remedy",
    ]


def test_errors_of_others_are_printed_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AsyncKFoldError):
        raise AsyncKFoldError("once")

    def theirs() -> None:
        raise ValueError("theirs")

    (first, *_, last) = printed(theirs, capsys)
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: theirs"


def test_python_shows_all_in_its_development_mode() -> None:
    code = "import asynckfold; asynckfold.load_results('nowhere')"
    for flags, shown in (((), False), (("-X", "dev", "-W", "ignore"), True)):
        line = [sys.executable, *flags, "-c", code]
        ended = subprocess.run(line, capture_output=True, text=True)
        assert ended.returncode == 1
        assert ("opening.py" in ended.stderr) == shown


# What others do to the files of a run


@pytest.mark.parametrize("content", [None, b"", b"of another program"])
def test_lost_folds_are_written_again_by_the_same_call(root: Path, content: bytes | None) -> None:
    golden = call(root).fingerprint
    splits = root / "splits.npz"
    splits.unlink()
    if content is not None:
        splits.write_bytes(content)
    with pytest.raises(StoreCorruptError, match="began the run writes it again"):
        load_results(root)
    assert call(root).fingerprint == golden
    found = load_results(root)
    assert found.counts["done"] == 2
    assert found.n_samples == 60


def test_a_job_that_removes_the_run_is_named_as_the_cause(root: Path) -> None:
    def clear(outputs: Any, targets: Any) -> float:
        (root / "run.db").unlink(missing_ok=True)
        return 1.0

    with pytest.raises(StorageError, match=r"run\.db was moved, replaced or removed") as caught:
        call(root, scoring={"own": clear})
    assert "make room" not in str(caught.value)
    assert "Restore it from a copy" in str(caught.value)


def test_a_lock_that_cannot_be_had_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(root)
    monkeypatch.setattr(opening, "BUSY_SECONDS", 0.01)
    other = sqlite3.connect(root / "run.db", isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageError, match=r"locked by another process's commit.* no locks"):
            load_results(root)
    finally:
        other.close()


def test_each_fault_of_a_disk_has_its_own_remedy(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, remedy in ((errno.EIO, "look for a broken disk"), (errno.EROFS, "make it writ")):

        def refuse(*_: Any, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(lock, "open_plain", refuse)
            with pytest.raises(StorageError, match=f"stays; {remedy}"):
                call(root)


# Readers


class Fatal(Dataset[Any]):
    """Ends the process that reads a sample, so many times."""

    def __init__(self, folder: Path, times: int, samples: tuple[int, ...]) -> None:
        self.folder, self.times, self.samples = folder, times, samples

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Any, int]:
        deaths = len(list(self.folder.glob("death-*")))
        if deaths < self.times and index == self.samples[deaths % len(self.samples)]:
            (self.folder / f"death-{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(8, index % 3, np.float32), index % 3


def test_a_killed_reader_is_retried_as_any_worker(tmp_path: Path) -> None:
    data = Fatal(tmp_path, 2, (41, 47))
    found = call(tmp_path / "run", data, parallelize=True, n_jobs=1)
    assert found.counts["done"] == 2
    assert len(list(tmp_path.glob("death-*"))) == 2


def test_a_reader_that_is_always_killed_is_no_damage_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must not be ended from outside") as caught:
        call(tmp_path / "run", Fatal(tmp_path, 9, (41,)), parallelize=True, n_jobs=1)
    assert "SIGKILL, SIGKILL, SIGKILL; the last one read dataset[41]" in str(caught.value)
    assert "Repair the dataset" not in str(caught.value)


# Who may read, and how much


def test_a_page_that_was_opened_to_others_stays_open(root: Path) -> None:
    page = root / "report" / "index.html"
    before = os.umask(0o022)
    try:
        call(root)
        page.parent.mkdir()
        page.touch(0o640)
        load_results(root).report()
    finally:
        os.umask(before)
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    new = [root / "run.db", root / "splits.npz", page.with_name("summary.csv")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in new if path.exists()} == {0o644}
    assert stat.S_IMODE((root / "Tiny").stat().st_mode) == 0o755


def test_the_limit_on_memory_counts_the_workers(root: Path) -> None:
    with pytest.raises(InputError, match="max_memory must be enough for one job") as caught:
        call(root, max_memory="20MiB", parallelize=True)
    assert "Pass max_memory='65MiB' or more" in str(caught.value)
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, fuse=2)
    found = kfold.forecast([Tiny], ["cosine"], adam, {"epochs": 2})
    jobs = [item.memory for item in found.requests.values()]
    (group,) = found.units.values()
    assert min(jobs) > 64 << 20
    # One worker trains both.
    assert group.memory < sum(jobs) - (60 << 20)
