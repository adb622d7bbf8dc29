"""What can be read of a run, by its writer and by everyone else."""

from __future__ import annotations

import errno
import math
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from asynckfold.errors import StorageError, StoreCorruptError
from asynckfold.jobs.decoding import decoded, finite, parsed
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import ENDED, Baseline, Epoch, Result, fingerprint
from asynckfold.store import splits
from asynckfold.store.database import SQLITE_FAULTS, decoding, from_sqlite
from asynckfold.store.lock import holder_of
from asynckfold.store.records import (
    HELD,
    PLACED,
    Attempt,
    CheckpointRef,
    Event,
    Placed,
    Sample,
    Waiting,
    cores_of,
    epoch_of,
    held_of,
    placed_of,
    result_of,
)
from asynckfold.store.schema import COLUMNS, TYPES
from asynckfold.store.soundness import check_outputs, check_result

_SHAPE = list(TYPES["results"]).index("shape")


class RunReader:
    """The reading half of the run on disk.

    Attributes
    ----------
    root : Path
        The run's folder.
    """

    def __init__(self, root: Path, connection: sqlite3.Connection) -> None:
        self.root = root
        self._db = connection

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
        with decoding(self.root):
            return Plan.from_json(text)

    @property
    def has_plan(self) -> bool:
        """Whether a plan was written."""
        return self._meta("plan") is not None

    @property
    def about(self) -> dict[str, Any]:
        """Versions, machine, command."""
        with decoding(self.root):
            about = decoded(dict[str, Any], parsed(self._meta("about") or "{}"), "about")
            _check_about(about)
            return about

    @property
    def baseline(self) -> Baseline | None:
        """The serial baseline, once it is known."""
        text = self._meta("baseline")
        if text is None:
            return None
        with decoding(self.root):
            found = decoded(Baseline, parsed(text), "baseline")
            numbers = {"seconds": found.seconds, "threads": found.threads, "cores": found.cores}
            others = {"others": found.others, "packed_others": found.packed_others}
            finite(numbers | others | dict(found.seconds_by_job), low=0)
            return found

    def splits(self) -> tuple[tuple[Fold, ...], npt.NDArray[Any]]:
        """Return the folds and the targets.

        Raises
        ------
        StoreCorruptError
            ``splits.npz`` does not hold the folds of the plan.
        """
        return splits.read(self.root, self.plan, self._meta("splits"))

    def results(self) -> dict[str, Result]:
        """Return all results by job id.

        Raises
        ------
        StoreCorruptError
            A result is not the one that was recorded; names its job.
        """
        found = {}
        columns = COLUMNS["results"].replace("outputs", "NULL")
        for *row, digest in self._rows(f"SELECT {columns} FROM results"):
            with decoding(self.root):
                result = result_of(self._with_outputs(row))
                check_result(result)
                if result.digest != digest:
                    raise ValueError(f"the result of {result.job_id} is not what was recorded")
            found[result.job_id] = result
        return found

    def _with_outputs(self, row: list[Any]) -> list[Any]:
        """Return the row of a result with its outputs, which a snapshot leaves in ``run.db``."""
        (job_id, *_), shape = row, row[_SHAPE]
        if shape is None:
            return row
        found = self._rows("SELECT outputs FROM main.results WHERE job_id = ?", (job_id,))
        if not found:
            raise StorageError(
                errno.EAGAIN, f"{self.root}: {job_id} was trained again meanwhile. Look again"
            )
        return [*row[: _SHAPE - 1], found[0][0], *row[_SHAPE:]]

    def results_on(self, folds: Sequence[Fold]) -> dict[str, Result]:
        """Return all results by job id, whose outputs are of the samples that folds hold out.

        Raises
        ------
        StoreCorruptError
            They are of others; names the first.
        """
        found = self.results()
        with decoding(self.root):
            check_outputs(self.plan, folds, found)
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
        return [(row[0], epoch_of(*row[1:])) for row in rows]

    def attempts(self) -> list[Attempt]:
        """Return all attempts in the order of their start."""
        rows = self._rows(
            "SELECT job_id, attempt, session, started, ended, outcome, cores, threads, device, "
            "pid, expected, error FROM attempts ORDER BY started, job_id"
        )
        changes = self._changes()
        with decoding(self.root):
            return [_attempt(row, changes) for row in rows]

    def seconds_of(self, job_id: str, until: float) -> float:
        """Return the seconds of all attempts at a job, the one that still runs until now.

        Parameters
        ----------
        job_id : str
            The job.
        until : float
            Run seconds of now.
        """
        ((seconds,),) = self._rows(
            "SELECT COALESCE(SUM(COALESCE(ended, ?) - started), 0) FROM attempts WHERE job_id = ?",
            (until, job_id),
        )
        return float(seconds)

    def _changes(self) -> dict[tuple[str, int], list[tuple[float, tuple[int, ...]]]]:
        """Since when attempts held other cores than those that they were placed with."""
        rows = self._rows(
            "SELECT job_id, at, text FROM events WHERE kind = ? ORDER BY seq", (HELD,)
        )
        found: dict[tuple[str, int], list[tuple[float, tuple[int, ...]]]] = {}
        with decoding(self.root):
            for job_id, at, text in rows:
                attempt, cores = held_of(text)
                found.setdefault((job_id, attempt), []).append((at, cores))
        return found

    def checkpoints(self, job_id: str) -> list[CheckpointRef]:
        """Return a job's checkpoints, newest first."""
        rows = self._rows(
            f"SELECT {COLUMNS['checkpoints']} FROM checkpoints WHERE job_id = ? "
            "ORDER BY epoch DESC, batch DESC, attempt DESC",
            (job_id,),
        )
        return [CheckpointRef(*row) for row in rows]

    def events(self) -> list[Event]:
        """Return all events in order, but for those that `placed` and `attempts` return."""
        rows = self._rows(
            "SELECT at, kind, job_id, text FROM events WHERE kind NOT IN (?, ?) ORDER BY seq",
            (PLACED, HELD),
        )
        return [Event(*row) for row in rows]

    def placed(self) -> dict[tuple[str, int], Placed]:
        """Return what was known when attempts started, by job id and attempt.

        Attempts of runs that were begun before this was recorded are missing.
        """
        rows = self._rows("SELECT job_id, text FROM events WHERE kind = ?", (PLACED,))
        with decoding(self.root):
            found = [(job_id, *placed_of(text)) for job_id, text in rows]
        return {(job_id, attempt): placed for job_id, attempt, placed in found}

    @property
    def waiting(self) -> Waiting | None:
        """What pending jobs wait for; None while no sweep is at work."""
        text = self._meta("waiting")
        if text is None:
            return None
        with decoding(self.root):
            return decoded(Waiting, parsed(text), "waiting")

    def samples(self) -> list[Sample]:
        """Return the CPU use over time."""
        rows = self._rows("SELECT at, phase, used, own, cores FROM samples ORDER BY at")
        with decoding(self.root):
            cores = [decoded(tuple[float, ...], parsed(row[4]), "cores") for row in rows]
        return [
            Sample(at, phase, used, own, use)
            for (at, phase, used, own, _), use in zip(rows, cores, strict=True)
        ]

    def software(self) -> tuple[dict[str, str], ...]:
        """Return with what each session trained that did: the first one first, {} if unknown."""
        rows = self._rows(
            "SELECT DISTINCT session, value FROM attempts LEFT JOIN meta "
            "ON key = 'software-' || session ORDER BY session"
        )
        with decoding(self.root):
            return tuple(
                decoded(dict[str, str], parsed(value or "{}"), "software") for _, value in rows
            )

    def session_ends(self) -> dict[int, float]:
        """Return the run seconds up to which each session is known."""
        return dict(self._rows("SELECT session, offset + seconds FROM sessions"))

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
        return holder_of(self.root)

    def _meta(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._db.execute(statement, values).fetchall()
        except SQLITE_FAULTS as error:
            raise from_sqlite(error, self.root) from error


def _attempt(row: Sequence[Any], changes: Mapping[tuple[str, int], Sequence[Any]]) -> Attempt:
    job_id, attempt, session, started, ended, outcome, cores, threads, device, *rest = row
    pid, expected, error = rest
    return Attempt(
        job_id,
        attempt,
        session,
        started,
        ended,
        outcome,
        cores_of(cores),
        threads,
        device,
        pid,
        math.nan if expected is None else expected,
        error,
        tuple(changes.get((job_id, attempt), ())),
    )


def _check_about(about: dict[str, Any]) -> None:
    """Raise ValueError unless the parts that are used have their types; the rest is only shown."""
    words = about.get("cli") or []
    decoded(list[str], list(words) if isinstance(words, (list, tuple)) else words, "about.cli")
    command = about.get("command") or []
    if not isinstance(command, str):
        decoded(list[str], command, "about.command")
    decoded(str, about.get("folder", ""), "about.folder")
    decoded(dict[str, Any], about.get("decision") or {}, "about.decision")
    if any("\0" in text for text in (*words, about.get("folder", ""))):
        raise ValueError("about has a word that no command line can have")
