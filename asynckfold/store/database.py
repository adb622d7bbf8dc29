"""Opening ``run.db`` for its holder, and what SQLite's errors mean."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asynckfold.errors import StorageError, StoreCorruptError
from asynckfold.jobs.decoding import FAULTS
from asynckfold.store.integrity import checksum, verify
from asynckfold.store.layout import DATABASE, SPLITS
from asynckfold.store.lock import why_no_locks
from asynckfold.store.schema import SCHEMA
from asynckfold.system.files import open_plain, reading_error, storage_error
from asynckfold.system.plain_text import one_line

BUSY_SECONDS = 10.0
"""How long one process waits for another's lock, which is normally held for milliseconds."""

BUSY = "database is locked"

_DISK_FAULTS = {
    "database or disk is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "attempt to write a readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
    BUSY: errno.EAGAIN,
}
"""SQLite's messages when the disk refuses; any other error means that the file is damaged."""

SQLITE_FAULTS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Where a name in the file is damaged, sqlite3 fails to decode SQLite's own message."""


def connect(root: Path) -> sqlite3.Connection:
    """Open the database of a run for its holder, creating it if there is none."""
    path = root / DATABASE
    check_files(root)
    _create_private(path)
    try:
        db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
        )
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


def check_files(root: Path) -> None:
    """Raise StoreCorruptError for links and FIFOs: SQLite would follow or wait for them."""
    for ending in ("", "-journal", "-wal", "-shm"):
        path = root / f"{DATABASE}{ending}"
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise reading_error(error, path) from error
        if not stat.S_ISREG(mode):
            raise StoreCorruptError(
                f"{path} is not a regular file and was not opened. Remove it, or restore the run "
                "from "
                "a copy"
            )


def _create_private(path: Path) -> None:
    """Create the file before SQLite would, readable by its owner only; journals follow it."""
    try:
        os.close(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path) from error


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new run, or check an old one."""
    db.execute("PRAGMA journal_mode=DELETE")
    db.execute("PRAGMA synchronous=EXTRA")
    # Large statements must not depend on a writable folder for temporary files.
    db.execute("PRAGMA temp_store=MEMORY")
    db.create_function("checksum", -1, checksum, deterministic=True)
    if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() != (0,):
        verify(db, path)
    elif (path.parent / SPLITS).exists():
        raise StoreCorruptError(
            f"{path.parent} holds a run whose run.db is missing or empty. Restore it from a copy, "
            "or "
            "use another folder"
        )
    else:
        db.executescript(f"BEGIN;{SCHEMA}COMMIT;")


def from_sqlite(
    error: Exception, root: Path, disk_error: Callable[[OSError, Path], Exception] = storage_error
) -> Exception:
    """Translate an error of SQLite: the disk refused, the file is damaged, or it is our bug."""
    path = root / DATABASE
    number = _DISK_FAULTS.get(str(error))
    if number == errno.EAGAIN:
        # SQLite takes a lock that cannot be had anywhere for one that another holds.
        if why := why_no_locks(root):
            text = "lies on a file system without locks (fcntl)"
            return StorageError(errno.ENOLCK, f"{path} {text}: {why}. Move {root} to a local disk")
        return StorageError(number, f"{path} is locked by another process's commit. Try again")
    if number is not None:
        return disk_error(OSError(number, os.strerror(number)), path)
    known = (sqlite3.OperationalError, UnicodeDecodeError)
    if isinstance(error, known) or type(error) is sqlite3.DatabaseError:
        return StoreCorruptError(f"{path} is damaged or not a run: {one_line(str(error))}")
    return error


@contextmanager
def decoding(root: Path) -> Iterator[None]:
    """Raise StoreCorruptError where values of ``run.db`` cannot be decoded."""
    try:
        yield
    except FAULTS as error:
        raise StoreCorruptError(f"{root / DATABASE} is damaged: {one_line(str(error))}") from error
