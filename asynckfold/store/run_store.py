"""`RunStore`: the run on disk, written by the process that holds it."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asynckfold.errors import InputError
from asynckfold.jobs.decoding import encoded
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.placement import Wait
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import (
    CANCELLED,
    DIVERGED,
    DONE,
    FAILED,
    Baseline,
    Epoch,
    Result,
    job_by_id,
)
from asynckfold.store import upkeep
from asynckfold.store.layout import SPLITS, SUMMARY, job_folder
from asynckfold.store.lock import now_text
from asynckfold.store.opening import read_run, refuse_other
from asynckfold.store.reader import RunReader
from asynckfold.store.records import Attempt, Interim, Sample, WaitReasons
from asynckfold.store.run_file import Closing, RunFile
from asynckfold.system.files import is_plain, remove

if TYPE_CHECKING:
    import numpy.typing as npt

    from asynckfold.jobs.folds import Fold

Store = TypeVar("Store", bound="RunStore")


@dataclass(eq=False)
class RunStore(Closing):
    """The run on disk, one method for each thing that is recorded.

    A result, a checkpoint and the start and end of an attempt are durable when their method
    returns, unless it is called inside `together`. Everything else is buffered until the next
    commit.

    Attributes
    ----------
    root : Path
        The run's folder.
    file : RunFile
        The open database.
    reader : RunReader
        Reads what was recorded, including what is not committed yet.
    session_software : dict of str to str
        What this session trains with.
    plan : Plan
        The plan of this session: that of the run, or a part of its candidates.
    """

    root: Path
    file: RunFile
    reader: RunReader
    session_software: dict[str, str] = field(default_factory=dict)
    plan: Plan = field(init=False)
    _session: int = 0
    _started: str = ""
    _offset: float = 0.0
    _clock: float = field(default_factory=time.monotonic)
    _packed_since: float | None = None
    _packed: float = 0.0
    _is_grouped: bool = False
    _is_wanted: bool = False
    _jobs: dict[str, Job] = field(default_factory=dict)
    _ended: list[Result] = field(default_factory=list)

    @classmethod
    def hold(cls: type[Store], root: Path | str) -> Store:
        """Take the run for writing, making the folder if there is none.

        Raises
        ------
        RunHeldError
            Another process holds it.
        StorageError
            The folder cannot be written.
        StoreCorruptError
            ``run.db`` is not a run of asynckfold.
        """
        file = RunFile.hold(Path(root))
        return cls(file.root, file, RunReader(file.root, file))

    @staticmethod
    def read(root: Path | str) -> RunReader:
        """Open a run for reading, as it is committed now; it may be running.

        Everything is checked, and no permission to write is needed.

        Raises
        ------
        StoreCorruptError
            There is no run in this folder, or it is damaged.
        StorageError
            It cannot be read.
        """
        return read_run(Path(root))

    def close(self) -> None:
        """Commit what is buffered, remove what dead workers left, and release the run."""
        try:
            if self.file.lock is None or self.file.broken:
                return
            if self._session:
                self.flush()
                _remove_leftovers(self)
            elif not self.reader.has_plan:
                # A session that ended before its plan was written leaves nothing behind.
                with contextlib.suppress(OSError):
                    (self.root / SPLITS).unlink(missing_ok=True)
        finally:
            self.file.close()

    def begin(
        self,
        plan: Plan,
        folds: Sequence[Fold],
        targets: npt.NDArray[Any],
        about: Mapping[str, Any] | None = None,
        free: Collection[str] = (),
        steady: Collection[str] = (),
        rescored: Collection[Result] = (),
    ) -> str:
        """Start a session: write the plan, or check that it continues that of the folder.

        A plan may add candidates, repeats and scores to the stored one; existing results are kept.
        One of fewer candidates leaves the stored one as it is. More epochs take back the results
        that they change; where jobs go on from a checkpoint, or ended early, theirs are kept.
        Attempts of a killed session are marked lost. Failed jobs become pending, so that the same
        command retries them after a repair. Damaged checkpoints of unfinished jobs are set aside,
        with an event, and files that a crash left behind are removed.

        Parameters
        ----------
        plan : Plan
            The plan of this sweep.
        folds : sequence of Fold
            Those whose fingerprint is in the plan.
        targets : ndarray of shape (n_samples,) or (n_samples, n_outputs)
            Kept for reports.
        about : Mapping, optional
            Versions, machine, command. Written with the plan.
        free : collection of str
            Fields of the plan that may differ from the stored one.
        steady : collection of str
            Candidates whose training is the beginning of a longer one.
        rescored : collection of Result
            Results of the run with scores that the plan adds.

        Returns
        -------
        str
            What more epochs do to the jobs of the run; ``""`` if there are none.

        Raises
        ------
        PlanMismatchError
            The folder holds a run of another plan; names the first difference.
        StorageError
            The disk refused; calling it again is safe.
        """
        from asynckfold.store import splits

        file, text = self.file, plan.to_json()
        stored, is_grown, longer = file.meta("plan"), False, ""
        if stored is not None:
            before = Plan.from_json(stored)
            refuse_other(self.root, before, plan, free, folds)
            is_grown = len(before.fold_keys) < len(plan.fold_keys)
            if len(plan.jobs) < len(before.jobs):
                plan, text = before.view(plan), stored
                _refuse_torn_groups(self.reader, before, plan)
        self.plan = plan
        is_lost = stored is not None and not splits.is_whole(self.root, file.meta("splits"))
        if is_lost or stored != text:
            # Written again for a run that goes on: its plan has the fingerprint of the folds.
            digest = None
            if is_lost or is_grown or stored is None:
                content, digest = splits.packed(folds, targets)
                if is_grown:
                    # After a kill between the file and the plan, either plan finds its folds.
                    with file.transaction():
                        file.put("splits", f"{file.meta('splits')} {digest}")
                splits.write(self.root, content)
            is_longer = stored is not None and before.params.epochs < plan.params.epochs
            if is_grown or is_longer:
                upkeep.remove_out_of_fold(self.root)
            jobs = job_by_id(plan)
            for result in rescored:
                remove(job_folder(self.root, jobs[result.job_id]) / SUMMARY)
            with file.transaction():
                if digest is not None:
                    file.put("splits", digest)
                for result in rescored:
                    _write_record(self, result)
                if is_longer:
                    longer = _lengthen(self, before, plan, steady)
                if stored is not None and stored != text and not free:
                    earlier = self.reader.earlier_plans
                    file.put("earlier", " ".join([*earlier, before.fingerprint]))
                if stored != text:
                    file.put("plan", text)
                    file.put("about", encoded(about or {}))
                    if stored is None or is_longer or before.jobs != plan.jobs:
                        # A stored baseline was measured with less work.
                        file.execute("DELETE FROM meta WHERE key = 'baseline'")
        with file.transaction():
            _end_open_attempts(self, "lost", None)
            # What was left out of a race may depend on a job that failed.
            ended = self.reader.finished()
            if FAILED in ended.values():
                for job in plan.jobs:
                    if ended.get(job.id) in (FAILED, CANCELLED):
                        file.execute("DELETE FROM results WHERE job_id = ?", (job.id,))
            file.execute("DELETE FROM outputs WHERE job_id NOT IN (SELECT job_id FROM results)")
            file.execute("DELETE FROM meta WHERE key = 'waiting'")
            ((count, seconds),) = file.rows(
                "SELECT COUNT(*), COALESCE(SUM(seconds), 0.0) FROM sessions"
            )
            self._started, self._offset, self._packed = now_text(), float(seconds), 0.0
            self._session, self._clock = int(count) + 1, time.monotonic()
            _write_session(self)
        self._jobs = job_by_id(self.reader.plan)
        upkeep.make_job_folders(self.root, plan.jobs)
        _set_aside_damage(self)
        if is_lost:
            self.event("damage", f"{SPLITS} was missing or damaged, and was written again")
        self.flush()
        _remove_leftovers(self)
        # Those that a crash left out.
        done = [self._jobs[name] for name in self.reader.finished()]
        if missing := [job for job in done if not is_plain(job_folder(self.root, job) / SUMMARY)]:
            results = self.reader.results()
            self._ended = [results[job.id] for job in missing]
            _write_summaries(self)
        return longer

    def now(self) -> float:
        """Run seconds: wall time of all sessions so far."""
        return self._offset + time.monotonic() - self._clock

    def start_attempt(
        self,
        job_id: str,
        cores: Sequence[int],
        threads: int,
        device: str,
        expected: float,
        memory: int | None = None,
        waits: Sequence[Wait] = (),
        node: str = "",
    ) -> int:
        """Record that a job starts now; return the number of the attempt, from 1."""
        ((number,),) = self.file.rows(
            "SELECT COALESCE(MAX(attempt), 0) + 1 FROM attempts WHERE job_id = ?", (job_id,)
        )
        attempt = Attempt(
            job_id,
            number,
            self._session,
            self.now(),
            None,
            None,
            tuple(cores),
            threads,
            device,
            0,
            expected,
            "",
            memory=memory,
            waits=tuple(replace(wait, seconds=round(wait.seconds, 3)) for wait in waits),
            node=node,
        )
        _write_attempt(self, attempt)
        self.flush()
        return attempt.attempt

    def started(self, job_id: str, attempt: int, pid: int, at: float | None = None) -> None:
        """Record the process of an attempt and, in a batch of jobs, the time of its start."""
        started = {} if at is None else {"started": at}
        _change_attempt(self, job_id, attempt, pid=pid, **started)

    def moved(self, job_id: str, attempt: int, cores: Sequence[int]) -> None:
        """Record other cores of an attempt that runs."""
        known = self.reader.attempt(job_id, attempt)
        changes = (*(known.changes if known else ()), (self.now(), tuple(cores)))
        _change_attempt(self, job_id, attempt, changes=changes)

    def end_attempt(
        self, job_id: str, attempt: int, outcome: str, *, pid: int = 0, error: str = ""
    ) -> None:
        """Record the end of an attempt without a result: the job will be retried."""
        _end_attempt(self, job_id, attempt, outcome, pid, error)
        self.flush()

    def interrupt(self) -> None:
        """Record that all attempts of this session that still run were interrupted."""
        _end_open_attempts(self, "interrupted", self.now())
        self.flush()

    def record(self, result: Result) -> bool:
        """Record a result; return whether it was accepted.

        A job keeps its first result. A late result is refused: of an attempt that is not the
        newest or has ended, or of a job that has a result.
        """
        newest = self.file.rows(
            "SELECT attempt, outcome FROM attempts WHERE job_id = ? ORDER BY attempt DESC LIMIT 1",
            (result.job_id,),
        )
        present = self.file.rows("SELECT 1 FROM results WHERE job_id = ?", (result.job_id,))
        if present or newest != [(result.attempt, None)]:
            return False
        result = _write_result(self, result)
        outcome = {DONE: "ok", FAILED: "error"}.get(result.status, result.status)
        _end_attempt(self, result.job_id, result.attempt, outcome, result.pid, result.error)
        self._ended.append(result)
        self.flush()
        return True

    def leave_out(self, job_id: str, reason: str) -> Result:
        """Record that a job is not used, whatever it has returned; return that result."""
        ((number,),) = self.file.rows(
            "SELECT COALESCE(MAX(attempt), 0) FROM attempts WHERE job_id = ?", (job_id,)
        )
        self.file.begin()
        self.file.execute("DELETE FROM outputs WHERE job_id = ?", (job_id,))
        result = Result(job_id, number, CANCELLED, error=reason)
        _write_result(self, result)
        self._ended.append(result)
        self.flush()
        return result

    def take_over(self, part: RunReader) -> tuple[float, float]:
        """Record what another folder holds of the jobs of this run that have no result yet.

        Returns how many seconds that took there, and how many of them count as the packed run's.
        """
        known, ended = self.reader.finished(), part.results()
        new = {name: result for name, result in ended.items() if name not in known}
        attempts = [item for item in part.attempts() if item.job_id in new]
        if not attempts:
            return 0.0, 0.0
        # What ended before an earlier merge counts there.
        begin = attempts[0].started if len(new) < len(ended) else 0.0
        later, sessions = self._offset - begin, part.sessions()
        for job in part.plan.jobs:
            if job.id in new:
                upkeep.take_files(job_folder(part.root, job), job_folder(self.root, job))
        for item in attempts:
            changes = tuple((at + later, cores) for at, cores in item.changes)
            moved = replace(item, session=self._session, changes=changes, node=part.root.name)
            end = None if item.ended is None else item.ended + later
            _write_attempt(self, replace(moved, started=item.started + later, ended=end))
        for result in new.values():
            started, end = result.started + later, result.ended + later
            shifted = replace(result, started=started, ended=end)
            self._ended.append(_write_result(self, shifted))
            for ref in part.checkpoints(result.job_id):
                self.file.write("checkpoints", *astuple(ref))
        for name, epoch in part.epochs():
            if name in new:
                self.epoch(name, new[name].attempt, epoch)
        said = {(event.job_id, event.text) for event in self.reader.events()}
        for event in part.events():
            if event.job_id in {None, *new} and (event.job_id, event.text) not in said:
                self.event(event.kind, event.text, event.job_id)
        seconds = sessions[-1].end - begin
        return seconds, min(seconds, math.fsum(item.packed_seconds for item in sessions))

    def checkpoint(self, ref: CheckpointRef) -> list[str]:
        """Record a checkpoint; return older files of the same job, all but the two newest."""
        self.file.write("checkpoints", *astuple(ref))
        old = [item.file for item in self.reader.checkpoints(ref.job_id)[2:]]
        for file in old:
            _forget_checkpoint(self, ref.job_id, file)
        self.flush()
        return old

    def epoch(self, job_id: str, attempt: int, item: Epoch) -> None:
        """Record an epoch of a running job."""
        self.file.write("epochs", job_id, item.number, attempt, encoded(item))

    def event(self, kind: str, text: str, job_id: str | None = None) -> None:
        """Record an event: a fallback, a retry, a decision."""
        ((number,),) = self.file.rows("SELECT COALESCE(MAX(seq), 0) + 1 FROM events")
        self.file.write("events", number, self.now(), kind, job_id, text)

    def sample(self, phase: str, used: float, own: float, cores: Sequence[float]) -> None:
        """Record the CPU use now."""
        sample = Sample(self.now(), phase, used, own, tuple(round(value, 3) for value in cores))
        self.file.write("samples", sample.at, encoded(sample))

    def set_software(self, software: Mapping[str, str]) -> None:
        """Record what this session trains with, before its first attempt."""
        self.session_software = dict(software)
        self.file.put(f"software-{self._session}", encoded(self.session_software))

    def set_waiting(self, waiting: WaitReasons | None) -> None:
        """Record what pending jobs wait for now; None at the end of the sweep."""
        if waiting is None:
            self.file.begin()
            self.file.execute("DELETE FROM meta WHERE key = 'waiting'")
        else:
            self.file.put("waiting", encoded(waiting))

    def set_interim(self, interim: Interim) -> None:
        """Record the interim results; they are durable with the next commit."""
        self.file.put("interim", encoded(interim))

    def set_baseline(self, baseline: Baseline) -> None:
        """Record the serial baseline, durable on return."""
        self.file.put("baseline", encoded(baseline))
        self.flush()

    def packing(self, already: float | None) -> None:
        """Start counting time as the packed run's, with `already` seconds passed; None: stop."""
        if already is None:
            self.flush()
        self._packed_since = None if already is None else self.now() - already

    def last(self, seconds: float, packed: float) -> None:
        """Let this session last at least so long, with so many seconds as the packed run's."""
        self._clock = min(self._clock, time.monotonic() - seconds)
        self.packing(packed)
        self.packing(None)

    @contextmanager
    def together(self, *, at_once: bool = True) -> Iterator[None]:
        """Make what is recorded inside durable by one commit: at the end, or with the next one.

        A commit costs two or three milliseconds, whatever is in it. Acknowledge nothing recorded
        inside before the commit.
        """
        self._is_grouped = True
        try:
            yield
        finally:
            self._is_grouped = False
        if at_once and self._is_wanted:
            self.flush()

    def flush(self) -> None:
        """Commit what is buffered; inside `together`, ask for a commit at its end."""
        self.file.begin()
        if self._is_grouped:
            self._is_wanted = True
            return
        self._is_wanted = False
        if self._session:
            _write_session(self)
        self.file.commit()
        _write_summaries(self)


def _lengthen(store: RunStore, before: Plan, plan: Plan, steady: Collection[str]) -> str:
    """Take back the results that more epochs change, and the checkpoints that they do not allow."""
    ended, file, counts = store.reader.finished(), store.file, Counter[str]()
    trained = dict(file.rows("SELECT job_id, MAX(number) FROM epochs GROUP BY job_id"))
    for job in before.jobs:
        is_early = trained.get(job.id, 0) < before.params.epochs
        if is_early and job.candidate in steady and ended.get(job.id) in (DONE, DIVERGED):
            counts["ended early and kept"] += 1
            continue
        # The last checkpoint has no state of the optimizer: no step follows it.
        least = before.params.epochs if job.candidate in steady else 0
        file.execute("DELETE FROM checkpoints WHERE job_id = ? AND epoch >= ?", (job.id, least))
        for table in ("results", "outputs"):
            file.execute(f"DELETE FROM {table} WHERE job_id = ?", (job.id,))
        where = "job_id = ? AND outcome IN ('ok', 'diverged')"
        for row in file.rows(f"SELECT job_id, attempt FROM attempts WHERE {where}", (job.id,)):
            _change_attempt(store, *row, outcome="interrupted")
        if job.id in trained:
            is_kept = store.reader.checkpoints(job.id)
            counts["continued from a checkpoint" if is_kept else "trained anew"] += 1
    jobs = ", ".join(f"{count} {text}" for text, count in counts.items()) or "none was trained"
    return f"epochs: {before.params.epochs} there, {plan.params.epochs} here; jobs: {jobs}"


def _refuse_torn_groups(reader: RunReader, plan: Plan, view: Plan) -> None:
    """Refuse a view with jobs to train whose fusion group reaches beyond it."""
    ended, names = reader.finished(), {job.id for job in view.jobs}
    for group in plan.groups:
        left = [name for name in group if ended.get(name, FAILED) == FAILED]
        others = sorted({job.candidate for job in plan.jobs if job.id in {*group} - names})
        if others and names.intersection(left):
            raise InputError.one(
                "jobs without a result must be trained with the others of their fusion group",
                f"{left[0]}, in a group with jobs of {', '.join(others)}",
                "Pass these candidates, too, or all of the run.",
            )


def log_line(root: Path, kind: str, text: str) -> None:
    """Add an event to a run after its last session; `RunHeldError` if another has begun."""
    with RunStore.hold(root) as store:
        store._offset = max((item.end for item in store.reader.sessions()), default=0.0)
        store.event(kind, text)
        store.flush()


def _end_attempt(
    store: RunStore, job_id: str, attempt: int, outcome: str, pid: int, error: str
) -> None:
    end = {"ended": store.now(), "outcome": outcome, "pid": pid, "error": error}
    _change_attempt(store, job_id, attempt, **end)


def _end_open_attempts(store: RunStore, outcome: str, ended: float | None) -> None:
    for row in store.file.rows("SELECT job_id, attempt FROM attempts WHERE outcome IS NULL"):
        _change_attempt(store, *row, outcome=outcome, ended=ended)


def _change_attempt(store: RunStore, job_id: str, attempt: int, **changes: Any) -> None:
    known = store.reader.attempt(job_id, attempt)
    if known is not None:
        _write_attempt(store, replace(known, **changes))


def _write_attempt(store: RunStore, attempt: Attempt) -> None:
    row = attempt.job_id, attempt.attempt, attempt.session, attempt.outcome, encoded(attempt)
    store.file.write("attempts", *row)


def _write_result(store: RunStore, result: Result) -> Result:
    """Write a result and its outputs; return it as it will be read."""
    attempt = store.reader.attempt(result.job_id, result.attempt)
    if attempt is not None:
        result = replace(result, node=attempt.node)
    if result.outputs is not None:
        import numpy as np

        outputs = np.ascontiguousarray(result.outputs, np.float32)
        result = replace(result, outputs=outputs)
        shape, data = encoded(outputs.shape), outputs.tobytes()
        store.file.write("outputs", result.job_id, shape, data)
    _write_record(store, result)
    return result


def _write_record(store: RunStore, result: Result) -> None:
    record = encoded(replace(result, outputs=None))
    row = result.job_id, result.attempt, result.status, result.digest, record
    store.file.write("results", *row)


def _write_session(store: RunStore) -> None:
    seconds = store.now() - store._offset
    if store._packed_since is not None:
        store._packed = store.now() - store._packed_since
    place = os.getpid(), socket.gethostname(), store._started
    times = store._offset, seconds, store._packed
    store.file.write("sessions", store._session, *place, *times)


def _forget_checkpoint(store: RunStore, job_id: str, file: str) -> None:
    store.file.execute("DELETE FROM checkpoints WHERE job_id = ? AND file = ?", (job_id, file))


def _set_aside_damage(store: RunStore) -> None:
    """Forget checkpoints of unfinished jobs that are not what was recorded."""
    finished = store.reader.finished()
    for job in store.reader.plan.jobs:
        refs = [] if job.id in finished else store.reader.checkpoints(job.id)
        for ref, reason in upkeep.damaged(store.root, job, refs):
            store.event("damage", f"checkpoint {ref.file} is not used: {reason}", job.id)
            _forget_checkpoint(store, job.id, ref.file)


def _write_summaries(store: RunStore) -> None:
    """Write the summaries of results that are durable now."""
    while store._ended:
        result = store._ended.pop(0)
        job = store._jobs.get(result.job_id)
        kept = "SELECT 1 FROM results WHERE job_id = ? AND attempt = ?"
        # A transaction that was rolled back took its results along.
        if job and store.file.rows(kept, (result.job_id, result.attempt)):
            upkeep.write_summary(store.root, job, result)


def _remove_leftovers(store: RunStore) -> None:
    """Remove temporary files, and checkpoints and summaries that no committed row stands for."""
    named = {job_id: [SUMMARY] for job_id in store.reader.finished()}
    for job_id, file in store.file.rows("SELECT job_id, file FROM checkpoints"):
        named.setdefault(job_id, []).append(file)
    upkeep.clear_up(store.root, store.reader.plan.jobs, named)
