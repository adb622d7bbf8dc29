"""`RunStore`: the run on disk, written by the process that holds it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import sqlite3
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import StorageError, StoreCorruptError
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.reproducibility import LEFT
from asynckfold.jobs.result import DONE, FAILED, Baseline, Epoch, Result
from asynckfold.store import recovery, splits
from asynckfold.store.aside import set_aside
from asynckfold.store.database import SQLITE_FAULTS, connect, from_sqlite
from asynckfold.store.layout import DATABASE, LOCK, SPLITS, network_of
from asynckfold.store.lock import now_text, take_lock
from asynckfold.store.reader import RunReader
from asynckfold.store.records import (
    HELD,
    PLACED,
    CheckpointRef,
    Placed,
    Waiting,
    epochs_text,
    held_text,
    placed_text,
)
from asynckfold.store.refusing import refuse_other
from asynckfold.store.schema import COLUMNS, FORMAT
from asynckfold.store.snapshot import snapshot

_FORKED = "only the process that holds the run may write to it"

_held: weakref.WeakSet[RunStore] = weakref.WeakSet()


def _abandon_all() -> None:
    for store in list(_held):
        store._abandon()


os.register_at_fork(after_in_child=_abandon_all)


class RunStore(RunReader):
    """The run on disk. Open it with `hold` to write, with `read` to look.

    Attributes
    ----------
    root : Path
        The run's folder.
    """

    def __init__(self, root: Path, connection: sqlite3.Connection, lock: int | None) -> None:
        super().__init__(root, connection)
        self._lock = lock
        self._owner = os.getpid()
        self._session = 0
        self._software: dict[str, str] = {}
        self._offset = 0.0
        self._clock = time.monotonic()
        self._dirty = False
        self._grouped = False
        self._wanted = False
        self._packed_since: float | None = None
        self._broken = ""
        self._abandoned = False
        if lock is not None:
            _held.add(self)

    # Opening and closing

    @classmethod
    def hold(cls, root: Path | str) -> RunStore:
        """Take the run for writing, making the folder if there is none.

        Raises
        ------
        RunHeldError
            Another process holds it.
        StorageError
            The folder cannot be written.
        StoreCorruptError
            ``run.db`` is not a run of this program.
        """
        root = Path(root)
        lock = take_lock(root)
        try:
            connection = connect(root)
            return cls(root, connection, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def read(cls, root: Path | str) -> RunStore:
        """Look at a run, which may be running: at what is committed now, and not later.

        What is read is checked as a whole. It needs no right to write.

        Raises
        ------
        StoreCorruptError
            There is no run in this folder, or it is damaged.
        StorageError
            It cannot be read.
        """
        root = Path(root)
        if not os.path.lexists(root / DATABASE):
            raise StoreCorruptError(f"{root} holds no run: there is no {DATABASE} in it")
        return cls(root, snapshot(root), None)

    def close(self) -> None:
        """Write what is buffered and let go of the run."""
        if self._abandoned:
            return
        try:
            if self._lock is not None and os.getpid() == self._owner and not self._broken:
                self._leave()
        finally:
            self._db.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _abandon(self) -> None:
        """Let go of the run in a child of this process, which must not touch what is its parent's.

        A lock lives as long as any descriptor of it, and SQLite rolls back the transaction of a
        connection that is closed, be it by the interpreter at its end: so this one never is.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._abandoned = True

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _leave(self) -> None:
        """Write what is buffered, and remove what dead workers left."""
        if self._session:
            self.flush()
            self._settle()
        elif self._meta("plan") is None:
            # A session that ended before its plan was written leaves nothing behind.
            with contextlib.suppress(OSError):
                (self.root / SPLITS).unlink(missing_ok=True)

    # Writing

    def begin(
        self,
        plan: Plan,
        folds: Sequence[Fold],
        targets: npt.NDArray[Any],
        about: Mapping[str, Any] | None = None,
        free: Collection[str] = (),
    ) -> None:
        """Write the plan, or check that this one continues that of the folder; start a session.

        A run may grow: further candidates are added to its plan, and what it has stays.

        Attempts of a killed session are marked lost; failed jobs become pending again, so that the
        same command after a repair tries them once more. Of checkpoints of jobs that are not
        finished, those that were damaged are set aside, and an event says so; files that a crash
        left behind are removed.

        Parameters
        ----------
        plan : Plan
            What this sweep does.
        folds : sequence of Fold
            As the plan's fingerprint says.
        targets : ndarray of shape (n_samples,) or (n_samples, n_outputs)
            Kept for reports.
        about : Mapping, optional
            What else should be known: versions, machine, command. Written with the plan.
        free : collection of str
            Fields of the plan that may change.

        Raises
        ------
        PlanMismatchError
            The folder holds a run of another plan; names the first difference.
        StorageError
            The disk refused; calling it again is safe.
        """
        stored = self._meta("plan")
        if stored is None:
            digest = splits.write(self.root, folds, targets)
            with self._transaction():
                self._put("format", str(FORMAT))
                self._put("splits", digest)
                self._put("plan", plan.to_json())
                self._put("about", json.dumps(dict(about or {})))
        else:
            refuse_other(self.root, Plan.from_json(stored), plan, free)
            if stored != plan.to_json():
                with self._transaction():
                    self._put("plan", plan.to_json())
                    self._put("about", json.dumps(dict(about or {})))
                    # It was that of fewer jobs.
                    self._execute("DELETE FROM meta WHERE key = 'baseline'")
        with self._transaction():
            self._execute("UPDATE attempts SET outcome = 'lost', seal = NULL WHERE outcome IS NULL")
            self._execute(
                "DELETE FROM results WHERE status NOT IN (?, 'diverged')",
                (DONE,),
            )
            self._execute("DELETE FROM meta WHERE key = 'waiting'")
            row = self._execute("SELECT COALESCE(SUM(seconds), 0) FROM sessions").fetchone()
            self._offset = float(row[0])
            self._clock = time.monotonic()
            cursor = self._execute(
                "INSERT INTO sessions (pid, host, started, offset, seconds) VALUES (?,?,?,?,0)",
                (os.getpid(), socket.gethostname(), now_text(), self._offset),
            )
            session = int(cursor.lastrowid or 0)
            for table in ("attempts", "sessions"):
                self._seal(table, "seal IS NULL")
        self._session = session
        recovery.make_job_folders(self.root, plan.jobs)
        self._set_aside_damage()
        self.flush()
        self._settle()

    def start_over(self) -> Path:
        """Keep the run under another name beside it, and hold an empty folder in its place.

        Returns
        -------
        Path
            Where the earlier run is now, whole, whatever happens meanwhile.

        Raises
        ------
        InputError
            The folder cannot be renamed; the run is held as before.
        RunHeldError
            Another process took the folder at the same moment.
        """
        self._check_place()
        assert self._lock is not None
        # SQLite finds its files by name.
        self._db.close()
        try:
            earlier = set_aside(self.root)
        except BaseException:
            self._db = connect(self.root)
            raise
        old, self._lock = self._lock, take_lock(self.root)
        os.close(old)
        self._db = connect(self.root)
        self._session, self._offset, self._clock = 0, 0.0, time.monotonic()
        return earlier

    def _set_aside_damage(self) -> None:
        """Forget checkpoints of unfinished jobs that are not what was recorded."""
        finished = self.finished()
        for job in self.plan.jobs:
            refs = [] if job.id in finished else self.checkpoints(job.id)
            for ref, reason in recovery.damaged(self.root, job, refs):
                self.event("damage", f"checkpoint {ref.file} is not used: {reason}", job.id)
                self._execute(
                    "DELETE FROM checkpoints WHERE job_id = ? AND file = ?", (job.id, ref.file)
                )

    def _settle(self) -> None:
        """Remove temporary files, and checkpoints that no committed row names."""
        named: dict[str, list[str]] = {}
        for job_id, file in self._rows("SELECT job_id, file FROM checkpoints"):
            named.setdefault(job_id, []).append(file)
        recovery.clear_up(self.root, self.plan.jobs, named)

    @property
    def notes(self) -> tuple[str, ...]:
        """What should be known about the place of the run."""
        name = network_of(self.root)
        if not name:
            return ()
        return (
            f"{self.root} lies on {name}, where locks and fsync are as good as its server: prefer "
            "a local disk, and start no second run in it from another machine",
        )

    def now(self) -> float:
        """Run seconds: wall time of all sessions so far."""
        return self._offset + time.monotonic() - self._clock

    def start_attempt(
        self, job_id: str, cores: Sequence[int], threads: int, device: str, expected: float
    ) -> int:
        """Record that a job starts now; return the number of the attempt, from 1."""
        self._begin_buffered()
        row = self._execute(
            "SELECT COALESCE(MAX(attempt), 0) + 1 FROM attempts WHERE job_id = ?", (job_id,)
        ).fetchone()
        number = int(row[0])
        self._execute(
            "INSERT INTO attempts VALUES (?,?,?,?,NULL,NULL,?,?,?,0,?,'',NULL)",
            (
                job_id,
                number,
                self._session,
                self.now(),
                json.dumps(list(cores)),
                threads,
                device,
                expected,
            ),
        )
        self._seal("attempts", "job_id = ? AND attempt = ?", (job_id, number))
        self.flush()
        return number

    def note_placed(self, job_id: str, attempt: int, placed: Placed) -> None:
        """Note what was known when an attempt started; buffered."""
        self.event(PLACED, placed_text(attempt, placed), job_id)

    def note_cores(self, job_id: str, attempt: int, cores: Sequence[int]) -> None:
        """Note that an attempt goes on with these cores; buffered."""
        self.event(HELD, held_text(attempt, cores), job_id)

    def note_waiting(self, waiting: Waiting | None) -> None:
        """Note what pending jobs wait for now, in place of before; None at the end; buffered."""
        self._begin_buffered()
        if waiting is None:
            self._execute("DELETE FROM meta WHERE key = 'waiting'")
        else:
            self._put("waiting", json.dumps(asdict(waiting)))

    def end_attempt(
        self, job_id: str, attempt: int, outcome: str, *, pid: int = 0, error: str = ""
    ) -> None:
        """Record how an attempt ended that leaves no result: it will be tried again."""
        self._begin_buffered()
        self._end_attempt(job_id, attempt, outcome, pid, error)
        self.flush()

    def interrupt(self) -> None:
        """Record that whatever still runs in this session was interrupted."""
        self._begin_buffered()
        self._execute(
            "UPDATE attempts SET ended = ?, outcome = 'interrupted', seal = NULL "
            "WHERE outcome IS NULL AND session = ?",
            (self.now(), self._session),
        )
        self._seal("attempts", "seal IS NULL")
        self.flush()

    def record(self, result: Result) -> bool:
        """Make a result durable; return whether it was accepted.

        A job keeps its first result: a late writer whose attempt is not the newest, or has ended
        already, or whose job is done, is refused.
        """
        self._begin_buffered()
        newest = self._execute(
            "SELECT attempt, outcome FROM attempts WHERE job_id = ? ORDER BY attempt DESC LIMIT 1",
            (result.job_id,),
        ).fetchone()
        present = self._execute(
            "SELECT 1 FROM results WHERE job_id = ?", (result.job_id,)
        ).fetchone()
        if present or newest != (result.attempt, None):
            return False
        if result.outputs is not None:
            result = replace(result, outputs=np.ascontiguousarray(result.outputs, np.float32))
        outputs = result.outputs
        self._execute(
            f"INSERT INTO results VALUES ({','.join('?' * 20)},NULL)",
            (
                result.job_id,
                result.attempt,
                result.status,
                json.dumps({name: float(value) for name, value in result.scores.items()}),
                epochs_text(result),
                None if outputs is None else outputs.tobytes(),
                None if outputs is None else json.dumps(outputs.shape),
                result.weights,
                result.fit_seconds,
                result.score_seconds,
                result.peak_memory,
                result.pid,
                json.dumps(list(result.cores)),
                result.threads,
                result.device,
                result.started,
                result.ended,
                result.error,
                result.traceback,
                result.digest,
            ),
        )
        self._seal("results", "job_id = ?", (result.job_id,))
        outcome = {DONE: "ok", FAILED: "error"}.get(result.status, result.status)
        self._end_attempt(result.job_id, result.attempt, outcome, result.pid, result.error)
        self.flush()
        return True

    def checkpoint(self, ref: CheckpointRef) -> list[str]:
        """Make a checkpoint known; return files of the same job that nobody needs any more.

        The two newest stay.
        """
        self._begin_buffered()
        self._execute("INSERT OR REPLACE INTO checkpoints VALUES (?,?,?,?,?,?,?,0)", astuple(ref))
        self._seal("checkpoints", "job_id = ? AND file = ?", (ref.job_id, ref.file))
        rows = self._execute(
            "SELECT file FROM checkpoints WHERE job_id = ? "
            "ORDER BY epoch DESC, batch DESC, attempt DESC LIMIT -1 OFFSET 2",
            (ref.job_id,),
        ).fetchall()
        old = [str(row[0]) for row in rows]
        for file in old:
            self._execute(
                "DELETE FROM checkpoints WHERE job_id = ? AND file = ?", (ref.job_id, file)
            )
        self.flush()
        return old

    def epoch(self, job_id: str, attempt: int, item: Epoch) -> None:
        """Note an epoch of a running job; buffered."""
        self._begin_buffered()
        self._execute(
            f"INSERT OR REPLACE INTO epochs VALUES ({','.join('?' * 8)},NULL)",
            (job_id, attempt, *astuple(item)),
        )
        self._seal(
            "epochs", "job_id = ? AND attempt = ? AND number = ?", (job_id, attempt, item.number)
        )

    def event(self, kind: str, text: str, job_id: str | None = None) -> None:
        """Note something worth telling; buffered."""
        self._begin_buffered()
        cursor = self._execute(
            "INSERT INTO events (at, kind, job_id, text) VALUES (?,?,?,?)",
            (self.now(), kind, job_id, text),
        )
        self._seal("events", "seq = ?", (cursor.lastrowid,))

    def started(self, job_id: str, attempt: int, pid: int, at: float | None = None) -> None:
        """Note which process works on an attempt, and since when if not from the start; buffered.

        In a row of jobs, an attempt holds its cores from the end of the one before.
        """
        self._begin_buffered()
        self._execute(
            "UPDATE attempts SET pid = ?, started = COALESCE(?, started) "
            "WHERE job_id = ? AND attempt = ?",
            (pid, at, job_id, attempt),
        )
        self._seal("attempts", "job_id = ? AND attempt = ?", (job_id, attempt))

    def note_software(self, software: Mapping[str, str]) -> None:
        """Record with what this session trains: durable before its first attempt is."""
        self._begin_buffered()
        self._software = dict(software)
        self._put(f"software-{self._session}", json.dumps(self._software))

    def note_left(self, text: str) -> None:
        """Record that jobs of this session were not apart from each other, and why; buffered."""
        told = [item for item in self._software.get(LEFT, "").split("; ") if item]
        self.note_software({**self._software, LEFT: "; ".join(dict.fromkeys([*told, text]))})

    def sample(self, phase: str, used: float, own: float, cores: Sequence[float]) -> None:
        """Note the CPU use now; buffered."""
        self._begin_buffered()
        cursor = self._execute(
            "INSERT INTO samples VALUES (?,?,?,?,?,NULL)",
            (self.now(), phase, used, own, json.dumps([round(value, 3) for value in cores])),
        )
        self._seal("samples", "rowid = ?", (cursor.lastrowid,))

    def set_baseline(self, baseline: Baseline) -> None:
        """Make the serial baseline durable."""
        self._begin_buffered()
        self._put("baseline", json.dumps(baseline.to_dict()))
        self.flush()

    def packing(self, already: float | None) -> None:
        """Count time as the packed run's: from now, with `already` seconds passed, until None."""
        if already is None:
            self.flush()
        self._packed_since = None if already is None else self.now() - already

    @contextmanager
    def together(self, *, at_once: bool = True) -> Iterator[None]:
        """Make what is written inside durable by one commit: at the end, or with the next one.

        A commit costs two or three milliseconds, whatever is in it. Nothing written inside may be
        acknowledged before that.
        """
        self._grouped = True
        try:
            yield
        finally:
            self._grouped = False
        if at_once and self._wanted:
            self.flush()

    def forget(self) -> None:
        """Forget what is buffered: after an exception that may have struck within a row."""
        self._roll_back()

    def flush(self) -> None:
        """Put on disk what is buffered."""
        self._begin_buffered()
        if self._grouped:
            self._wanted = True
            return
        self._wanted = False
        self._execute(
            "UPDATE sessions SET seconds = ? WHERE session = ?",
            (self.now() - self._offset, self._session),
        )
        if self._packed_since is not None:
            self._execute(
                "UPDATE sessions SET packed = ? WHERE session = ?",
                (self.now() - self._packed_since, self._session),
            )
        self._seal("sessions", "session = ?", (self._session,))
        self._commit()

    def _end_attempt(self, job_id: str, attempt: int, outcome: str, pid: int, error: str) -> None:
        self._execute(
            "UPDATE attempts SET ended = ?, outcome = ?, pid = ?, error = ? "
            "WHERE job_id = ? AND attempt = ?",
            (self.now(), outcome, pid, error, job_id, attempt),
        )
        self._seal("attempts", "job_id = ? AND attempt = ?", (job_id, attempt))

    def _seal(self, table: str, where: str, values: Sequence[Any] = ()) -> None:
        """Write the checksum of what now stands in some rows."""
        self._execute(
            f"UPDATE {table} SET seal = seal({COLUMNS[table]}) WHERE {where}",
            values,
        )

    def _begin_buffered(self) -> None:
        if os.getpid() != self._owner or self._lock is None:
            raise StorageError(_FORKED)
        if self._broken:
            raise StorageError(errno.EIO, self._broken)
        if not self._dirty:
            self._execute("BEGIN IMMEDIATE")
            self._dirty = True

    def _commit(self) -> None:
        self._check_place()
        self._execute("COMMIT")
        self._dirty = False

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except SQLITE_FAULTS as error:
            self._check_place()
            fault = from_sqlite(error, self.root)
            if isinstance(fault, StorageError) and fault.errno == errno.EIO:
                # What the disk refused to take once is not given to it again in this session: the
                # kernel may call it written by then.
                self._broken = str(fault.strerror)
            self._roll_back()
            raise fault from error

    def _check_place(self) -> None:
        """See that the folder is still where it was: nothing is written into another one."""
        assert self._lock is not None
        try:
            there = os.path.samestat((self.root / LOCK).lstat(), os.fstat(self._lock))
        except OSError:
            there = False
        if not there:
            self._broken = (
                f"{self.root} was moved, replaced or removed while the run was going on: nothing "
                "more is written. Put it back, or run the same command with its new place"
            )
            self._roll_back()
            raise StorageError(errno.ENOENT, self._broken)

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        if self._abandoned:
            raise StorageError(_FORKED)
        return super()._rows(statement, values)

    def _put(self, key: str, value: str) -> None:
        self._execute("INSERT OR REPLACE INTO meta VALUES (?,?,NULL)", (key, value))
        self._seal("meta", "key = ?", (key,))

    def _roll_back(self) -> None:
        """Forget what is buffered; after a full disk SQLite has done so already."""
        self._dirty = False
        if self._db.in_transaction:
            # Where this fails too, the journal stays, and whoever opens the run next rolls back.
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute("ROLLBACK")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._begin_buffered()
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self._commit()

    def holder(self) -> dict[str, Any] | None:
        """Say who holds the run (pid, host, start), or None when nobody does."""
        if self._lock is not None:
            return {"pid": os.getpid(), "host": socket.gethostname()}
        return super().holder()
