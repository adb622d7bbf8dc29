"""Opening ``run.db``, and what SQLite's errors mean."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asynckfold.errors import StorageError, StoreCorruptError, refuse
from asynckfold.jobs.decoding import FAULTS
from asynckfold.store.integrity import check_pages, check_schema, checksum, verify
from asynckfold.store.layout import DATABASE, SPLITS, path_problems
from asynckfold.store.lock import holder_of
from asynckfold.store.schema import SCHEMA
from asynckfold.system.files import open_plain, reading_error, storage_error
from asynckfold.system.plain_text import one_line
from asynckfold.system.process import free_memory

SLICE_PAGES = 1024
"""4 MB: some 20 ms of reading, in which no commit can end."""

BUSY_SECONDS = 10.0
"""How long one process waits for the other, which normally takes milliseconds."""

LARGE = 64 << 20
"""Bytes from which on a file is looked through before it is copied."""

PAGES = ("page_count", "page_size")
PAGE = 4096

SQLITE_OK = 0

_BUSY = "database is locked"

_DISK_FAULTS = {
    "database or disk is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "attempt to write a readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
    _BUSY: errno.EAGAIN,
}
"""What SQLite says when it is the disk that refuses; anything else means that the file is bad."""

SQLITE_FAULTS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Where a name in the file is damaged, sqlite3 fails to decode SQLite's own message."""


def connect(root: Path) -> sqlite3.Connection:
    """Open the database of a run for its holder, making it if there is none."""
    path = root / DATABASE
    check_files(root)
    _make_private(path)
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
    """Refuse what is no plain file: SQLite would follow a link, and wait for a FIFO.

    Raises
    ------
    StoreCorruptError
        Names the first of them.
    """
    for ending in ("", "-journal", "-wal", "-shm"):
        path = root / f"{DATABASE}{ending}"
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, path) from error
        if not stat.S_ISREG(mode):
            raise StoreCorruptError(
                f"{path} is no plain file, as one of a run is: it was not opened. Remove it, or "
                "put the run back from a copy"
            )


def _make_private(path: Path) -> None:
    """Make the file before SQLite does, which would let others read it; journals follow it."""
    try:
        os.close(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path) from error


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new run, or check an old one."""
    db.execute("PRAGMA journal_mode=DELETE")
    db.execute("PRAGMA synchronous=EXTRA")
    # Else a large statement would need a folder for temporary files, which may be unwritable.
    db.execute("PRAGMA temp_store=MEMORY")
    db.create_function("seal", -1, checksum, deterministic=True)
    if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() != (0,):
        check_schema(db, path)
        _size(db, path)
        verify(db, path)
    elif (path.parent / SPLITS).exists():
        raise StoreCorruptError(
            f"{path.parent} holds a run whose run.db is gone or empty. Put it back from a copy, or "
            "use another folder"
        )
    else:
        db.executescript(f"BEGIN;{SCHEMA}COMMIT;")


def snapshot(root: Path) -> sqlite3.Connection:
    """Return a copy in memory of what is committed at one moment, checked like a run at rest.

    What is no run, or has room for nothing in it, is refused before it is copied.

    A look never keeps a commit waiting for long: the file is copied in slices, a commit in between
    starts the copy anew. Only where commits come faster than copies can be made, ten times in a
    row, one commit waits for a whole copy: some 0.3 s for each 200 MB of results.

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
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with contextlib.closing(_open_to_read(path)) as source:
            _check_size(source, path)
            try:
                _copy(source, copy, SLICE_PAGES)
            except _OvertakenError:
                _copy(source, copy, -1)
        verify(copy, path)
    except BaseException as error:
        copy.close()
        if isinstance(error, MemoryError):
            raise StorageError(errno.ENOMEM, f"{path} does not fit into memory") from error
        if isinstance(error, SQLITE_FAULTS):
            raise from_sqlite(error, root, reading_error) from error
        raise
    return copy


def _check_size(source: sqlite3.Connection, path: Path) -> None:
    """Refuse to copy what is no run, or mostly nothing, before its bytes are read."""
    check_schema(source, path)
    # One transaction: the file does not grow between two looks at it.
    source.execute("BEGIN")
    try:
        there = _size(source, path)
        (free,) = source.execute("PRAGMA freelist_count").fetchone()
        if there > LARGE and free > there // PAGE // 2:
            raise StoreCorruptError(f"{path} is damaged: {free} of its pages hold nothing")
        if there > LARGE and not holder_of(path.parent):
            # It finds pages that nothing refers to, without reading them.
            check_pages(source, path)
    finally:
        source.execute("ROLLBACK")
    room = free_memory()
    if there > room // 2:
        raise StorageError(
            errno.ENOMEM,
            f"{path} has {there:,} bytes, and looking at a run takes as much memory twice: "
            f"{room:,} are free",
        )


def _size(db: sqlite3.Connection, path: Path) -> int:
    """Return the bytes of a file, as it and its header say."""
    db.execute("SELECT COUNT(*) FROM meta").fetchone()
    (pages,), (size,) = (db.execute(f"PRAGMA {name}").fetchone() for name in PAGES)
    there = path.stat().st_size
    if pages * size != there:
        raise StoreCorruptError(
            f"{path} is damaged: it has {there:,} bytes, and by its header {pages * size:,}"
        )
    return there


class _OvertakenError(Exception):
    """Commits come faster than a copy is made."""


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, pages: int) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    before, restarts = sys.maxsize, 0

    def watch(status: int, left: int, total: int) -> None:
        nonlocal before, restarts, deadline
        if not left:
            return
        restarts += status == SQLITE_OK and left >= before
        if left != before:
            # A large run takes longer than any wait; only standing still has an end.
            deadline = time.monotonic() + BUSY_SECONDS
        before = left
        if restarts > 10 and pages > 0:
            raise _OvertakenError
        if time.monotonic() > deadline:
            # A writer that was stopped in the middle of a commit holds the file for ever.
            raise sqlite3.OperationalError(_BUSY)

    source.backup(target, pages=pages, progress=watch, sleep=0.01)


def _open_to_read(path: Path) -> sqlite3.Connection:
    try:
        return _opened(f"{path.absolute().as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        # A killed writer leaves a journal that only a writer may roll back.
        if holder_of(path.parent):
            raise
        if not os.access(path, os.W_OK):
            raise StorageError(
                errno.EROFS,
                f"{path} was left in the middle of a commit, and may only be read here. Look at it "
                "once from where it may be written, which rolls that commit back",
            ) from None
        return _opened(f"{path.absolute().as_uri()}?mode=rw")


def _opened(address: str) -> sqlite3.Connection:
    db = sqlite3.connect(address, uri=True, isolation_level=None, timeout=BUSY_SECONDS)
    try:
        db.execute("PRAGMA trusted_schema=OFF")
        db.execute("PRAGMA cell_size_check=ON")
        db.execute("SELECT COUNT(*) FROM meta").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def from_sqlite(
    error: Exception, root: Path, disk_error: Callable[[OSError, Path], Exception] = storage_error
) -> Exception:
    """Return what an error of SQLite means: the disk refused, the file is bad, or our mistake."""
    path = root / DATABASE
    number = _DISK_FAULTS.get(str(error))
    if number == errno.EAGAIN:
        return StorageError(number, f"{path} is held by another process in a commit. Try again")
    if number is not None:
        return disk_error(OSError(number, os.strerror(number)), path)
    told = (sqlite3.OperationalError, UnicodeDecodeError)
    if isinstance(error, told) or type(error) is sqlite3.DatabaseError:
        return StoreCorruptError(f"{path} is damaged or not a run: {one_line(str(error))}")
    return error


@contextmanager
def decoding(root: Path) -> Iterator[None]:
    """What cannot be decoded was not written by us."""
    try:
        yield
    except FAULTS as error:
        raise StoreCorruptError(f"{root / 'run.db'} is damaged: {one_line(str(error))}") from error
