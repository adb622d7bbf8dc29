"""Damage is seen before use: run.db and checkpoints cut, flipped, zeroed, gone, foreign, linked."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import AsyncKFoldError, Baseline, RunStore, StorageError, StoreCorruptError
from asynckfold.store import job_folder
from asynckfold.system.files import write_whole
from tests.durability.work import FOLDS, PLAN, TARGETS, work
from tests.records import finish, make_result, write_checksums

JOB = PLAN.jobs[0]
SEED = 20
FLIPS = 300
pytestmark = pytest.mark.damages("every test here hurts a run, and looks at what is said of it")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with something in every table."""
    root = tmp_path_factory.mktemp("finished") / "run"
    with Path(os.devnull).open("wb") as nowhere:
        work(root, nowhere.fileno())
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS, {"command": "test"})
        store.event("note", "a remark", JOB.id)
        store.sample("packed", 1.5, 1.25, (1.0, 0.5))
        store.set_baseline(Baseline("measured", 9.5, 2, {"A/cosine": 4.0}, {"A/cosine": 0.5}))
    return root


def everything(root: Path) -> dict[str, Any]:
    """Return everything that can be read of a run, as values that compare equal."""
    with RunStore.read(root) as store:
        results = store.results()
        return {
            "results": {name: vars(item) | {"outputs": 0} for name, item in results.items()},
            "digests": {name: item.digest for name, item in results.items()},
            "plan": store.plan,
            "about": store.about,
            "baseline": store.baseline,
            "finished": store.finished(),
            "fingerprint": store.fingerprint(),
            "epochs": store.epochs(),
            "attempts": store.attempts(),
            "checkpoints": [store.checkpoints(job.id) for job in PLAN.jobs],
            "events": store.events(),
            "samples": store.samples(),
            "sessions": store.sessions(),
            "counts": store.counts(),
        }


def read_or_refused(root: Path, wanted: dict[str, Any]) -> bool:
    """Return whether the run was refused; if not, check that everything is as written."""
    try:
        found = everything(root)
    except StoreCorruptError:
        return True
    assert found == wanted
    return False


@pytest.mark.nightly
def test_a_flipped_bit_is_detected_or_harmless(finished: Path, root: Path) -> None:
    wanted = everything(finished)
    shutil.copytree(finished, root)
    path = root / "run.db"
    data = path.read_bytes()
    generator = random.Random(SEED)
    refused = 0
    used = [place for place, byte in enumerate(data) if byte]
    for number in range(FLIPS):
        # Half of them where something stands: most of a small database is empty.
        place = generator.choice(used) if number % 2 else generator.randrange(len(data))
        bit = 1 << generator.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        refused += read_or_refused(root, wanted)
        try:
            RunStore.hold(root).close()
        except StoreCorruptError:
            continue
        assert everything(root) == wanted
    print(f"\n{refused} of {FLIPS} flips refused, the others harmless, seed {SEED}")
    assert refused > FLIPS // 4


def test_a_flipped_bit_in_a_row_is_detected(finished: Path, root: Path) -> None:
    """Flip one bit in each byte of the stored outputs."""
    wanted = everything(finished)
    shutil.copytree(finished, root)
    path = root / "run.db"
    data = path.read_bytes()
    with RunStore.read(finished) as store:
        outputs = np.ascontiguousarray(store.results()[JOB.id].outputs).tobytes()
    place = data.index(outputs)
    for position in range(place, place + len(outputs)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert read_or_refused(root, wanted)


def test_a_truncated_file_is_detected(finished: Path, root: Path) -> None:
    wanted = everything(finished)
    shutil.copytree(finished, root)
    path = root / "run.db"
    data = path.read_bytes()
    generator = random.Random(SEED)
    lengths = [0, 1, 99, 100, 4096, len(data) - 4096, len(data) - 1]
    for length in lengths + [generator.randrange(len(data)) for _ in range(60)]:
        path.write_bytes(data[:length])
        assert read_or_refused(root, wanted), length
        with pytest.raises(StoreCorruptError, match=r"run\.db"):
            RunStore.hold(root)
        assert path.read_bytes() == data[:length], "a refused file is left as it was found"


def test_a_file_that_lacks_zeros_only_is_detected(root: Path) -> None:
    RunStore.hold(root).close()
    path = root / "run.db"
    assert path.read_bytes().endswith(b"\0\0")
    os.truncate(path, path.stat().st_size - 1)
    for opened in (RunStore.read, RunStore.hold):
        with pytest.raises(StoreCorruptError, match="cut in the middle of a page"):
            opened(root)


def test_a_run_without_its_database_is_not_overwritten(finished: Path, root: Path) -> None:
    shutil.copytree(finished, root)
    (root / "run.db").unlink()
    with pytest.raises(StoreCorruptError, match=r"run\.db is missing or empty"):
        RunStore.hold(root)
    (root / "splits.npz").unlink()
    RunStore.hold(root).close()


def test_a_session_killed_before_its_plan_is_no_damage(root: Path) -> None:
    store = RunStore.hold(root)
    (root / "splits.npz").write_bytes(b"of a session that was killed before its plan")
    store.close()
    (root / "run.db").unlink()
    RunStore.hold(root).close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE results SET record = replace(record, 'seconds', 'minutes')",
        "UPDATE attempts SET outcome = 'died'",
        "UPDATE meta SET value = value || ' ' WHERE key = 'plan'",
    ],
)
def test_a_changed_row_is_detected(finished: Path, root: Path, change: str) -> None:
    shutil.copytree(finished, root)
    with sqlite3.connect(root / "run.db") as db:
        db.execute(change)
    db.close()
    with pytest.raises(StoreCorruptError, match=r"run\.db"):
        RunStore.read(root)
    with pytest.raises(StoreCorruptError, match=r"run\.db"):
        RunStore.hold(root)


def test_a_result_changed_while_the_run_is_held_is_detected(root: Path) -> None:
    """Readers check the row's checksum, the holder the result's digest."""
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)
        attempt = store.start_attempt(JOB.id, (0,), 1, "cpu", 1.0)
        store.record(make_result(JOB.id, attempt))
        with sqlite3.connect(root / "run.db") as db:
            db.execute("UPDATE results SET record = replace(record, '0.75', '0.95')")
        db.close()
        with pytest.raises(StoreCorruptError, match=f"1 rows of results .*{JOB.id}"):
            RunStore.read(root)
        with pytest.raises(StoreCorruptError, match=f"the result of {JOB.id} is not what was"):
            store.reader.results()


# Checkpoints


def begun(root: Path) -> RunStore:
    store = RunStore.hold(root)
    store.begin(PLAN, FOLDS, TARGETS)
    return store


@pytest.fixture
def half(root: Path, finished: Path) -> Path:
    """A run whose first job has two checkpoints and no result."""
    shutil.copytree(finished, root)
    with RunStore.hold(root) as store, store.file.transaction():
        store.file.execute("DELETE FROM results")
        store.file.execute("UPDATE attempts SET outcome = 'died'")
        write_checksums(store.file.connection)
    return root


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:99] + bytes([data[99] ^ 8]) + data[100:])


def swap(path: Path) -> None:
    (older,) = (other for other in path.parent.glob("*.safetensors") if other != path)
    shutil.copy(older, path)


def link(path: Path) -> None:
    away = path.parents[3] / "elsewhere"
    path.rename(away)
    path.symlink_to(away)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [cut, flip, swap, Path.unlink, link, fifo])
def test_a_damaged_checkpoint_is_set_aside_for_the_previous_one(
    half: Path, golden: str, damage: Callable[[Path], None]
) -> None:
    with RunStore.read(half) as store:
        newest, older = store.checkpoints(JOB.id)
    path = half / newest.file
    damage(path)
    damaged = path.read_bytes() if path.is_file() else None
    with begun(half) as store:
        assert store.reader.checkpoints(JOB.id) == [older]
        (event,) = (item for item in store.reader.events() if item.kind == "damage")
        assert event.job_id == JOB.id
        assert newest.file in event.text
    if damage in (cut, flip, swap):
        assert path.with_name(f"{path.name}.bad").read_bytes() == damaged
        assert not path.exists()
    with begun(half) as store:
        assert len([item for item in store.reader.events() if item.kind == "damage"]) == 1
    with Path(os.devnull).open("wb") as nowhere:
        assert work(half, nowhere.fileno()) == golden


def test_a_job_with_two_damaged_checkpoints_starts_over(half: Path, golden: str) -> None:
    for path in (half / "A").rglob("*.safetensors"):
        flip(path)
    with Path(os.devnull).open("wb") as nowhere:
        assert work(half, nowhere.fileno()) == golden
    assert len(list(half.rglob("*.bad"))) == 2 * len(PLAN.jobs)
    with RunStore.read(half) as store:
        told = [item for item in store.events() if item.kind == "damage"]
        assert len(told) == 2 * len(PLAN.jobs)
        newest = {item.job_id: item.attempt for item in store.attempts()}
        assert store.counts()["done"] == len(PLAN.jobs)
        for job in PLAN.jobs:
            numbers = [ref.epoch for ref in store.checkpoints(job.id)]
            assert numbers == [3, 2], "trained again, from the first epoch"
            assert {ref.attempt for ref in store.checkpoints(job.id)} == {newest[job.id]}


def test_a_checkpoint_outside_its_folder_is_not_touched(half: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("mine")
    with RunStore.hold(half) as store, store.file.transaction():
        store.file.execute("UPDATE checkpoints SET file = '../canary' WHERE epoch = 3")
        write_checksums(store.file.connection)
    with begun(half) as store:
        assert [ref.epoch for ref in store.reader.checkpoints(JOB.id)] == [2]
    assert canary.read_text() == "mine"
    assert list(tmp_path.glob("*.bad")) == []


def test_only_leftovers_of_a_crash_are_removed(half: Path, tmp_path: Path) -> None:
    folder = job_folder(half, JOB)
    outside = tmp_path / "outside.1.tmp"
    ours = [folder / "checkpoint-0003-000000-1.safetensors.123.tmp", half / "splits.npz.9.tmp"]
    ours += [folder / "checkpoint-0009-000000-1.safetensors"]
    ours += [half / "oof/A-cosine.npz.3.tmp"]
    ours[-1].parent.mkdir()
    theirs = [folder / "notes.txt", folder / "mine.tmp", half / "mine.123.tmp", outside]
    for path in ours + theirs:
        path.write_text("x")
    (folder / "checkpoint-9.safetensors.7.tmp").symlink_to(outside)
    (folder / "checkpoint-folder.8.tmp").mkdir()
    for _ in range(2):
        begun(half).close()
        assert [path for path in ours if path.exists()] == []
        assert [path for path in theirs if not path.exists()] == []
    assert (folder / "checkpoint-9.safetensors.7.tmp").is_symlink()


def test_a_job_has_the_summary_of_its_end_and_of_no_other(
    half: Path, golden: str, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    canary.write_text("mine")
    path = job_folder(half, JOB) / "summary.json"
    path.write_text('{"status": "failed"}')
    with begun(half) as store:
        assert not path.exists()
        assert finish(store, JOB.id, status="failed", outputs=None)
        assert json.loads(path.read_text())["status"] == "failed"
    begun(half).close()
    assert not path.exists(), "the job is tried again"
    with Path(os.devnull).open("wb") as nowhere:
        assert work(half, nowhere.fileno()) == golden
    text = path.read_text()
    path.unlink()
    path.symlink_to(canary)
    begun(half).close()
    assert not path.is_symlink()
    assert path.read_text() == text, "what a kill left out is made up for"
    assert canary.read_text() == "mine"


# Late writers


def test_a_writer_of_an_earlier_attempt_or_session_is_refused(root: Path) -> None:
    with begun(root) as store:
        old = store.start_attempt(JOB.id, (0,), 1, "cpu", 1.0)
        store._session = 0  # the session ends like one that was killed: nothing is written
    with begun(root) as store:
        assert not store.record(make_result(JOB.id, old, weights="late"))
        for number in (2, 3):
            assert store.start_attempt(JOB.id, (0,), 1, "cpu", 1.0) == number
            store.end_attempt(JOB.id, number, "died") if number == 2 else store.interrupt()
            assert not store.record(make_result(JOB.id, number))
    for number in (4, 5):
        with begun(root) as store:
            assert store.start_attempt(JOB.id, (0,), 1, "cpu", 1.0) == number
            assert not store.record(make_result(JOB.id, old, weights="late"))
            assert store.record(make_result(JOB.id, number, status="failed"))
            assert not store.record(make_result(JOB.id, number))


# A disk that refuses


def test_a_failed_clean_up_does_not_hide_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        write_whole(tmp_path / "nowhere" / "file", b"x")


def test_every_error_of_the_store_has_an_exit_code(finished: Path, root: Path) -> None:
    shutil.copytree(finished, root)
    (root / "run.db").unlink()
    (root / "run.db").mkdir()
    for opened in (RunStore.hold, RunStore.read):
        with pytest.raises(AsyncKFoldError, match=r"run\.db|no run"):
            opened(root)
