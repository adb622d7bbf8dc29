"""`RunFile`: an open ``run.db``, and the transactions of the process that holds the run."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sqlite3
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from asynckfold.errors import StorageError
from asynckfold.store.database import SQLITE_FAULTS, checksum, connect, from_sqlite
from asynckfold.store.layout import DATABASE, LOCK
from asynckfold.store.lock import take_lock
from asynckfold.store.upkeep import set_aside
from asynckfold.system.files import reading_error

Kind = TypeVar("Kind", bound="Closing")

_FORKED = "only the process that holds the run may write to it"

_held: weakref.WeakSet[RunFile] = weakref.WeakSet()


def _abandon_all() -> None:
    for file in list(_held):
        file.abandon()


os.register_at_fork(after_in_child=_abandon_all)


class Closing(ABC):
    """What is closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""

    def __enter__(self: Kind) -> Kind:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunFile:
    """An open ``run.db``.

    Parameters
    ----------
    root : Path
        The run's folder.
    connection : sqlite3.Connection
        From `connect`, or from `snapshot` for a reader.
    lock : int, optional
        The descriptor that holds the run; readers have none and cannot write.
    """

    def __init__(self, root: Path, connection: sqlite3.Connection, lock: int | None = None) -> None:
        self.root = root
        self.connection = connection
        self.lock = lock
        self.broken = ""
        self.is_dirty = False
        self._is_abandoned = False
        self._opened = None if lock is None else (root / DATABASE).stat()
        if lock is not None:
            _held.add(self)

    @classmethod
    def hold(cls, root: Path) -> RunFile:
        """Take the run for writing, making the folder if there is none."""
        lock = take_lock(root)
        try:
            return cls(root, connect(root), lock)
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Release the connection, then the run; what is not committed is lost."""
        if self._is_abandoned:
            return
        self.connection.close()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def abandon(self) -> None:
        """Release the run in a child process without touching what belongs to the parent.

        A lock lives as long as any descriptor of it. SQLite rolls back the transaction of a
        connection that is closed, even by the interpreter at exit, so this one never is.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.connection))
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        self._is_abandoned = True

    def start_over(self) -> Path:
        """Rename the folder of the run, and hold an empty folder in its place.

        Returns
        -------
        Path
            Where the earlier run is now, whole at every moment.

        Raises
        ------
        InputError
            The folder cannot be renamed; the run is held as before.
        RunHeldError
            Another process took the folder at the same moment.
        """
        self._check_place()
        assert self.lock is not None
        # SQLite finds its files by name.
        self.connection.close()
        try:
            earlier = set_aside(self.root)
        except BaseException:
            self.connection = connect(self.root)
            raise
        old, self.lock = self.lock, take_lock(self.root)
        os.close(old)
        self.connection = connect(self.root)
        self._opened = (self.root / DATABASE).stat()
        return earlier

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of a query."""
        if self._is_abandoned:
            raise StorageError(_FORKED)
        try:
            return self.connection.execute(statement, values).fetchall()
        except SQLITE_FAULTS as error:
            raise from_sqlite(error, self.root, reading_error) from error

    def meta(self, key: str) -> str | None:
        """Return a value of the table ``meta``."""
        rows = self.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def put(self, key: str, value: str) -> None:
        """Set a value of the table ``meta``."""
        self.write("meta", key, value)

    def write(self, table: str, *values: Any) -> None:
        """Write a row with its checksum, in place of one with the same key, in a transaction."""
        self.begin()
        row = (*values, checksum(*values))
        self.execute(f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * len(row))})", row)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run a statement of the open transaction, which is rolled back if it fails."""
        try:
            return self.connection.execute(statement, values)
        except SQLITE_FAULTS as error:
            self._check_place()
            fault = from_sqlite(error, self.root)
            if isinstance(fault, StorageError) and fault.errno == errno.EIO:
                # Never retry a failed write: the kernel may report those pages as written.
                self.broken = str(fault.strerror)
            self.roll_back()
            raise fault from error

    def begin(self) -> None:
        """Open a transaction, unless one is open."""
        if self.lock is None:
            raise StorageError(_FORKED)
        if self.broken:
            raise StorageError(errno.EIO, self.broken)
        if not self.is_dirty:
            self.execute("BEGIN IMMEDIATE")
            self.is_dirty = True

    def commit(self) -> None:
        """Make the open transaction durable."""
        self._check_place()
        self.execute("COMMIT")
        self.is_dirty = False

    def roll_back(self) -> None:
        """Forget the open transaction; after a full disk SQLite has done so already."""
        self.is_dirty = False
        if self.connection.in_transaction:
            # Where this fails too, the journal stays, and whoever opens the run next rolls back.
            with contextlib.suppress(sqlite3.OperationalError):
                self.connection.execute("ROLLBACK")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end of the block, together with what was buffered before it."""
        self.begin()
        try:
            yield
        except BaseException:
            self.roll_back()
            raise
        self.commit()

    def _check_place(self) -> None:
        """Refuse to write where folder or file are not those that this process holds."""
        assert self.lock is not None
        path, remedy = self.root, "Put it back, or run the same command with its new place"
        if _is(path / LOCK, os.fstat(self.lock)):
            path, remedy = path / DATABASE, "Restore it from a copy, or use another folder"
            if self._opened is None or _is(path, self._opened):
                return
        self.broken = (
            f"{path} was moved, replaced or removed during the run, by a job or another program: "
            f"nothing more is written. {remedy}"
        )
        self.roll_back()
        raise StorageError(errno.ENOENT, self.broken)


def _is(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), known)
    except OSError:
        return False
