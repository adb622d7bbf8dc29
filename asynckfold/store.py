"""The run on disk: everything that happened, in one SQLite file with one writer.

::

    root_dir/
      run.lock      an flock on this file's open descriptor says who holds the run
      run.db        plan, jobs, attempts, epochs, results, checkpoints, events, load samples
      splits.npz    the indices of every fold, and the targets

      Model/schedule/fold-0/         checkpoints and log of one job, written by its worker

The process that runs the sweep holds the run and is its only writer. Everyone else reads, at any
time, also while it runs. A result is acknowledged only after its transaction is on the disk
(``synchronous=EXTRA``); what can be lost in a crash is progress, never a result. Each row carries a
checksum of its values: a file that was changed by anyone else is refused, never read as other
numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import socket
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import (
    PlanMismatchError,
    Problem,
    RunHeldError,
    StorageError,
    StoreCorruptError,
)
from asynckfold.files import (
    TEMPORARY,
    make_folder,
    settle,
    slug,
    storage_error,
    sync_folder,
    write_whole,
)
from asynckfold.folds import Fold
from asynckfold.plan import Job, Plan, folds_fingerprint
from asynckfold.result import DONE, ENDED, FAILED, Baseline, Epoch, Result, fingerprint

FORMAT = 2

_CHECKPOINT = re.compile(r"checkpoint-.+\.safetensors")
_SPLITS = "splits.npz"

# A tenth of a second in all: thousands of times what a reader needs to look at the lock.
_TRIES, _TRY_SECONDS = 20, 0.005

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, seal INTEGER);
CREATE TABLE sessions (session INTEGER PRIMARY KEY, pid INTEGER, host TEXT, started TEXT,
    offset REAL NOT NULL, seconds REAL NOT NULL, packed REAL NOT NULL DEFAULT 0,
    seal INTEGER);
CREATE TABLE attempts (job_id TEXT NOT NULL, attempt INTEGER NOT NULL, session INTEGER NOT NULL,
    started REAL NOT NULL, ended REAL, outcome TEXT, cores TEXT, threads INTEGER, device TEXT,
    pid INTEGER, expected REAL, error TEXT, seal INTEGER, PRIMARY KEY (job_id, attempt));
CREATE TABLE epochs (job_id TEXT NOT NULL, attempt INTEGER NOT NULL, number INTEGER NOT NULL,
    train_loss REAL, valid_loss REAL, accuracy REAL, lr REAL, seconds REAL,
    seal INTEGER, PRIMARY KEY (job_id, attempt, number));
CREATE TABLE results (job_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, status TEXT NOT NULL,
    scores TEXT NOT NULL, epochs TEXT NOT NULL, outputs BLOB, shape TEXT, weights TEXT,
    fit_seconds REAL, score_seconds REAL, peak_memory INTEGER, pid INTEGER, cores TEXT,
    threads INTEGER, device TEXT, started REAL, ended REAL, error TEXT, traceback TEXT,
    digest TEXT NOT NULL, seal INTEGER);
CREATE TABLE checkpoints (job_id TEXT NOT NULL, attempt INTEGER NOT NULL, epoch INTEGER NOT NULL,
    batch INTEGER NOT NULL, file TEXT NOT NULL, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
    seal INTEGER, PRIMARY KEY (job_id, file));
CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, job_id TEXT,
    text TEXT NOT NULL, seal INTEGER);
CREATE TABLE samples (at REAL NOT NULL, phase TEXT NOT NULL, used REAL NOT NULL, own REAL NOT NULL,
    cores TEXT NOT NULL, seal INTEGER);
"""

_STATEMENTS = [text.strip() for text in _SCHEMA.split(";") if text.strip()]
_COLUMNS = {
    text.split()[2]: ", ".join(re.findall(r"(\w+) (?:TEXT|INTEGER|REAL|BLOB)\b", text)[:-1])
    for text in _STATEMENTS
}
"""The columns of each table that its seal covers: all before it."""

_DISK_FAULTS = {
    "database or disk is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "attempt to write a readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
    "database is locked": errno.EAGAIN,
}
"""What SQLite says when it is the disk that refuses; anything else means that the file is bad."""

_SQLITE_FAULTS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Where a name in the file is damaged, sqlite3 fails to decode SQLite's own message."""


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint file that was durable when this was recorded.

    Parameters
    ----------
    job_id, attempt : str, int
        Who wrote it.
    epoch, batch : int
        Whole epochs that it contains, and batches of the next one.
    file : str
        Path relative to the run's folder.
    sha256 : str
        Digest of the file.
    bytes : int
        Its size.
    """

    job_id: str
    attempt: int
    epoch: int
    batch: int
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Attempt:
    """One try at a job: where and when (run seconds), and how it ended.

    ``outcome`` is None while it runs; ``"ok"``, ``"error"``, ``"diverged"``, ``"died"``,
    ``"timeout"``, ``"cancelled"``, or ``"lost"`` when the whole run was killed.
    """

    job_id: str
    attempt: int
    session: int
    started: float
    ended: float | None
    outcome: str | None
    cores: tuple[int, ...]
    threads: int
    device: str
    pid: int
    expected: float
    error: str


@dataclass(frozen=True)
class Event:
    """Something worth telling: a fallback, a retry, a decision."""

    at: float
    kind: str
    job_id: str | None
    text: str


@dataclass(frozen=True)
class Sample:
    """CPU use at one moment.

    Parameters
    ----------
    at : float
        Run seconds.
    phase : {"packed", "serial"}
        Whether the sweep or the serial baseline was running.
    used, own : float
        Cores' worth of use of the allowed cores: by everyone, and by this run.
    cores : tuple of float
        Use of each allowed core, 0 to 1.
    """

    at: float
    phase: str
    used: float
    own: float
    cores: tuple[float, ...]


class RunStore:
    """The run on disk. Open it with `hold` to write, with `read` to look.

    Attributes
    ----------
    root : Path
        The run's folder.
    """

    def __init__(self, root: Path, connection: sqlite3.Connection, lock: int | None) -> None:
        self.root = root
        self._db = connection
        self._lock = lock
        self._owner = os.getpid()
        self._session = 0
        self._offset = 0.0
        self._clock = time.monotonic()
        self._dirty = False
        self._grouped = False
        self._wanted = False
        self._packed_since: float | None = None
        self._broken = ""

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
        lock = _lock(root)
        try:
            connection = _connect(root)
            return cls(root, connection, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def read(cls, root: Path | str) -> RunStore:
        """Open a run for reading; it may be running.

        Raises
        ------
        StoreCorruptError
            There is no run in this folder, or it is damaged.
        """
        root = Path(root)
        path = root / "run.db"
        if not path.is_file():
            raise StoreCorruptError(f"{root} holds no run: there is no run.db in it")
        try:
            connection = _open_read_only(path)
        except _SQLITE_FAULTS as error:
            raise _from_sqlite(error, root) from error
        try:
            # A run that is held was checked by its holder, and must not be kept from writing.
            if _holder(root) is None:
                _verify(connection, path)
        except BaseException as error:
            connection.close()
            if isinstance(error, _SQLITE_FAULTS):
                raise _from_sqlite(error, root) from error
            raise
        return cls(root, connection, None)

    def close(self) -> None:
        """Write what is buffered and let go of the run."""
        try:
            if self._lock is not None and os.getpid() == self._owner and not self._broken:
                self._leave()
        finally:
            self._db.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

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
                (self.root / _SPLITS).unlink(missing_ok=True)

    # Writing

    def begin(
        self,
        plan: Plan,
        folds: Sequence[Fold],
        targets: npt.NDArray[Any],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the plan, or check that the folder holds the same one; start a session.

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
            What else should be known: versions, machine, command. Written once.

        Raises
        ------
        PlanMismatchError
            The folder holds a run of another plan; names the first difference.
        StorageError
            The disk refused; calling it again is safe.
        """
        stored = self._meta("plan")
        if stored is None:
            digest = self._write_splits(folds, targets)
            with self._transaction():
                self._put("format", str(FORMAT))
                self._put("splits", digest)
                self._put("plan", plan.to_json())
                self._put("about", json.dumps(dict(about or {})))
        else:
            difference = Plan.from_json(stored).first_difference(plan)
            if difference:
                raise PlanMismatchError(
                    [
                        Problem(
                            f"{self.root} holds a run of another plan, and a run keeps its plan",
                            difference,
                            "Use another folder, or the same arguments to continue that run.",
                        )
                    ]
                )
        with self._transaction():
            self._execute("UPDATE attempts SET outcome = 'lost', seal = NULL WHERE outcome IS NULL")
            self._execute(
                "DELETE FROM results WHERE status NOT IN (?, 'diverged')",
                (DONE,),
            )
            row = self._execute("SELECT COALESCE(SUM(seconds), 0) FROM sessions").fetchone()
            self._offset = float(row[0])
            self._clock = time.monotonic()
            cursor = self._execute(
                "INSERT INTO sessions (pid, host, started, offset, seconds) VALUES (?,?,?,?,0)",
                (os.getpid(), socket.gethostname(), _now_text(), self._offset),
            )
            session = int(cursor.lastrowid or 0)
            for table in ("attempts", "sessions"):
                self._seal(table, "seal IS NULL")
        self._session = session
        self._make_folders(plan)
        self._set_aside_damage()
        self.flush()
        self._settle()

    def _make_folders(self, plan: Plan) -> None:
        """Make the jobs' folders: a checkpoint is durable only when the way to it is."""
        folders = {job_folder(self.root, job) for job in plan.jobs}
        inner = {outer for folder in folders for outer in _up_to(self.root, folder)}
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            for outer in inner:
                sync_folder(outer)
        except OSError as error:
            raise storage_error(error, self.root) from error

    def _set_aside_damage(self) -> None:
        """Forget checkpoints of unfinished jobs that are not what was recorded."""
        finished = self.finished()
        for job in self.plan.jobs:
            refs = [] if job.id in finished else self.checkpoints(job.id)
            folder = job_folder(self.root, job)
            wrong = settle(
                self.root,
                folder,
                TEMPORARY,
                {Path(ref.file).name: ref.sha256 for ref in refs},
            )
            for ref in refs:
                name = Path(ref.file).name
                reason = wrong.get(name)
                if self.root / ref.file != folder / name:
                    reason = "it is not in the folder of its job"
                if reason:
                    self.event("damage", f"checkpoint {ref.file} is not used: {reason}", job.id)
                    self._execute(
                        "DELETE FROM checkpoints WHERE job_id = ? AND file = ?", (job.id, ref.file)
                    )

    def _settle(self) -> None:
        """Remove temporary files, and checkpoints that no committed row names."""
        named: dict[str, dict[str, str | None]] = {}
        for job_id, file in self._rows("SELECT job_id, file FROM checkpoints"):
            named.setdefault(job_id, {})[Path(file).name] = None
        ours = re.compile(f"{TEMPORARY.pattern}|{_CHECKPOINT.pattern}")
        for job in self.plan.jobs:
            settle(self.root, job_folder(self.root, job), ours, named.get(job.id, {}))
        settle(self.root, self.root, re.compile(rf"{_SPLITS}\.\d+\.tmp"), {})
        settle(self.root, self.root / "oof", TEMPORARY, {})

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
                json.dumps([astuple(item) for item in result.epochs]),
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
            f"UPDATE {table} SET seal = seal({_COLUMNS[table]}) WHERE {where}",
            values,
        )

    def _begin_buffered(self) -> None:
        if os.getpid() != self._owner or self._lock is None:
            raise StorageError("only the process that holds the run may write to it")
        if self._broken:
            raise StorageError(errno.EIO, self._broken)
        if not self._dirty:
            self._execute("BEGIN IMMEDIATE")
            self._dirty = True

    def _commit(self) -> None:
        self._execute("COMMIT")
        self._dirty = False

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except _SQLITE_FAULTS as error:
            fault = _from_sqlite(error, self.root)
            if isinstance(fault, StorageError) and fault.errno == errno.EIO:
                # What the disk refused to take once is not given to it again in this session: the
                # kernel may call it written by then.
                self._broken = str(fault.strerror)
            self._roll_back()
            raise fault from error

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

    def _write_splits(self, folds: Sequence[Fold], targets: npt.NDArray[Any]) -> str:
        """Write the file and return its digest."""
        arrays: dict[str, npt.NDArray[Any]] = {"targets": np.asarray(targets)}
        for fold in folds:
            name = f"repeat{fold.repeat}-fold{fold.index}"
            arrays[f"{name}-train"] = fold.train
            arrays[f"{name}-valid"] = fold.valid
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_whole(self.root / _SPLITS, buffer.getvalue())
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    # Reading

    @property
    def plan(self) -> Plan:
        """The plan of the run.

        Raises
        ------
        StoreCorruptError
            The run was killed before its plan was written.
        """
        text = self._meta("plan")
        if text is None:
            raise StoreCorruptError(f"{self.root} holds no plan yet; run the same command again")
        with _decoding(self.root):
            return Plan.from_json(text)

    @property
    def has_plan(self) -> bool:
        """Whether a plan was written."""
        return self._meta("plan") is not None

    @property
    def about(self) -> dict[str, Any]:
        """Versions, machine, command."""
        return dict(json.loads(self._meta("about") or "{}"))

    @property
    def baseline(self) -> Baseline | None:
        """The serial baseline, once it is known."""
        text = self._meta("baseline")
        return None if text is None else Baseline(**json.loads(text))

    def splits(self) -> tuple[tuple[Fold, ...], npt.NDArray[Any]]:
        """Return the folds and the targets.

        Raises
        ------
        StoreCorruptError
            ``splits.npz`` does not hold the folds of the plan.
        """
        plan, path = self.plan, self.root / _SPLITS
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreCorruptError(f"{path} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != self._meta("splits"):
            raise StoreCorruptError(f"{path} is damaged: it is not what was written")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            keys = sorted({(job.repeat, job.fold) for job in plan.jobs})
            folds = tuple(
                Fold(
                    repeat,
                    fold,
                    arrays[f"repeat{repeat}-fold{fold}-train"],
                    arrays[f"repeat{repeat}-fold{fold}-valid"],
                )
                for repeat, fold in keys
            )
            targets = arrays["targets"]
        if folds_fingerprint(folds) != plan.folds:
            raise StoreCorruptError(f"{path} holds folds of another plan")
        return folds, targets

    def results(self) -> dict[str, Result]:
        """Return all results by job id.

        Raises
        ------
        StoreCorruptError
            A result is not the one that was recorded; names its job.
        """
        found = {}
        for *row, digest in self._rows(f"SELECT {_COLUMNS['results']} FROM results"):
            with _decoding(self.root):
                result = _result(row)
                if result.digest != digest:
                    raise ValueError(f"the result of {result.job_id} is not what was recorded")
            found[result.job_id] = result
        return found

    def finished(self) -> dict[str, str]:
        """Return the status of each job that has a result."""
        return dict(self._rows("SELECT job_id, status FROM results"))

    def fingerprint(self) -> str:
        """One hash over all jobs' canonical results."""
        return fingerprint(dict(self._rows("SELECT job_id, digest FROM results")))

    def epochs(self, job_id: str | None = None) -> list[tuple[str, Epoch]]:
        """Return (job id, epoch) pairs of the newest attempt of each job, in order."""
        rows = self._rows(
            "SELECT job_id, number, train_loss, valid_loss, accuracy, lr, seconds FROM epochs "
            "AS e WHERE attempt = (SELECT MAX(attempt) FROM epochs WHERE job_id = e.job_id "
            "AND number = e.number) AND (? IS NULL OR job_id = ?) ORDER BY job_id, number",
            (job_id, job_id),
        )
        return [(row[0], _epoch(*row[1:])) for row in rows]

    def attempts(self) -> list[Attempt]:
        """Return all attempts in the order of their start."""
        rows = self._rows(
            "SELECT job_id, attempt, session, started, ended, outcome, cores, threads, device, "
            "pid, expected, error FROM attempts ORDER BY started, job_id"
        )
        return [Attempt(*(*row[:6], tuple(json.loads(row[6])), *row[7:])) for row in rows]

    def checkpoints(self, job_id: str) -> list[CheckpointRef]:
        """Return a job's checkpoints, newest first."""
        rows = self._rows(
            f"SELECT {_COLUMNS['checkpoints']} FROM checkpoints WHERE job_id = ? "
            "ORDER BY epoch DESC, batch DESC, attempt DESC",
            (job_id,),
        )
        return [CheckpointRef(*row) for row in rows]

    def events(self) -> list[Event]:
        """Return all events in order."""
        rows = self._rows("SELECT at, kind, job_id, text FROM events ORDER BY seq")
        return [Event(*row) for row in rows]

    def samples(self) -> list[Sample]:
        """Return the CPU use over time."""
        rows = self._rows("SELECT at, phase, used, own, cores FROM samples ORDER BY at")
        return [Sample(*(*row[:4], tuple(json.loads(row[4])))) for row in rows]

    def packed_seconds(self) -> float:
        """Return the wall time of the packed run over all sessions."""
        ((seconds,),) = self._rows("SELECT COALESCE(SUM(packed), 0) FROM sessions")
        return float(seconds)

    def counts(self) -> dict[str, int]:
        """Jobs by state: planned = done + failed + diverged + cancelled + pending.

        ``running`` counts those of the pending that an attempt works on now.
        """
        ended = dict.fromkeys(ENDED, 0)
        for status in self.finished().values():
            ended[status] += 1
        planned = len(self.plan.jobs)
        ((open_attempts,),) = self._rows("SELECT COUNT(*) FROM attempts WHERE outcome IS NULL")
        return {
            "planned": planned,
            **ended,
            "pending": planned - sum(ended.values()),
            "running": int(open_attempts) if self.holder() else 0,
        }

    def holder(self) -> dict[str, Any] | None:
        """Say who holds the run (pid, host, start), or None when nobody does."""
        if self._lock is not None:
            return {"pid": os.getpid(), "host": socket.gethostname()}
        return _holder(self.root)

    def _meta(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._db.execute(statement, values).fetchall()
        except _SQLITE_FAULTS as error:
            raise _from_sqlite(error, self.root) from error


def job_folder(root: Path, job: Job) -> Path:
    """Return the folder of a job's checkpoints and log."""
    repeat = [f"repeat-{job.repeat}"] if job.repeated else []
    return root.joinpath(slug(job.model), slug(job.lr_schedule), *repeat, f"fold-{job.fold}")


def _up_to(root: Path, folder: Path) -> Iterator[Path]:
    """Yield the folders above `folder`, the last is `root`."""
    for outer in folder.parents:
        yield outer
        if outer == root:
            return


def _result(row: Sequence[Any]) -> Result:
    (job_id, attempt, status, scores, epochs, outputs, shape, weights, *rest) = row
    fit, score, memory, pid, cores, threads, device, started, ended, error, trace = rest
    return Result(
        job_id,
        attempt,
        status,
        json.loads(scores),
        tuple(Epoch(*item) for item in json.loads(epochs)),
        None if outputs is None else np.frombuffer(outputs, np.float32).reshape(json.loads(shape)),
        weights,
        fit,
        score,
        memory,
        pid,
        tuple(json.loads(cores)),
        threads,
        device,
        started,
        ended,
        error,
        trace,
    )


@contextmanager
def _decoding(root: Path) -> Iterator[None]:
    """What cannot be decoded was not written by us."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreCorruptError(f"{root / 'run.db'} is damaged: {error}") from error


def _epoch(number: int, *values: float | None) -> Epoch:
    """An epoch from its row, in which SQLite turned every NaN into NULL."""
    train_loss, valid_loss, lr, seconds = (
        float("nan") if value is None else value for value in (*values[:2], *values[3:])
    )
    return Epoch(number, train_loss, valid_loss, values[2], lr, seconds)


def _now_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _lock(root: Path) -> int:
    path = root / "run.lock"
    try:
        make_folder(root)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        _take(descriptor)
    except BlockingIOError:
        owner = _owner_text(descriptor)
        os.close(descriptor)
        raise RunHeldError(
            f"{root} is held by {owner}. Wait for it, stop it, or use another folder"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise storage_error(error, path) from error
    about = {"pid": os.getpid(), "host": socket.gethostname(), "started": _now_text()}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise storage_error(error, path) from error
    return descriptor


def _take(descriptor: int) -> None:
    """Take the lock; wait a moment for readers, who hold it for microseconds to look at it."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_TRY_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _owner_text(descriptor: int) -> str:
    about = _owner(descriptor)
    if not about:
        return "another process"
    return "process {pid} on {host} since {started}".format(
        **{"pid": "?", "host": "?", "started": "?", **about}
    )


def _owner(descriptor: int) -> dict[str, Any]:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _holder(root: Path) -> dict[str, Any] | None:
    try:
        descriptor = os.open(root / "run.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(descriptor) or {"pid": 0}
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _connect(root: Path) -> sqlite3.Connection:
    path = root / "run.db"
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    except sqlite3.OperationalError as error:
        raise _from_sqlite(error, root) from error
    try:
        _prepare(db, path)
    except BaseException as error:
        db.close()
        if isinstance(error, _SQLITE_FAULTS):
            raise _from_sqlite(error, root) from error
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new run, or check an old one."""
    db.execute("PRAGMA journal_mode=DELETE")
    db.execute("PRAGMA synchronous=EXTRA")
    db.create_function("seal", -1, _checksum, deterministic=True)
    if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() != (0,):
        _verify(db, path)
    elif (path.parent / _SPLITS).exists():
        raise StoreCorruptError(
            f"{path.parent} holds a run whose run.db is gone or empty. Put it back from a copy, or "
            "use another folder"
        )
    else:
        db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")


def _verify(db: sqlite3.Connection, path: Path) -> None:
    """Check a run at rest: that it is one, that SQLite finds it sound, and the seal of every row.

    50 ms for a run of 1,000 results with 8 MB of outputs (2 cores, printed by
    tests/durability/test_damage.py).
    """
    found = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if not any(str(text).startswith("CREATE TABLE meta ") for text in found):
        raise StoreCorruptError(f"{path} is not a run of asynckfold")
    written = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if written and written[0] != str(FORMAT):
        raise StoreCorruptError(
            f"{path} has format {written[0]}, this asynckfold reads format {FORMAT}"
        )
    if found != set(_STATEMENTS):
        raise StoreCorruptError(f"{path} is not a run of asynckfold: its tables differ")
    (word,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if word != "ok":
        raise StoreCorruptError(f"{path} is damaged: {word}")
    for table, columns in _COLUMNS.items():
        query = f"SELECT COUNT(*) FROM {table} WHERE seal IS NOT seal({columns})"
        (changed,) = db.execute(query).fetchone()
        if changed:
            raise StoreCorruptError(
                f"{path} is damaged: {changed} rows of {table} are not what was written"
            )


def _checksum(*values: object) -> int:
    """Return the CRC-32 of one row."""
    plain = repr([value for value in values if not isinstance(value, bytes)])
    total = zlib.crc32(plain.encode("utf-8", "surrogatepass"))
    for value in values:
        if isinstance(value, bytes):
            total = zlib.crc32(value, total)
    return total


def _open_read_only(path: Path) -> sqlite3.Connection:
    try:
        return _opened(f"{path.absolute().as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        # A killed writer leaves a journal that only a writer may roll back.
        if _holder(path.parent):
            raise
        return _opened(f"{path.absolute().as_uri()}?mode=rw")


def _opened(address: str) -> sqlite3.Connection:
    db = sqlite3.connect(address, uri=True, isolation_level=None, timeout=10)
    try:
        db.create_function("seal", -1, _checksum, deterministic=True)
        db.execute("SELECT COUNT(*) FROM meta").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _from_sqlite(error: Exception, root: Path) -> Exception:
    """Return what an error of SQLite means: the disk refused, the file is bad, or our mistake."""
    path = root / "run.db"
    number = _DISK_FAULTS.get(str(error))
    if number is not None:
        return storage_error(OSError(number, os.strerror(number)), path)
    told = (sqlite3.OperationalError, UnicodeDecodeError)
    if isinstance(error, told) or type(error) is sqlite3.DatabaseError:
        return StoreCorruptError(f"{path} is damaged or not a run: {error}")
    return error
