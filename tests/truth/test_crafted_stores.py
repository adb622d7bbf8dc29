"""Damaged and malicious run folders end in one clear line.

Whoever crafts a ``run.db`` writes valid checksums, and so do these tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold.api.arguments import root_problems
from asynckfold.api.stored_results import load_results
from asynckfold.cli import main
from asynckfold.errors import AsyncKFoldError, StoreCorruptError
from asynckfold.jobs.decoding import decoded, parsed
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.placement import Wait
from asynckfold.jobs.plan import folds_fingerprint
from asynckfold.jobs.result import Baseline, Epoch
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.results.report import charts, page
from asynckfold.store import Interim, RunStore, Waiting, snapshot
from asynckfold.store.integrity import checksum
from asynckfold.store.layout import MOST_PATH, path_problems
from asynckfold.store.records import HELD, held_text, result_of
from asynckfold.store.schema import COLUMNS, TYPES
from tests.cli.test_output import is_clean
from tests.records import PLAN, begin, finish
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
        store.event(HELD, held_text(number, (0, 1)), first)
        other = Waiting((0, 1), (), (), {}, f"{EVIL}2")
        store.set_waiting(Waiting((0, 1), (), (), {EVIL: 1}, EVIL, (other,)))
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
    monkeypatch.setattr(charts, "draw", lambda summary: ())


def seal(root: Path) -> None:
    """Write valid checksums and digests for all rows."""
    with contextlib.closing(sqlite3.connect(root / "run.db")) as db, db:
        db.create_function("seal", -1, checksum)
        for number, *row in db.execute(
            f"SELECT rowid, {COLUMNS['results']} FROM results"
        ).fetchall():
            with contextlib.suppress(Exception):
                db.execute(
                    "UPDATE results SET digest = ? WHERE rowid = ?",
                    (result_of(row[:-1]).digest, number),
                )
        for table, columns in COLUMNS.items():
            db.execute(f"UPDATE {table} SET seal = seal({columns})")


def change(root: Path, *statements: Any) -> None:
    """Change a run's database, with valid checksums."""
    with contextlib.closing(sqlite3.connect(root / "run.db")) as db, db:
        for statement in statements:
            text, values = (statement, ()) if isinstance(statement, str) else statement
            db.execute(text, values)
    with contextlib.suppress(sqlite3.Error):
        seal(root)


def told(*words: Any) -> tuple[int, str]:
    """Run a verb; return its exit code and its output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*map(str, words)])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue() + err.getvalue()


def look(root: Path, *, everything: bool = True) -> dict[str, int]:
    """Run every verb: each ends with a documented code, no traceback, no control character."""
    verbs: dict[str, tuple[Any, ...]] = {
        "status": ("status", root),
        "json": ("status", root, "--json"),
        "compare": ("compare", root, root),
        "bits": ("compare", root, root, "--bits"),
    }
    if everything:
        verbs["report"] = ("report", root)
        verbs["resume"] = ("resume", root)
        verbs["export"] = ("export", root, "--to", root / "out.safetensors")
    codes = {}
    for name, words in verbs.items():
        codes[name], text = told(*words)
        assert codes[name] in CODES, (name, text)
        assert "Traceback (most recent" not in text, text
        assert is_clean(text), (name, text)
        if codes[name] == 4:
            assert len(text.strip().splitlines()) == 1, text
            assert len(text) < 2000, text[:200]
    page_text = root / "report" / "index.html"
    if codes.get("report") == 0:
        assert is_clean(page_text.read_text())
        tables = [(root / "report" / name).read_text() for name in page.CSV_FILES]
        assert all(is_clean(text.replace("\r\n", "\n")) for text in tables)
    if codes["status"] == 0:
        begin_again(root)
    return codes


def begin_again(root: Path) -> None:
    """Start a session, as a call with the same arguments would."""
    with contextlib.suppress(AsyncKFoldError), RunStore.hold(root) as store:
        folds, targets = store.reader.splits()
        store.begin(store.reader.plan, folds, targets)
        store.reader.counts(), store.reader.attempts(), store.reader.results()


def test_a_sound_run_is_shown_without_control_characters(
    copy: Path, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = look(copy)
    assert codes["status"] == codes["json"] == codes["report"] == 0
    assert "Modèle 漢字 😀" in (copy / "report" / "index.html").read_text()
    _, text = told("status", copy)
    assert "run" in text
    assert "\\u001b" in told("status", copy, "--json")[1]
    with RunStore.read(copy) as store:
        results = load_results(store)
    assert is_clean(repr(results))
    assert len(repr(results).splitlines()) == 5


# Values


TEXTS = [
    "",
    "x",
    EVIL,
    "[" * 5000,
    '{"a":',
    "9" * 5000,
    '"text"',
    "null",
    "[1, 2]",
    '[null, "a"]',
    "{}",
    '{"a": {"b": []}}',
    "NaN",
    "1e999",
    "-7",
    "\x00",
    "a" * 300_000,
]
VALUES = [*TEXTS, None, b"", b"\xff\xfe\x00", -5, 2**62, 1e300, math.inf, -math.inf, 0]
JSON_VALUES: list[Any] = [
    None, True, -1, 0, 2**70, 1e300, math.nan, math.inf, "", "x", EVIL, [], {}, [1], [[]],
    {"a": 1}, {"1": "x"}, ["a", None],
]  # fmt: skip


def cells() -> list[tuple[str, str]]:
    return [(table, column) for table, columns in TYPES.items() for column in columns]


def set_cell(root: Path, table: str, column: str, value: Any, number: int = 1) -> bool:
    """Write one value into one row; return whether the table accepts it."""
    place = f"rowid = (SELECT rowid FROM {table} LIMIT 1 OFFSET {number})"
    try:
        change(root, (f"UPDATE {table} SET {column} = ? WHERE {place}", (value,)))
    except sqlite3.Error:
        return False
    return True


@pytest.mark.nightly(but=["meta", "results"])
@pytest.mark.parametrize("table", list(TYPES))
def test_no_value_in_any_column_ends_in_a_traceback(
    copy: Path, no_figures: None, table: str
) -> None:
    generator = random.Random(f"{SEED} {table}")
    data = (copy / "run.db").read_bytes()
    for column in TYPES[table]:
        for value in generator.sample(VALUES, 1):
            (copy / "run.db").write_bytes(data)
            if set_cell(copy, table, column, value, generator.randrange(2)):
                look(copy, everything=generator.random() < 0.2)


def json_cells(root: Path) -> Iterator[tuple[str, str, int, Any]]:
    """Yield every JSON text of a run: table, column, row."""
    with contextlib.closing(sqlite3.connect(root / "run.db")) as db:
        for table, columns in TYPES.items():
            for column in (name for name, kind in columns.items() if kind == "TEXT"):
                for number, text in db.execute(f"SELECT rowid, {column} FROM {table}"):
                    with contextlib.suppress(ValueError):
                        found = json.loads(text or "")
                        if isinstance(found, (dict, list)):
                            yield table, column, number, found


def mutated(value: Any, generator: random.Random) -> Any:
    """Return JSON with one value at some depth replaced, removed or added."""
    if isinstance(value, (dict, list)) and value and generator.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, changed = generator.choice(keys), value.copy()
        if generator.random() < 0.15:
            del changed[key]
        else:
            changed[key] = mutated(value[key], generator)
        if isinstance(changed, dict) and generator.random() < 0.1:
            changed["unknown"] = 1
        return changed
    return generator.choice(JSON_VALUES)


def mutate(root: Path, generator: random.Random) -> tuple[str, str]:
    table, column, number, found = generator.choice(list(json_cells(root)))
    text = json.dumps(mutated(found, generator))
    change(root, (f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (text, number)))
    return table, text


@pytest.mark.nightly(but=["0"])
@pytest.mark.parametrize("number", range(5))
def test_no_json_ends_in_a_traceback(copy: Path, no_figures: None, number: int) -> None:
    generator = random.Random(SEED + number)
    data = (copy / "run.db").read_bytes()
    for _ in range(5):
        (copy / "run.db").write_bytes(data)
        mutate(copy, generator)
        look(copy, everything=generator.random() < 0.2)


# The file


def grown_in_its_header(root: Path) -> None:
    """Grow the file and its header to 6 GB of nothing."""
    path, pages = root / "run.db", (6 << 30) // 4096
    data = bytearray(path.read_bytes())
    assert int.from_bytes(data[16:18], "big") == 4096
    data[28:32] = pages.to_bytes(4, "big")
    path.write_bytes(data)
    os.truncate(path, pages * 4096)


def grown(root: Path) -> None:
    os.truncate(root / "run.db", 6 << 30)


def cut(root: Path) -> None:
    path = root / "run.db"
    os.truncate(path, path.stat().st_size // 8192 * 4096)


def zeroed(root: Path) -> None:
    with (root / "run.db").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def emptied(root: Path) -> None:
    (root / "run.db").write_bytes(b"")


def foreign(root: Path) -> None:
    (root / "run.db").unlink()
    with contextlib.closing(sqlite3.connect(root / "run.db")) as db, db:
        db.execute("CREATE TABLE songs (name TEXT)")


def text_of_it(root: Path) -> None:
    (root / "run.db").write_text(f"no database at all {EVIL}\n" * 1000)


def other_format(root: Path) -> None:
    change(root, f"UPDATE meta SET value = '99{EVIL}' WHERE key = 'format'")


def without(table: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        change(root, f"DROP TABLE {table}")

    return make


def with_sql(*statements: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        change(root, *statements)

    return make


def stranger(table: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        change(root, f"UPDATE {table} SET job_id = 'nobody{EVIL}' WHERE rowid = 1")

    return make


FILES: dict[str, Callable[[Path], None]] = {
    "6 GB of nothing behind it": grown,
    "6 GB of nothing in it": grown_in_its_header,
    "cut": cut,
    "a page of zeros": zeroed,
    "empty": emptied,
    "another database": foreign,
    "no database": text_of_it,
    "another format": other_format,
    "a table more": with_sql("CREATE TABLE more (a)"),
    "a table less": without("samples"),
    "a view for a table": with_sql(
        "ALTER TABLE samples RENAME TO hidden", "CREATE VIEW samples AS SELECT * FROM hidden"
    ),
    "a trigger": with_sql("CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM results; END"),
    "an index": with_sql("CREATE INDEX i ON events (kind)"),
    "a result of nobody": stranger("results"),
    "an attempt of nobody": stranger("attempts"),
    "an epoch of nobody": stranger("epochs"),
    "a checkpoint of nobody": stranger("checkpoints"),
    "a result less": with_sql("DELETE FROM results WHERE rowid = 1"),
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


@pytest.mark.parametrize("grow", [grown, grown_in_its_header])
def test_a_sparse_file_takes_no_memory(copy: Path, grow: Callable[[Path], None]) -> None:
    grow(copy)
    limit = resource.RLIMIT_AS
    code = (
        f"import resource, sys; resource.setrlimit({limit}, (2 << 30, 2 << 30));"
        f"from asynckfold.cli import main; sys.exit(main(['status', {str(copy)!r}]))"
    )
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60
    )
    assert found.returncode == 4, found.stderr
    assert found.stderr.count("\n") == 1


def test_a_large_run_of_many_slices_is_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of large files accept sound ones."""
    monkeypatch.setattr(snapshot, "LARGE", 1)
    monkeypatch.setattr(snapshot, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(snapshot, "CACHE_KIB", 1)
    assert told("status", copy)[0] == 0


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


def bomb(root: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("targets.npy", b"\x93NUMPY")
    data = bytearray(buffer.getvalue())
    place = data.index(b"PK\x01\x02") + 24
    data[place : place + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    replace_splits(root, bytes(data))


def lying_header(root: Path) -> None:
    head = b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999,), }\n"
    array = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("targets.npy", array)
    replace_splits(root, buffer.getvalue())


def rows_beyond(root: Path) -> None:
    with RunStore.read(root) as store:
        folds, targets = store.splits()
        plan = json.loads(store.plan.to_json())
    far = [Fold(item.repeat, item.index, item.train, item.valid + 10**6) for item in folds]
    plan["folds"] = folds_fingerprint(far)
    change(root, ("UPDATE meta SET value = ? WHERE key = 'plan'", (json.dumps(plan),)))
    names = {
        f"repeat0-fold{item.index}-{part}": rows
        for item in far
        for part, rows in (("train", item.train), ("valid", item.valid))
    }
    write_splits(root, targets=targets, **names)


SPLITS: dict[str, Callable[[Path], None]] = {
    "no archive": lambda root: replace_splits(root, b"nothing"),
    "no arrays": lambda root: write_splits(root, other=np.zeros(3)),
    "a bomb": bomb,
    "a lying header": lying_header,
    "an object": lambda root: write_splits(root, targets=np.array([{}], dtype=object)),
    "rows that are not samples": rows_beyond,
}


@pytest.mark.parametrize("kind", list(SPLITS))
def test_damaged_splits_are_one_line(copy: Path, kind: str) -> None:
    SPLITS[kind](copy)
    code, text = told("report", copy)
    assert code == 4, text
    assert len(text.splitlines()) == 1
    assert "splits.npz" in text


# Places


def test_a_path_too_long_for_sqlite_is_refused_before_the_start(tmp_path: Path) -> None:
    for name in ("/".join(["x" * 200] * 3), "/".join(["x" * 200] * 30), "x" * 300):
        code, text = told("status", tmp_path / name)
        assert code == 2, text
        assert "Choose a folder with a shorter path" in text
        (problem,) = root_problems(tmp_path / name, False)
        assert "a shorter path" in problem.remedy


def test_the_longest_path_that_is_allowed_works(tmp_path: Path, honest: Path) -> None:
    folder = tmp_path
    while len(str(folder)) < MOST_PATH - 120:
        folder /= "y" * 100
    folder /= "z" * (MOST_PATH - len(str(folder)) - 1)
    assert len(str(folder)) == MOST_PATH
    shutil.copytree(honest, folder)
    assert told("status", folder)[0] == 0
    with RunStore.hold(folder) as store:
        store.event("note", "a commit with its journal")
        store.flush()
    assert list(path_problems(folder.parent / f"{folder.name}z"))
    assert list(path_problems(folder, refit=True))


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


# One layer


def test_decoding_follows_annotations() -> None:
    assert decoded(TrainerParams, {"epochs": 3}).epochs == 3
    plain = decoded(Baseline, {"kind": "measured", "seconds": 1, "threads": 2})
    assert plain == Baseline("measured", 1, 2)
    for raw in (None, [], {"epochs": True}, {"epochs": 1.5}, {"epochs": 2**70}, {"epoch": 1}):
        with pytest.raises(ValueError, match=r"params"):
            decoded(TrainerParams, raw, "params")
    with pytest.raises(ValueError, match="nested"):
        parsed("[" * 100_000)
    with pytest.raises(ValueError, match="nested"):
        parsed("[" * 40 + "]" * 40)


def test_limits_for_crafted_stores_accept_sound_ones(root: Path) -> None:
    """Sound results pass all checks."""
    with begin(root) as store:
        for job in PLAN.jobs:
            finish(store, job.id)
    with RunStore.read(root) as store:
        assert len(store.results()) == len(PLAN.jobs)
