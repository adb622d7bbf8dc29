"""The run on disk: acknowledged results survive kill -9; one writer, readers at any time."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import (
    Baseline,
    Epoch,
    PlanMismatchError,
    RunHeldError,
    RunStore,
    StorageError,
    StoreCorruptError,
    TrainerParams,
)
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.result import ENDED, AveragingSummary, StageEpoch, fingerprint
from asynckfold.store import job_folder
from tests.records import (
    FIRST,
    FOLDS,
    PLAN,
    TARGETS,
    begin,
    finish,
    first_line,
    make_plan,
    make_result,
    other_process,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pretraining": (StageEpoch("layer 1", 1, {"error": 0.5, "gap": math.inf}, 0.25),)},
        {"averaged": AveragingSummary(12, (480, 475, 470))},
        {"peak_gpu_memory": 5 << 30},
        {"epochs": (Epoch(1, 0.5, 0.6, None, 1e-3, 0.1, {"norm": 2.0}),)},
    ],
    ids=["usual", "pretraining", "averaging", "memory of a GPU", "logged"],
)
def test_a_result_is_read_as_it_was_recorded(root: Path, changes: dict[str, Any]) -> None:
    written = make_result(FIRST, **changes)
    with begin(root) as store:
        assert finish(store, FIRST, **changes)
    with RunStore.read(root) as store:
        found = store.results()[FIRST]
        assert found.digest == written.digest
        assert store.fingerprint() == fingerprint({FIRST: written.digest})
        np.testing.assert_array_equal(found.outputs, written.outputs)
        assert replace(found, outputs=None).__dict__ == replace(written, outputs=None).__dict__
    touches = "pretraining" in changes or "epochs" in changes
    assert (found.digest != make_result(FIRST).digest) == touches


def test_nan_and_infinity_survive_the_store(root: Path) -> None:
    nan = float("nan")
    with begin(root) as store:
        store.epoch(FIRST, 1, Epoch(1, nan, math.inf, None, 0.1, 0.2))
        finish(store, FIRST, status="diverged", scores={"accuracy": nan}, outputs=None)
    with RunStore.read(root) as store:
        ((job, item),) = store.epochs()
        assert (job, item.number, item.accuracy) == (FIRST, 1, None)
        assert math.isnan(item.train_loss)
        assert item.valid_loss == math.inf
        assert math.isnan(store.results()[FIRST].scores["accuracy"])


def test_the_summary_of_a_job_is_written_once_its_result_is_durable(root: Path) -> None:
    path = job_folder(root, PLAN.jobs[0]) / "summary.json"
    with begin(root) as store:
        with store.together():
            finish(store, FIRST, scores={"accuracy": np.float32(0.5), "f1": math.nan})
            assert not path.exists()
        found = json.loads(path.read_text())
        with store.together():
            finish(store, PLAN.jobs[1].id)
            store.file.roll_back()
    assert found["scores"] == {"accuracy": 0.5, "f1": None}
    assert (found["job"], found["status"], found["attempts"]) == (FIRST, "done", 1)
    assert (found["epochs"], found["seconds"], found["train_loss"]) == (2, 1.5, 0.4)
    assert (found["device"], found["cores"], found["threads"]) == ("cpu", [0, 1], 2)
    assert len(list(root.rglob("summary.json"))) == 1, "one was rolled back"


def test_plan_folds_and_targets_survive_the_store(root: Path) -> None:
    begin(root).close()
    with RunStore.read(root) as store:
        folds, targets = store.splits()
        assert store.plan == PLAN
        assert store.about == {"command": "test"}
        assert [fold.key for fold in folds] == [fold.key for fold in FOLDS]
        for found, made in zip(folds, FOLDS, strict=True):
            np.testing.assert_array_equal(found.valid, made.valid)
        np.testing.assert_array_equal(targets, TARGETS)


def test_baseline_events_samples_and_seconds_survive_the_store(root: Path) -> None:
    baseline = Baseline("measured", 9.5, 2, {"A/cosine": 4.0}, {"A/cosine": 0.5})
    with begin(root) as store:
        store.event("retry", "out of memory", FIRST)
        store.sample("packed", 1.5, 1.25, (1.0, 0.5))
        store.set_baseline(baseline)
        store.packing(3.0)
        store.packing(None)
    with begin(root) as store:
        store.packing(2.0)
        store.packing(None)
    with RunStore.read(root) as store:
        assert store.baseline == baseline
        (event,) = store.events()
        assert (event.kind, event.job_id, event.text) == ("retry", FIRST, "out of memory")
        (sample,) = store.samples()
        assert (sample.used, sample.own, sample.cores) == (1.5, 1.25, (1.0, 0.5))
        assert sum(item.packed_seconds for item in store.sessions()) == pytest.approx(5.0, abs=0.5)


# Kills


def test_a_killed_attempt_is_lost_and_its_job_pending(root: Path) -> None:
    body = "store = begin(root)\nstore.start_attempt(FIRST, (0,), 1, 'cpu', 1.0)\nprint('up')\n"
    with other_process(root, f"{body}os.kill(os.getpid(), signal.SIGKILL)") as writer:
        writer.wait()
    with begin(root) as store:
        assert [item.outcome for item in store.reader.attempts()] == ["lost"]
        assert store.reader.counts()["pending"] == len(PLAN.jobs)
        assert store.start_attempt(FIRST, (0,), 1, "cpu", 1.0) == 2


def test_a_hot_journal_is_rolled_back_by_a_reader(root: Path) -> None:
    """A writer killed in a transaction leaves a journal, and half the transaction in the file."""
    body = (
        "store = begin(root)\nfinish(store, FIRST)\nstore.close()\n"
        "db = sqlite3.connect(root / 'run.db', isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 2')\ndb.execute('BEGIN IMMEDIATE')\n"
        "db.execute('DELETE FROM results')\n"
        "for _ in range(500):\n"
        "    db.execute('INSERT INTO events (at, kind, text) VALUES (0, ?, ?)', ('x', 'y' * 900))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with other_process(root, body) as writer:
        assert writer.wait() == -signal.SIGKILL
    assert (root / "run.db-journal").stat().st_size > 0
    with RunStore.read(root) as store:
        assert set(store.results()) == {FIRST}
        assert store.events() == []


# One writer


def test_a_second_holder_is_refused_until_the_first_is_killed(root: Path) -> None:
    body = "store = begin(root)\nprint('up', flush=True)\ntime.sleep(60)\n"
    with other_process(root, f"import time\n{body}") as writer:
        try:
            assert first_line(writer) == "up"
            with pytest.raises(RunHeldError, match=f"held by process {writer.pid} on "):
                RunStore.hold(root)
            with RunStore.read(root) as store:
                assert (store.holder() or {})["pid"] == writer.pid
        finally:
            writer.kill()
    with RunStore.read(root) as store:
        assert store.holder() is None
    RunStore.hold(root).close()


def test_a_reader_cannot_write_and_sees_one_moment(root: Path) -> None:
    with begin(root) as writer:
        for number, job in enumerate(PLAN.jobs):
            with RunStore.read(root) as reader:
                finish(writer, job.id)
                assert len(reader.results()) == reader.counts()["done"] == number
        refused = pytest.raises(StorageError, match="only the process that holds the run may write")
        with RunStore.read(root) as reader, refused:
            reader.file.begin()
        read_only = pytest.raises(sqlite3.OperationalError, match="readonly")
        with RunStore.read(root) as reader, read_only:
            reader.file.connection.execute("DELETE FROM main.results")


def test_a_late_writer_is_refused(root: Path) -> None:
    with begin(root) as store:
        old = store.start_attempt(FIRST, (0,), 1, "cpu", 1.0)
        store.end_attempt(FIRST, old, "died", pid=5, error="SIGKILL")
        new = store.start_attempt(FIRST, (0,), 1, "cpu", 1.0)
        assert not store.record(make_result(FIRST, old, weights="late"))
        assert store.record(make_result(FIRST, new))
        assert not store.record(make_result(FIRST, new, weights="twice"))
        assert store.reader.results()[FIRST].weights == "weights"
        assert [item.outcome for item in store.reader.attempts()] == ["died", "ok"]


# The same plan


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 8}, "batch_size: 4 there, 8 here"),
        ({"params": TrainerParams(epochs=3)}, "params.epochs: 5 there, 3 here"),
        ({"random_state": 7}, "random_state: 0 there, 7 here"),
        ({"dataset": "other"}, "dataset: data there, other here"),
        ({"jobs": make_plan(("A", "C"))[0].jobs}, "models: A, B there, A, C here"),
    ],
)
def test_another_plan_is_refused_naming_the_first_difference(
    root: Path, change: dict[str, Any], named: str
) -> None:
    begin(root).close()
    with pytest.raises(PlanMismatchError) as caught, RunStore.hold(root) as store:
        store.begin(replace(PLAN, **change), FOLDS, TARGETS)
    assert named in str(caught.value)
    begin(root).close()


def test_a_new_session_retries_failed_and_cancelled_jobs_only(root: Path) -> None:
    ends = dict(zip((job.id for job in PLAN.jobs), ENDED, strict=False))
    with begin(root) as store:
        for job_id, status in ends.items():
            finish(store, job_id, status=status)
        assert store.reader.counts()["pending"] == len(PLAN.jobs) - len(ENDED)
    with begin(root) as store:
        assert sorted(store.reader.finished().values()) == ["diverged", "done"]
        assert finish(store, PLAN.jobs[1].id)


# Checkpoints


def test_the_two_newest_checkpoints_are_kept(root: Path) -> None:
    def ref(epoch: int, batch: int = 0, job: str = FIRST) -> CheckpointRef:
        return CheckpointRef(job, 1, epoch, batch, f"{job}-{epoch}-{batch}", "digest", 9)

    second = PLAN.jobs[1].id
    with begin(root) as store:
        assert store.checkpoint(ref(1)) == []
        assert store.checkpoint(ref(1, 5)) == []
        assert store.checkpoint(ref(9, job=second)) == []
        assert store.checkpoint(ref(2)) == [ref(1).file]
        assert store.reader.checkpoints(FIRST) == [ref(2), ref(1, 5)]
        assert store.checkpoint(ref(2)) == []
        assert store.reader.checkpoints(second) == [ref(9, job=second)]


# Damage


@pytest.mark.damages("the file is no run")
@pytest.mark.parametrize("content", [b"not a database " * 99, b""])
def test_a_file_that_is_no_database_is_an_error(root: Path, content: bytes) -> None:
    root.mkdir()
    (root / "run.db").write_bytes(content)
    with pytest.raises(StoreCorruptError, match=r"run\.db"):
        RunStore.read(root)


@pytest.mark.damages("the file is no run")
def test_a_database_of_another_program_is_an_error(root: Path) -> None:
    root.mkdir()
    connection = sqlite3.connect(root / "run.db")
    connection.execute("CREATE TABLE other (x)")
    connection.close()
    with pytest.raises(StoreCorruptError, match="is not a run of asynckfold"):
        RunStore.hold(root)
