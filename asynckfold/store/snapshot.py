"""A consistent snapshot of ``run.db`` that does not hold up its writer.

One transaction copies every table but ``outputs``, nearly all of a large file, to memory. Outputs
are read on demand from ``run.db``: those of a recorded result never change.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from asynckfold.errors import StorageError, StoreCorruptError, refuse
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
from asynckfold.store.layout import DATABASE, path_problems
from asynckfold.store.lock import holder_of
from asynckfold.system.files import reading_error


def snapshot(root: Path) -> sqlite3.Connection:
    """Return a connection that sees what is committed now; everything in it was checked.

    Raises
    ------
    StoreCorruptError
        ``run.db`` is damaged, or no run.
    StorageError
        It cannot be read now.
    """
    refuse(path_problems(root))
    check_files(root)
    path = root / DATABASE
    try:
        db = _open_to_read(path)
        try:
            _copy(db, path)
        except BaseException:
            db.close()
            raise
    except MemoryError as error:
        raise StorageError(errno.ENOMEM, f"{path} does not fit into memory") from error
    except sqlite3.IntegrityError as error:
        raise StoreCorruptError(f"{path} is damaged: {error}") from error
    except SQLITE_FAULTS as error:
        raise from_sqlite(error, root, reading_error) from error
    return db


def _copy(db: sqlite3.Connection, path: Path) -> None:
    """Copy tables to temporary ones, which hide those of the same name, and check them."""
    copied = [table for table in STATEMENTS if table != "outputs"]
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
        if not os.access(path, os.W_OK):
            raise StorageError(
                errno.EROFS,
                f"{path} has an unfinished commit and is read-only here. Open it once where it is "
                "writable: this rolls the commit back",
            ) from None
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
