"""`RunReader`: what can be read of a run, by its writer and by everyone else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.decoding import decoded, parsed
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import ENDED, Baseline, Epoch, Result, fingerprint
from asynckfold.store.database import COLUMNS, decoding
from asynckfold.store.layout import DATABASE
from asynckfold.store.lock import holder_of
from asynckfold.store.records import Attempt, Event, Interim, Sample, SessionTimes, WaitReasons
from asynckfold.store.run_file import Closing, RunFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asynckfold.jobs.folds import Fold

Kind = TypeVar("Kind")

_SCORES = '"scores":'


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
    def earlier_plans(self) -> tuple[str, ...]:
        """Fingerprints of plans that this one continues: their checkpoints are of this one, too."""
        return tuple((self.file.meta("earlier") or "").split())

    @property
    def about(self) -> dict[str, Any]:
        """Versions, machine, command."""
        return self._meta(dict[str, Any], "about") or {}

    @property
    def baseline(self) -> Baseline | None:
        """The serial baseline, once it is known."""
        return self._meta(Baseline, "baseline")

    def splits(self) -> tuple[tuple[Fold, ...], npt.NDArray[Any]]:
        """Return the folds and the targets.

        Raises
        ------
        StoreCorruptError
            ``splits.npz`` does not hold the folds of the plan.
        """
        from asynckfold.store import splits

        return splits.read(self.root, self.plan, self.file.meta("splits"))

    def results(self) -> dict[str, Result]:
        """Return all results by job id.

        Raises
        ------
        StoreCorruptError
            A result is not the one that was recorded; names its job.
        """
        rows = self.file.rows("SELECT job_id, record, digest FROM results")
        results = {}
        # Some at a time: a reader must not hold up the writer for long.
        for at in range(0, len(rows), 50):
            names, records, digests = zip(*rows[at : at + 50], strict=True)
            outputs = self._outputs(names)
            for result, digest in zip(self._all_decoded(Result, records), digests, strict=True):
                name = result.job_id
                results[name] = Result(**{**vars(result), "outputs": outputs.get(name)})
                if results[name].digest != digest:
                    raise StoreCorruptError(
                        f"{self.root / DATABASE} is damaged: the result of {name} is not what was "
                        "recorded"
                    )
        return results

    def _outputs(self, names: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
        # Those of a snapshot stay in run.db.
        where = f"main.outputs WHERE job_id IN ({','.join('?' * len(names))})"
        rows = self.file.rows(f"SELECT job_id, shape, data FROM {where}", names)
        if rows:
            import numpy as np
        with decoding(self.root):
            return {
                name: np.frombuffer(data, np.float32).reshape(parsed(shape))
                for name, shape, data in rows
            }

    def finished(self) -> dict[str, str]:
        """Return the status of each job that has a result."""
        return dict(self.file.rows("SELECT job_id, status FROM results"))

    def fingerprint(self) -> str:
        """Return one hash over the results of all jobs."""
        return fingerprint(dict(self.file.rows("SELECT job_id, digest FROM results")))

    def epochs(self, job_id: str | None = None) -> list[tuple[str, Epoch]]:
        """Return (job id, epoch) pairs of the newest attempt of each job, in order."""
        rows = self.file.rows(
            "SELECT job_id, record FROM epochs WHERE ? IS NULL OR job_id = ? "
            "ORDER BY job_id, number",
            (job_id, job_id),
        )
        epochs = self._all_decoded(Epoch, [text for _, text in rows])
        return [(name, epoch) for (name, _), epoch in zip(rows, epochs, strict=True)]

    def attempts(self) -> list[Attempt]:
        """Return all attempts in the order of their start."""
        rows = self.file.rows("SELECT record FROM attempts")
        attempts = self._all_decoded(Attempt, [text for (text,) in rows])
        return sorted(attempts, key=lambda item: (item.started, item.job_id))

    def attempt(self, job_id: str, number: int) -> Attempt | None:
        """Return one attempt at a job, if it was recorded."""
        where = "job_id = ? AND attempt = ?"
        rows = self.file.rows(f"SELECT record FROM attempts WHERE {where}", (job_id, number))
        return self._decoded(Attempt, rows[0][0]) if rows else None

    def checkpoints(self, job_id: str) -> list[CheckpointRef]:
        """Return a job's checkpoints, newest first."""
        rows = self.file.rows(
            f"SELECT {COLUMNS['checkpoints']} FROM checkpoints WHERE job_id = ? "
            "ORDER BY epoch DESC, batch DESC, attempt DESC",
            (job_id,),
        )
        return [CheckpointRef(*row) for row in rows]

    def events(self) -> list[Event]:
        """Return all events in order."""
        return [Event(*row) for row in self.file.rows("SELECT at, kind, job_id, text FROM events")]

    @property
    def waiting(self) -> WaitReasons | None:
        """What pending jobs wait for; None while no sweep is running."""
        return self._meta(WaitReasons, "waiting")

    @property
    def interim(self) -> Interim | None:
        """What the sweep recorded of itself last, if anything."""
        return self._meta(Interim, "interim")

    def scores(self) -> dict[str, tuple[str, Mapping[str, float]]]:
        """Return status and scores of each job that has a result, without its outputs."""
        rows = self.file.rows("SELECT job_id, status, record FROM results")
        with decoding(self.root):
            # The epochs, most of a record, stay text: no quote stands in a JSON string unescaped.
            read = json.JSONDecoder().raw_decode
            raw = [read(text, text.index(_SCORES) + len(_SCORES))[0] for *_, text in rows]
            scores = decoded(list[dict[str, float]], raw, "scores")
        pairs = zip(rows, scores, strict=True)
        return {name: (status, of_job) for (name, status, _), of_job in pairs}

    def samples(self) -> list[Sample]:
        """Return the CPU use over time."""
        return [item for item in self._samples() if item.phase != "gpu"]

    def gpu_samples(self) -> list[Sample]:
        """Return the use of GPUs over time."""
        return [item for item in self._samples() if item.phase == "gpu"]

    def _samples(self) -> list[Sample]:
        rows = self.file.rows("SELECT record FROM samples ORDER BY at")
        return self._all_decoded(Sample, [text for (text,) in rows])

    def software(self) -> tuple[dict[str, str], ...]:
        """Return what each session with an attempt trained with, in order; {} if unknown."""
        rows = self.file.rows("SELECT DISTINCT session FROM attempts ORDER BY session")
        return tuple(self._meta(dict[str, str], f"software-{session}") or {} for (session,) in rows)

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

    def _meta(self, kind: type[Kind], key: str) -> Kind | None:
        text = self.file.meta(key)
        return None if text is None else self._decoded(kind, text)

    def _decoded(self, kind: type[Kind], text: str) -> Kind:
        return self._all_decoded(kind, [text])[0]

    def _all_decoded(self, kind: type[Kind], texts: Sequence[str]) -> list[Kind]:
        with decoding(self.root):
            # As one list: its parts are read without a call of Python each.
            return decoded(list[kind], parsed(f"[{','.join(texts)}]"), kind.__name__)  # type: ignore
