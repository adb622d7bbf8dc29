"""Open a run to read it, or say what is wrong with the folder, or with a plan for it.

A reader sees one moment of ``run.db`` and does not hold up its writer: one transaction copies every
table but ``outputs``, nearly all of a large file, to memory. Outputs are read on demand from
``run.db``: those of a recorded result never change.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asynckfold.errors import PlanMismatchError, Problem, StoreCorruptError, nearest, refuse
from asynckfold.jobs.digests.changes import WEIGHTS
from asynckfold.jobs.plan import Plan
from asynckfold.store.database import (
    BUSY,
    BUSY_SECONDS,
    SQLITE_FAULTS,
    STATEMENTS,
    check_files,
    check_pages,
    check_rows,
    check_schema,
    from_sqlite,
)
from asynckfold.store.layout import DATABASE, initial_weights
from asynckfold.store.lock import holder_of
from asynckfold.store.reader import RunReader
from asynckfold.store.run_file import RunFile
from asynckfold.system.files import reading_error

if TYPE_CHECKING:
    from asynckfold.jobs.folds import Fold


def read_run(root: Path, unread: Collection[str] = ()) -> RunReader:
    """Return a reader of a run, see `RunStore.read`; rows of `unread` tables are not checked."""
    if not os.path.lexists(root / DATABASE):
        raise StoreCorruptError(f"{root} holds no run: there is no {DATABASE} in it")
    return RunReader(root, RunFile(root, snapshot(root, unread)))


def open_run(
    directory: str | Path,
    name: str = "run",
    problems: Iterable[Problem] = (),
    unread: Collection[str] = (),
) -> RunReader:
    """Open the run in a folder; `name` is what the caller calls the folder.

    Earlier `problems` of the caller are reported with those of the folder. Rows of `unread` tables,
    which the caller does not read, are not checked.

    Raises
    ------
    InputError
        The folder holds no run, or a sweep in it was ended before it had a plan.
    StoreCorruptError
        ``run.db`` was not written by asynckfold, or is damaged.
    StorageError
        It cannot be read.
    """
    root = Path(directory)
    received = []
    if not (root / DATABASE).is_file():
        inside, beside = (
            sorted(item.parent.name for item in folder.glob(f"*/{DATABASE}"))
            for folder in (root, root.parent)
        )
        remedy = f"Check the path.{nearest(root.name, beside)}"
        if inside:
            remedy = f"Pass one of the runs in it: {', '.join(inside[:5])}."
        rule, what = f"{name} must be the folder of a run", f"{root}, which holds no {DATABASE}"
        received.append(Problem(rule, what, remedy))
    refuse([*problems, *received])
    return read_run(root, unread)


def refuse_other(
    root: Path, stored: Plan, plan: Plan, free: Collection[str] = (), folds: Sequence[Fold] = ()
) -> None:
    """Refuse a plan that does not continue the stored one, see `Plan.obstacle`.

    Raises
    ------
    PlanMismatchError
        Names the first difference.
    """
    difference = stored.obstacle(plan, free, folds)
    if not difference:
        return
    rule = f"{root} holds a run with another plan, and the plan of a run cannot change"
    if difference.startswith("folds: "):
        rule = (
            f"{root} holds a run with another plan, and another number of folds divides the "
            "samples anew, so no result carries over"
        )
    remedy = (
        "Use another folder, the same arguments and code to continue that run, or resume='never' "
        "to train everything again: the old folder is kept under another name."
    )
    changed = stored.changed_parts(plan)
    models = [part.removeprefix("model ") for part, text in changed.items() if WEIGHTS in text]
    kept = [path for model in models if (path := initial_weights(root, model)).is_file()]
    if kept:
        remedy += (
            " Its initial weights: "
            f"model.load_state_dict(safetensors.torch.load_file({str(kept[0])!r}))."
        )
    if models:
        remedy += (
            " A model passed as an instance has different weights in each process, unless "
            "torch.manual_seed is called before it is created: or pass its class."
        )
    raise PlanMismatchError([Problem(rule, difference, remedy)])


def snapshot(root: Path, unread: Collection[str] = ()) -> sqlite3.Connection:
    """Return a connection that sees what is committed now; everything in it was checked.

    Raises
    ------
    StoreCorruptError
        ``run.db`` is damaged, or no run.
    StorageError
        It cannot be read now.
    """
    check_files(root)
    path = root / DATABASE
    try:
        db = _open_to_read(path)
        try:
            _copy(db, path, unread)
        except BaseException:
            db.close()
            raise
    except SQLITE_FAULTS as error:
        raise from_sqlite(error, root, reading_error) from error
    return db


def _copy(db: sqlite3.Connection, path: Path, unread: Collection[str]) -> None:
    """Copy tables to temporary ones, which hide those of the same name, and check them."""
    copied = [table for table in STATEMENTS if table not in ("outputs", *unread)]
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute("BEGIN")
    check_schema(db, path)
    for table in copied:
        check_pages(db, path, table)
        db.execute(STATEMENTS[table].replace("CREATE TABLE", "CREATE TEMP TABLE", 1))
        db.execute(f"INSERT INTO temp.{table} SELECT * FROM main.{table}")
    db.execute("COMMIT")
    for table in copied:
        check_rows(db, table, path)


def _open_to_read(path: Path) -> sqlite3.Connection:
    try:
        return _opened(path, "ro")
    except sqlite3.OperationalError as error:
        # A killed writer leaves a journal that only a writer may roll back.
        if str(error) == BUSY or holder_of(path.parent):
            raise
        _opened(path, "rw").close()
        return _opened(path, "ro")


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_SECONDS,
    )
    try:
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        db.execute("SELECT COUNT(*) FROM meta").fetchone()
    except BaseException:
        db.close()
        raise
    return db
