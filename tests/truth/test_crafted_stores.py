"""Damaged and foreign run folders end in one clear line, without control characters."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import Epoch, RunStore, StoreCorruptError, TrainerParams, load_results
from asynckfold.cli import main
from asynckfold.jobs.decoding import decoded
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.placement import Wait
from asynckfold.results.report import charts
from asynckfold.store import Interim, WaitReasons
from tests.cli.test_output import is_clean
from tests.records import write_checksums
from tests.synthetic import Synthetic, write_run

pytestmark = pytest.mark.damages("every test here writes a run that was made to hurt")

CODES = {0, 1, 2, 4, 5}
SEED = 18
EVIL = "\x1b[31mred\x1b]0;title\x07\u202egnp.exe\x9b\r\ndone"
NAMES = ("Modèle 漢字 😀", f"B{EVIL}")
RUN = Synthetic(
    models=NAMES,
    lr_schedules=("x",),
    folds=2,
    samples=20,
    epochs=2,
    classes=("0", f"one{EVIL}"),
    cores=2,
    status=lambda job: "failed" if job.fold and job.model == NAMES[1] else "done",
    error=f"ValueError: {EVIL}",
    traceback=f"Traceback\n{EVIL}\n: ",
    events=(("note", f"a note {EVIL}"),),
    about={
        "command": ["asynckfold", "run", EVIL],
        "cli": ["run", "--data", EVIL],
        "folder": f"/tmp/{EVIL}",
        "versions": {EVIL: EVIL},
        "machine": {"cores": 2, "gpus": []},
        "decision": {
            "threads": dict.fromkeys(NAMES, 1),
            "why": dict.fromkeys(NAMES, f"since {EVIL}"),
            "costs": {
                name: {"step_seconds": {"1": 0.1}, "eval_seconds": {"1": 0.1}}
                | dict.fromkeys(("flops", "memory", "gpu_memory"), 0)
                for name in NAMES
            },
            "prediction": {"makespan": 1.0, "lower_bound": 1.0, "longest": 1.0},
            "cores": 2,
        },
    },
)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with rows in every table, and names with terminal escape sequences."""
    root = write_run(tmp_path_factory.mktemp("crafted") / "run", RUN)
    with RunStore.hold(root) as store:
        first = store.reader.plan.jobs[-1].id
        waits = (Wait(1.0, "cores", EVIL),)
        number = store.start_attempt(first, (0,), 1, "cpu", 2.0, 1 << 20, waits, EVIL)
        store.moved(first, number, (0, 1))
        other = WaitReasons((0, 1), (), (), {}, f"{EVIL}2")
        store.set_waiting(WaitReasons((0, 1), (), (), {EVIL: 1}, EVIL, (other,)))
        store.set_interim(Interim(3, 12, 8.0, (EVIL,)))
        store.checkpoint(CheckpointRef(first, number, 1, 0, "a/checkpoint-1.safetensors", "0", 9))
        store.epoch(first, number, Epoch(1, math.nan, math.inf, None, 1e-3, 0.5))
        store.flush()
    return root


@pytest.fixture
def copy(honest: Path, root: Path) -> Path:
    shutil.copytree(honest, root)
    return root


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures, which take a second per report."""
    monkeypatch.setattr(charts, "draw", lambda summary: {})


def change(root: Path, *statements: Any) -> None:
    """Change a run's database, with valid checksums."""
    with contextlib.closing(sqlite3.connect(root / "run.db")) as db, db:
        for statement in statements:
            text, values = (statement, ()) if isinstance(statement, str) else statement
            db.execute(text, values)
        with contextlib.suppress(sqlite3.Error):
            write_checksums(db)


def told(*words: Any) -> tuple[int, str]:
    """Run a verb; return its exit code and its output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*map(str, words)])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue() + err.getvalue()


def test_a_sound_run_is_shown_without_control_characters(copy: Path, no_figures: None) -> None:
    shown = {}
    for words in (
        ("status", copy),
        ("status", copy, "--json"),
        ("compare", copy, copy),
        ("compare", copy, copy, "--bits"),
        ("report", copy),
        ("resume", copy),
        ("export", copy, "--to", copy / "out.safetensors"),
    ):
        code, shown[words] = told(*words)
        assert code == 0 or (words[0] not in ("status", "report") and code in CODES), words
        assert "Traceback (most recent" not in shown[words]
        assert is_clean(shown[words]), words
    assert "\\u001b" in shown["status", copy, "--json"]
    page_text = (copy / "report" / "index.html").read_text()
    assert is_clean(page_text)
    assert "Modèle 漢字 😀" in page_text
    tables = [path.read_text() for path in (copy / "report").glob("*.csv")]
    assert len(tables) == 3
    assert all(is_clean(text.replace("\r\n", "\n")) for text in tables)
    with RunStore.read(copy) as store:
        results = load_results(store)
    assert is_clean(repr(results))
    assert len(repr(results).splitlines()) == 5


# The file


def cut(root: Path) -> None:
    path = root / "run.db"
    os.truncate(path, path.stat().st_size // 8192 * 4096)


def zeroed(root: Path) -> None:
    with (root / "run.db").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def foreign(root: Path) -> None:
    (root / "run.db").unlink()
    with contextlib.closing(sqlite3.connect(root / "run.db")) as db, db:
        db.execute("CREATE TABLE songs (name TEXT)")


def with_sql(*statements: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        change(root, *statements)

    return make


FILES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "a page of zeros": zeroed,
    "empty": lambda root: (root / "run.db").write_bytes(b""),
    "another database": foreign,
    "no database": lambda root: (root / "run.db").write_text(f"no database {EVIL}\n" * 1000),
    "another format": with_sql(f"UPDATE meta SET value = '99{EVIL}' WHERE key = 'format'"),
    "a table more": with_sql("CREATE TABLE more (a)"),
    "a table less": with_sql("DROP TABLE samples"),
    "a view for a table": with_sql(
        "ALTER TABLE samples RENAME TO hidden", "CREATE VIEW samples AS SELECT * FROM hidden"
    ),
    "a trigger": with_sql("CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM results; END"),
    "an index": with_sql("CREATE INDEX i ON events (kind)"),
}


@pytest.mark.parametrize("kind", list(FILES))
def test_a_damaged_file_is_one_line_and_exit_code_4(copy: Path, kind: str) -> None:
    FILES[kind](copy)
    for words in (("status", copy), ("report", copy), ("compare", copy, copy)):
        code, text = told(*words)
        assert code == 4, text
        (line,) = text.splitlines()
        assert is_clean(line)
    with pytest.raises(StoreCorruptError):
        RunStore.hold(copy)


def test_a_linked_refit_is_not_followed(copy: Path) -> None:
    (copy / "refit" / "A").mkdir(parents=True)
    (copy / "refit" / "A" / "x").symlink_to(copy)
    code, text = told("status", copy)
    assert code == 0
    assert "on all samples" not in text


# splits.npz


def write_splits(root: Path, **arrays: Any) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    replace_splits(root, buffer.getvalue())


def replace_splits(root: Path, data: bytes) -> None:
    (root / "splits.npz").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    change(root, ("UPDATE meta SET value = ? WHERE key = 'splits'", (digest,)))


def test_splits_of_earlier_versions_name_what_folds_train_on(copy: Path) -> None:
    with RunStore.read(copy) as store:
        folds, targets = store.splits()
    parts = ((fold, part) for fold in folds for part in ("train", "valid"))
    rows = {f"repeat0-fold{fold.index}-{part}": getattr(fold, part) for fold, part in parts}
    write_splits(copy, targets=targets, **rows)
    with RunStore.read(copy) as store:
        assert np.array_equal(store.splits()[0][0].train, folds[0].train)


SPLITS: dict[str, Callable[[Path], None]] = {
    "no archive": lambda root: replace_splits(root, b"nothing"),
    "no arrays": lambda root: write_splits(root, other=np.zeros(3)),
    "an object": lambda root: write_splits(root, targets=np.array([{}], dtype=object)),
}


@pytest.mark.parametrize("kind", list(SPLITS))
def test_damaged_splits_are_one_line(copy: Path, kind: str) -> None:
    SPLITS[kind](copy)
    code, text = told("report", copy)
    assert code == 4, text
    assert len(text.splitlines()) == 1
    assert "splits.npz" in text


# Places


@pytest.mark.nightly(but=["folder"])
@pytest.mark.parametrize("place", ["folder", "file"])
def test_missing_permissions_are_one_line(tmp_path: Path, honest: Path, place: str) -> None:
    shutil.copytree(honest, tmp_path / "run")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    for path in (tmp_path / "run").rglob("*"):
        path.chmod(0o755)
    (tmp_path / "run" / ("run.db" if place == "file" else "")).chmod(0o000)
    words = ["status", str(tmp_path / "run")]
    code = (
        "import os, sys; from asynckfold.cli import main;"
        # Everything is imported before it becomes nobody, who may not see this checkout.
        f"os.getuid() or (main({words}), os.setgroups([]), os.setgid(65534), os.setuid(65534));"
        f"sys.exit(main({words}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (tmp_path / "run").chmod(0o755)
    assert found.returncode == 5, found.stderr
    (line,) = found.stderr.splitlines()
    assert "could not read" in line
    assert "Permission denied" in line


# Records


@pytest.mark.parametrize(
    "raw", [None, [], {"epochs": True}, {"epochs": 1.5}, {"epoch": 1}, {"trainer": "none"}]
)
def test_records_follow_their_annotations(raw: Any) -> None:
    assert decoded(TrainerParams, {"epochs": 3}).epochs == 3
    with pytest.raises(ValueError, match="params"):
        decoded(TrainerParams, raw, "params")
