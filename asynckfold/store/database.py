"""Opening ``run.db``, and what SQLite's errors mean."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asynckfold.errors import StoreCorruptError
from asynckfold.files import storage_error
from asynckfold.store.checking import checksum, verify
from asynckfold.store.layout import DATABASE, SPLITS
from asynckfold.store.lock import holder_of
from asynckfold.store.schema import SCHEMA

_DISK_FAULTS = {
    "database or disk is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "attempt to write a readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
    "database is locked": errno.EAGAIN,
}
"""What SQLite says when it is the disk that refuses; anything else means that the file is bad."""

SQLITE_FAULTS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Where a name in the file is damaged, sqlite3 fails to decode SQLite's own message."""


def connect(root: Path) -> sqlite3.Connection:
    """Open the database of a run for its holder, making it if there is none."""
    path = root / DATABASE
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    except sqlite3.OperationalError as error:
        raise from_sqlite(error, root) from error
    try:
        _prepare(db, path)
    except BaseException as error:
        db.close()
        if isinstance(error, SQLITE_FAULTS):
            raise from_sqlite(error, root) from error
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new run, or check an old one."""
    db.execute("PRAGMA journal_mode=DELETE")
    db.execute("PRAGMA synchronous=EXTRA")
    db.create_function("seal", -1, checksum, deterministic=True)
    if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() != (0,):
        verify(db, path)
    elif (path.parent / SPLITS).exists():
        raise StoreCorruptError(
            f"{path.parent} holds a run whose run.db is gone or empty. Put it back from a copy, or "
            "use another folder"
        )
    else:
        db.executescript(f"BEGIN;{SCHEMA}COMMIT;")


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a database for reading, rolling back first what a killed writer began."""
    try:
        return _opened(f"{path.absolute().as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        # A killed writer leaves a journal that only a writer may roll back.
        if holder_of(path.parent):
            raise
        return _opened(f"{path.absolute().as_uri()}?mode=rw")


def _opened(address: str) -> sqlite3.Connection:
    db = sqlite3.connect(address, uri=True, isolation_level=None, timeout=10)
    try:
        db.create_function("seal", -1, checksum, deterministic=True)
        db.execute("SELECT COUNT(*) FROM meta").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def from_sqlite(error: Exception, root: Path) -> Exception:
    """Return what an error of SQLite means: the disk refused, the file is bad, or our mistake."""
    path = root / DATABASE
    number = _DISK_FAULTS.get(str(error))
    if number is not None:
        return storage_error(OSError(number, os.strerror(number)), path)
    told = (sqlite3.OperationalError, UnicodeDecodeError)
    if isinstance(error, told) or type(error) is sqlite3.DatabaseError:
        return StoreCorruptError(f"{path} is damaged or not a run: {error}")
    return error


@contextmanager
def decoding(root: Path) -> Iterator[None]:
    """What cannot be decoded was not written by us."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreCorruptError(f"{root / 'run.db'} is damaged: {error}") from error
