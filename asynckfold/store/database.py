"""``run.db``: its tables, a checksum for each row, opening it, and what SQLite's errors mean."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asynckfold.errors import StorageError, StoreCorruptError
from asynckfold.jobs.decoding import FAULTS
from asynckfold.store.layout import DATABASE, SPLITS
from asynckfold.system.files import reading_error, storage_error
from asynckfold.system.plain_text import one_line

FORMAT = 3
"""Raised with every change of the tables and records."""

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER);
CREATE TABLE sessions (session INTEGER PRIMARY KEY, pid INTEGER, host TEXT, started TEXT,
    offset REAL NOT NULL, seconds REAL NOT NULL, packed REAL NOT NULL DEFAULT 0,
    checksum INTEGER);
CREATE TABLE attempts (job_id TEXT, attempt INTEGER, session INTEGER NOT NULL, outcome TEXT,
    record TEXT NOT NULL, checksum INTEGER, PRIMARY KEY (job_id, attempt));
CREATE TABLE epochs (job_id TEXT, number INTEGER, attempt INTEGER NOT NULL, record TEXT NOT NULL,
    checksum INTEGER, PRIMARY KEY (job_id, number));
CREATE TABLE results (job_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, status TEXT NOT NULL,
    digest TEXT NOT NULL, record TEXT NOT NULL, checksum INTEGER);
CREATE TABLE outputs (job_id TEXT PRIMARY KEY, shape TEXT NOT NULL, data BLOB NOT NULL,
    checksum INTEGER);
CREATE TABLE checkpoints (job_id TEXT NOT NULL, attempt INTEGER NOT NULL, epoch INTEGER NOT NULL,
    batch INTEGER NOT NULL, file TEXT NOT NULL, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
    checksum INTEGER, PRIMARY KEY (job_id, file));
CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, job_id TEXT,
    text TEXT NOT NULL, checksum INTEGER);
CREATE TABLE samples (at REAL NOT NULL, record TEXT NOT NULL, checksum INTEGER);
"""
"""``record`` is a value of `asynckfold.store.records` or a `Result` as JSON."""

STATEMENTS = {text.split()[2]: text.strip() for text in SCHEMA.split(";") if text.strip()}
COLUMNS = {
    table: ", ".join(re.findall(r"(\w+) (?:TEXT|INTEGER|REAL|BLOB)\b", text)[:-1])
    for table, text in STATEMENTS.items()
}
"""The columns that the checksum of a row covers."""

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
"""Where a name in the file is damaged, sqlite3 fails to decode SQLite's message."""


def connect(root: Path) -> sqlite3.Connection:
    """Open the database of a run for its holder, creating it if there is none."""
    path = root / DATABASE
    check_files(root)
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
                "from a copy"
            )


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new run, or check an existing one."""
    db.execute("PRAGMA journal_mode=DELETE")
    db.execute("PRAGMA synchronous=EXTRA")
    # Large statements must not depend on a writable folder for temporary files.
    db.execute("PRAGMA temp_store=MEMORY")
    if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() != (0,):
        check_schema(db, path)
        check_pages(db, path)
        for table in COLUMNS:
            check_rows(db, table, path)
    elif (path.parent / SPLITS).exists():
        raise StoreCorruptError(
            f"{path.parent} holds a run whose run.db is missing or empty. Restore it from a copy, "
            "or use another folder"
        )
    else:
        row = f"('format','{FORMAT}',{checksum('format', str(FORMAT))})"
        db.executescript(f"BEGIN;{SCHEMA}INSERT INTO meta VALUES {row};COMMIT;")


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Check that a file is a whole run of this format, with our tables and nothing else."""
    there = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if not any(str(text).startswith("CREATE TABLE meta ") for text in there):
        raise StoreCorruptError(f"{path} is not a run of asynckfold")
    row = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if row and row[0] != str(FORMAT):
        raise StoreCorruptError(
            f"a run must have format {FORMAT}: {path} has format {one_line(str(row[0])[:60])}. "
            "Use another folder"
        )
    if there != set(STATEMENTS.values()):
        raise StoreCorruptError(f"{path} is not a run of asynckfold: its tables differ")
    (page,) = db.execute("PRAGMA main.page_size").fetchone()
    if path.stat().st_size % page:  # SQLite reads zeros where the last page is cut
        raise StoreCorruptError(f"{path} is damaged: it was cut in the middle of a page")


def check_pages(db: sqlite3.Connection, path: Path, table: str | None = None) -> None:
    """Run SQLite's check on the whole file, or on one table and its indexes."""
    (answer, *_) = db.execute(f"PRAGMA main.integrity_check({table or 1})").fetchone()
    if answer != "ok":
        raise StoreCorruptError(f"{path} is damaged: {one_line(str(answer))}")


def check_rows(db: sqlite3.Connection, table: str, path: Path) -> None:
    """Compare the checksums of a table: SQLite's check does not see a changed score."""
    # In Python row by row: SQLite would swallow a Ctrl-C during a call of `checksum`.
    rows = db.execute(f"SELECT {COLUMNS[table]}, checksum FROM {table}")
    changed = [values[0] for *values, stored in rows if stored != checksum(*values)]
    if changed:
        raise StoreCorruptError(
            f"{path} is damaged: {len(changed)} rows of {table} are not what was written, the "
            f"first of {one_line(str(changed[0])[:60])!r}"
        )


def checksum(*values: object) -> int:
    """Return the CRC-32 of one row."""
    plain = repr([value for value in values if not isinstance(value, bytes)])
    total = zlib.crc32(plain.encode("utf-8", "surrogatepass"))
    for value in values:
        if isinstance(value, bytes):
            total = zlib.crc32(value, total)
    return total


def from_sqlite(
    error: Exception, root: Path, disk_error: Callable[[OSError, Path], Exception] = storage_error
) -> Exception:
    """Translate an error of SQLite: the disk refused, the file is damaged, or it is our bug."""
    path = root / DATABASE
    number = _DISK_FAULTS.get(str(error))
    if number == errno.EAGAIN:
        text = f"{path} is locked by another process's commit, or its file system has no locks"
        return StorageError(number, f"{text}. Try again, or move {root} to a local disk")
    if number is not None:
        return disk_error(OSError(number, os.strerror(number)), path)
    known = (sqlite3.OperationalError, sqlite3.IntegrityError, UnicodeDecodeError)
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
