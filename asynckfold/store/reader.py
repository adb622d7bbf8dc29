"""`RunReader`: what can be read of a run, by its writer and by everyone else."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.errors import StorageError, StoreCorruptError
from asynckfold.jobs.decoding import decoded, finite, parsed
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.placement import Wait
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import ENDED, Baseline, Epoch, Result, fingerprint
from asynckfold.store.database import decoding
from asynckfold.store.lock import holder_of
from asynckfold.store.records import (
    HELD,
    PLACED,
    Attempt,
    Event,
    Interim,
    Sample,
    SessionTimes,
    Waiting,
    attempt_of,
    epoch_of,
    held_of,
    placed_of,
    result_of,
)
from asynckfold.store.run_file import Closing, RunFile
from asynckfold.store.schema import COLUMNS, TYPES
from asynckfold.store.soundness import check_about, check_outputs, check_result

if TYPE_CHECKING:
    import numpy.typing as npt

    from asynckfold.jobs.folds import Fold

_SHAPE = list(TYPES["results"]).index("shape")


@dataclass(frozen=True, eq=False)
class RunReader(Closing):
    """Reads a run. Open it with `RunStore.read`.

    Attributes
    ----------
    root : Path
        The run's folder.
    file : RunFile
        The open database.
    """

    root: Path
    file: RunFile

    def close(self) -> None:
        """Close the database."""
        self.file.close()

    @property
    def plan(self) -> Plan:
        """The plan of the run.

        Raises
        ------
        StoreCorruptError
            The run was killed before its plan was written.
        """
        text = self.file.meta("plan")
        if text is None:
            raise StoreCorruptError(f"{self.root} holds no plan yet; run the same command again")
        with decoding(self.root):
            return Plan.from_json(text)

    @property
    def has_plan(self) -> bool:
        """Whether a plan was written."""
        return self.file.meta("plan") is not None

    @property
    def about(self) -> dict[str, Any]:
        """Versions, machine, command."""
        with decoding(self.root):
            about = decoded(dict[str, Any], parsed(self.file.meta("about") or "{}"), "about")
            check_about(about)
            return about

    @property
    def baseline(self) -> Baseline | None:
        """The serial baseline, once it is known."""
        text = self.file.meta("baseline")
        if text is None:
            return None
        with decoding(self.root):
            found = decoded(Baseline, parsed(text), "baseline")
            numbers = {"seconds": found.seconds, "threads": found.threads, "cores": found.cores}
            others = {"others": found.others, "packed_others": found.packed_others}
            known = {name: value for name, value in others.items() if not math.isnan(value)}
            finite(numbers | known | dict(found.seconds_by_job), low=0)
            return found

    def splits(self) -> tuple[tuple[Fold, ...], npt.NDArray[Any]]:
        """Return the folds and the targets.

        Raises
        ------
        StoreCorruptError
            ``splits.npz`` does not hold the folds of the plan.
        """
        from asynckfold.store import splits

        return splits.read(self.root, self.plan, self.file.meta("splits"))

    def results(self, folds: Sequence[Fold] | None = None) -> dict[str, Result]:
        """Return all results by job id.

        Parameters
        ----------
        folds : sequence of Fold, optional
            If given, check that outputs belong to the samples that these folds hold out.

        Raises
        ------
        StoreCorruptError
            A result is not the one that was recorded; names its job.
        """
        found, nodes = {}, _nodes(self)
        # Outputs one by one: in a snapshot they are only in run.db itself.
        columns = COLUMNS["results"].replace("outputs", "NULL")
        for *row, digest in self.file.rows(f"SELECT {columns} FROM results"):
            if row[_SHAPE] is not None:
                row[_SHAPE - 1] = _outputs(self.file, row[0])
            with decoding(self.root):
                result = result_of(row)
                check_result(result)
                if result.digest != digest:
                    raise ValueError(f"the result of {result.job_id} is not what was recorded")
            if where := nodes.get((result.job_id, result.attempt)):
                result = replace(result, node=where)
            found[result.job_id] = result
        if folds is not None:
            with decoding(self.root):
                check_outputs(self.plan, folds, found)
        return found

    def finished(self) -> dict[str, str]:
        """Return the status of each job that has a result."""
        return dict(self.file.rows("SELECT job_id, status FROM results"))

    def fingerprint(self) -> str:
        """Return one hash over the results of all jobs."""
        return fingerprint(dict(self.file.rows("SELECT job_id, digest FROM results")))

    def epochs(self, job_id: str | None = None) -> list[tuple[str, Epoch]]:
        """Return (job id, epoch) pairs of the newest attempt of each job, in order."""
        rows = self.file.rows(
            "SELECT job_id, number, train_loss, valid_loss, accuracy, lr, seconds FROM epochs "
            "AS e WHERE attempt = (SELECT MAX(attempt) FROM epochs WHERE job_id = e.job_id "
            "AND number = e.number) AND (? IS NULL OR job_id = ?) ORDER BY job_id, number",
            (job_id, job_id),
        )
        return [(row[0], epoch_of(*row[1:])) for row in rows]

    def attempts(self) -> list[Attempt]:
        """Return all attempts in the order of their start."""
        rows = self.file.rows(
            f"SELECT {COLUMNS['attempts']} FROM attempts ORDER BY started, job_id"
        )
        events = self.file.rows(
            "SELECT kind, job_id, at, text FROM events WHERE kind IN (?, ?) ORDER BY seq",
            (PLACED, HELD),
        )
        changes: dict[tuple[str, int], list[tuple[float, tuple[int, ...]]]] = {}
        placed: dict[tuple[str, int], tuple[int, tuple[Wait, ...], str]] = {}
        with decoding(self.root):
            for kind, job_id, at, text in events:
                if kind == HELD:
                    attempt, cores = held_of(text)
                    changes.setdefault((job_id, attempt), []).append((at, cores))
                else:
                    attempt, memory, waits, node = placed_of(text)
                    placed[job_id, attempt] = memory, waits, node
            return [
                attempt_of(row, changes.get(key, ()), *placed.get(key, ()))
                for row in rows
                for key in [(row[0], row[1])]
            ]

    def checkpoints(self, job_id: str) -> list[CheckpointRef]:
        """Return a job's checkpoints, newest first."""
        rows = self.file.rows(
            f"SELECT {COLUMNS['checkpoints']} FROM checkpoints WHERE job_id = ? "
            "ORDER BY epoch DESC, batch DESC, attempt DESC",
            (job_id,),
        )
        return [CheckpointRef(*row) for row in rows]

    def events(self) -> list[Event]:
        """Return all events in order, except those that `placed` and `attempts` return."""
        rows = self.file.rows(
            "SELECT at, kind, job_id, text FROM events WHERE kind NOT IN (?, ?) ORDER BY seq",
            (PLACED, HELD),
        )
        return [Event(*row) for row in rows]

    @property
    def waiting(self) -> Waiting | None:
        """What pending jobs wait for; None while no sweep is running."""
        text = self.file.meta("waiting")
        if text is None:
            return None
        with decoding(self.root):
            return decoded(Waiting, parsed(text), "waiting")

    @property
    def interim(self) -> Interim | None:
        """What the sweep recorded of itself last, if anything."""
        text = self.file.meta("interim")
        if text is None:
            return None
        with decoding(self.root):
            found = decoded(Interim, parsed(text), "interim")
            left = {} if found.seconds_left is None else {"seconds left": found.seconds_left}
            finite({"steps done": found.steps_done, "steps": found.steps, **left}, low=0)
            return found

    def scores(self) -> dict[str, tuple[str, Mapping[str, float]]]:
        """Return status and scores of each job that has a result, without its outputs."""
        rows = self.file.rows("SELECT job_id, status, scores FROM results")
        with decoding(self.root):
            return {
                name: (status, decoded(dict[str, float], parsed(text), "scores"))
                for name, status, text in rows
            }

    def samples(self) -> list[Sample]:
        """Return the CPU use over time."""
        return self._samples("phase != 'gpu'")

    def gpu_samples(self) -> list[Sample]:
        """Return the use of GPUs over time."""
        return self._samples("phase = 'gpu'")

    def _samples(self, where: str) -> list[Sample]:
        columns = "at, phase, used, own, cores"
        rows = self.file.rows(f"SELECT {columns} FROM samples WHERE {where} ORDER BY at")
        with decoding(self.root):
            return [
                Sample(at, phase, used, own, decoded(tuple[float, ...], parsed(cores), "cores"))
                for at, phase, used, own, cores in rows
            ]

    def software(self) -> tuple[dict[str, str], ...]:
        """Return what each session with an attempt trained with, in order; {} if unknown."""
        rows = self.file.rows(
            "SELECT DISTINCT session, value FROM attempts LEFT JOIN meta "
            "ON key = 'software-' || session ORDER BY session"
        )
        with decoding(self.root):
            return tuple(
                decoded(dict[str, str], parsed(value or "{}"), "software") for _, value in rows
            )

    def sessions(self) -> list[SessionTimes]:
        """Return the times of each session, in order."""
        rows = self.file.rows(
            "SELECT session, offset + seconds, packed FROM sessions ORDER BY session"
        )
        return [SessionTimes(*row) for row in rows]

    def counts(self) -> dict[str, int]:
        """Return jobs by state: planned = done + failed + diverged + cancelled + pending.

        ``running`` counts those pending jobs that have an open attempt.
        """
        ended = dict.fromkeys(ENDED, 0)
        for status in self.finished().values():
            ended[status] += 1
        planned = len(self.plan.jobs)
        ((running,),) = self.file.rows("SELECT COUNT(*) FROM attempts WHERE outcome IS NULL")
        return {
            "planned": planned,
            **ended,
            "pending": planned - sum(ended.values()),
            "running": int(running) if self.holder() else 0,
        }

    def holder(self) -> dict[str, Any] | None:
        """Return who holds the run (pid, host, start), or None when nobody does."""
        return holder_of(self.root)


def _nodes(store: RunReader) -> dict[tuple[str, int], str]:
    """Return the nodes of attempts, by job and number; nothing is read of a run on one machine."""
    rows = store.file.rows(
        "SELECT job_id, text FROM events WHERE kind = ? AND text LIKE '%\"node\"%'",
        (PLACED,),
    )
    with decoding(store.root):
        placed = [(job_id, placed_of(text)) for job_id, text in rows]
    return {(job_id, attempt): node for job_id, (attempt, _, _, node) in placed}


def _outputs(file: RunFile, job_id: str) -> Any:
    rows = file.rows("SELECT outputs FROM main.results WHERE job_id = ?", (job_id,))
    if not rows:
        raise StorageError(
            errno.EAGAIN, f"{file.root}: {job_id} was retried in the meantime. Read it again"
        )
    return rows[0][0]
