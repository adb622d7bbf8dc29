"""A consistent snapshot of ``run.db`` that never holds up its writer.

::

    one transaction        every table but results  ──► temporary tables      defines the moment
    slices of 5 ms         results                  ──► checked; all but their outputs kept
    on demand              the outputs of one result    from run.db, which is only read

Recorded results never change, so their outputs, nearly all of a large file, can stay where they
are. Only a new session deletes results, those of failed jobs, and the snapshot is then taken again.
SQLite moves temporary tables that outgrow its cache to an unnamed file, so a reader's memory is
bounded by that cache, one slice and the largest result, whatever the size of the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asynckfold.errors import StorageError, StoreCorruptError, refuse
from asynckfold.store.database import (
    BUSY,
    BUSY_SECONDS,
    SQLITE_FAULTS,
    check_files,
    from_sqlite,
)
from asynckfold.store.integrity import (
    check_contents,
    check_pages,
    check_schema,
    check_size,
    checked,
    size_of,
)
from asynckfold.store.layout import DATABASE, path_problems
from asynckfold.store.lock import holder_of
from asynckfold.store.schema import COLUMNS, STATEMENTS, TYPES
from asynckfold.system.files import reading_error

SLICE_SECONDS = 0.005
"""How long results are read in one transaction, some 10 MB, which are in memory at once."""

CACHE_KIB = 32 << 10
"""Temporary tables beyond this go to SQLite's folder for temporary files."""

LARGE = 64 << 20
"""A larger file must be at least a quarter full, in bytes."""

ATTEMPTS = 10
"""A session that starts while results are read makes another attempt necessary."""

_OUTPUTS = list(TYPES["results"]).index("outputs")


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
        try:
            return _taken(path, "FILE")
        except sqlite3.OperationalError as error:
            if str(error) == BUSY:
                raise
            # The folder for temporary files is missing or full. If it is run.db that cannot be
            # read, the second attempt fails as well.
            return _taken(path, "MEMORY")
    except MemoryError as error:
        raise StorageError(errno.ENOMEM, f"{path} does not fit into memory") from error
    except sqlite3.IntegrityError as error:
        raise StoreCorruptError(f"{path} is damaged: {error}") from error
    except SQLITE_FAULTS as error:
        raise from_sqlite(error, root, reading_error) from error


def _taken(path: Path, temp_store: str) -> sqlite3.Connection:
    db = _open_to_read(path)
    try:
        db.execute(f"PRAGMA temp_store = {temp_store}")
        db.execute(f"PRAGMA temp.cache_size = -{CACHE_KIB}")
        check_schema(db, path)
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_NewSessionError):
                _copy(db, path)
                check_contents(db, path)
                return db
        raise StorageError(errno.EAGAIN, f"{path} is changing too often to be read. Try again")
    except BaseException:
        db.close()
        raise


class _NewSessionError(Exception):
    """A session started and may have deleted results."""


def _copy(db: sqlite3.Connection, path: Path) -> None:
    """Copy everything but outputs to temporary tables, which hide those of the same name."""
    with _reading(db):
        there = check_size(db, path)
        for table, statement in zip(TYPES, STATEMENTS, strict=True):
            db.execute(f"DROP TABLE IF EXISTS temp.{table}")
            db.execute(statement.replace("CREATE TABLE", "CREATE TEMP TABLE", 1))
            if table != "results":
                check_pages(db, path, table)
                db.execute(f"INSERT INTO temp.{table} SELECT * FROM main.{table}")
        count, last = db.execute("SELECT COUNT(*), MAX(rowid) FROM main.results").fetchone()
        session = _newest_session(db)
    found = outputs = 0
    insert = f"INSERT INTO temp.results VALUES ({','.join('?' * len(TYPES['results']))}, NULL)"
    for values in checked(_results(db, last, session), "results", path):
        found += 1
        outputs += len(values[_OUTPUTS] or b"")
        values[_OUTPUTS] = None
        db.execute(insert, values)
    if found != count:
        raise StoreCorruptError(f"{path} is damaged: it has {found} of {count} results")
    if there > max(LARGE, 4 * (size_of(db, "temp") + outputs)):
        raise StoreCorruptError(
            f"{path} is damaged: it has {there:,} bytes, and most of them hold nothing"
        )


def _results(db: sqlite3.Connection, last: int | None, session: int | None) -> Iterator[list[Any]]:
    """Yield the rows of results up to `last`, with no lock between slices."""
    before: int | None = -(1 << 63)
    while last is not None and before is not None:
        with _reading(db):
            is_same = _newest_session(db) == session
            rows, before = _slice(db, before, last)
        if not is_same:
            raise _NewSessionError
        yield from rows


def _newest_session(db: sqlite3.Connection) -> int | None:
    (found,) = db.execute("SELECT MAX(session) FROM main.sessions").fetchone()
    return None if found is None else int(found)


def _slice(db: sqlite3.Connection, before: int, last: int) -> tuple[list[list[Any]], int | None]:
    """Return some rows, and the rowid after which to continue, None at the end."""
    rows, until = [], time.monotonic() + SLICE_SECONDS
    found = db.execute(
        f"SELECT rowid, {COLUMNS['results']}, seal FROM main.results "
        "WHERE rowid > ? AND rowid <= ? ORDER BY rowid",
        (before, last),
    )
    # An open cursor would keep the read lock.
    with contextlib.closing(found):
        for number, *row in found:
            rows.append(row)
            if time.monotonic() >= until:
                return rows, number
    return rows, None


@contextmanager
def _reading(db: sqlite3.Connection) -> Iterator[None]:
    """Lock ``run.db`` for reading; after an exception the connection can only be closed."""
    db.execute("BEGIN")
    yield
    db.execute("COMMIT")


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
