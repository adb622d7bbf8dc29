"""Attempts, from their numbers to their outcomes, and the placements that run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from asynckfold.engines.engine import Answer
from asynckfold.errors import StorageError, UnpackError, WorkerDiedError
from asynckfold.jobs.messages import GpuShare, JobStart, Note, RetryableFailure, RunEvent, Task
from asynckfold.jobs.placement import FULL_SHARE, Load, Placement
from asynckfold.jobs.result import CANCELLED, FAILED, Result, job_by_id
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.scheduling.reservations import Reservations
from asynckfold.store import RunStore
from asynckfold.sweep.pending import PendingJobs
from asynckfold.system.files import remove
from asynckfold.system.units import gibibytes

if TYPE_CHECKING:
    from asynckfold.scheduling.preemption import HeldCores
    from asynckfold.sweep.race import Race

Finish = Callable[[Result], Result]


class SweepObserver(Protocol):
    """Follows a sweep: a display, or a test."""

    def placed(self, placement: Placement) -> None:
        """A placement starts."""

    def heard(self, event: RunEvent) -> None:
        """A worker or the sweep reported an event."""

    def ended(self, result: Result) -> None:
        """A result is durable."""

    def ticked(self, load: Load) -> None:
        """The load was read."""


@dataclass(eq=False)
class RunningPlacement:
    """A running placement.

    Parameters
    ----------
    placement : Placement
        Where it runs now.
    tasks : list of Task
        One for each of its jobs.
    started : float
        Run seconds at its start; in a batch of short jobs, at the start of the present one.
    ended, begun : set of str
        Jobs that have a result, and jobs that a worker has started.
    paused : bool
        Whether it pauses because other processes use its cores.
    """

    placement: Placement
    tasks: list[Task]
    started: float
    ended: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    paused: bool = False

    @property
    def held(self) -> HeldCores:
        """Its cores, for `reassign_cores`."""
        from asynckfold.scheduling.preemption import HeldCores

        return HeldCores(self.placement.cores, self.paused, self.placement.node)

    @property
    def can_move(self) -> bool:
        """Whether its worker can be pinned to other cores.

        Only after `Started`: the worker sets its affinity before it sends that.
        """
        single = self.placement.trainer not in SEVERAL
        return bool(self.begun and self.placement.cores) and single


class RunningJobs:
    """The running placements by their futures, and their reservations.

    `note_cores` records that an attempt (job id, number) moved to other cores.
    """

    def __init__(self, note_cores: Callable[[str, int, tuple[int, ...]], None]) -> None:
        self._note_cores = note_cores
        self._running: dict[Future[Answer], RunningPlacement] = {}
        self.submitted: RunningPlacement | None = None
        """The one that is being submitted; an engine may run it meanwhile."""
        self.reservations = Reservations()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, future: object) -> bool:
        return future in self._running

    def items(self) -> list[tuple[Future[Answer], RunningPlacement]]:
        """Return the running placements with their futures, the oldest first."""
        return list(self._running.items())

    def placements(self) -> list[Placement]:
        """Return the running placements, the oldest first."""
        return [item.placement for item in self._running.values()]

    def add(self, future: Future[Answer], running: RunningPlacement) -> None:
        """Register a running placement; its cores are already reserved."""
        self._running[future] = running

    def pop(self, future: Future[Answer]) -> RunningPlacement:
        """Remove a placement and free its reservation."""
        running = self._running.pop(future)
        self.reservations.remove(running.placement)
        return running

    def holding(self, job_id: str) -> RunningPlacement | None:
        """Return the running placement of a job, if there is one."""
        items = [*self._running.values(), *filter(None, [self.submitted])]
        return next((item for item in items if job_id in item.placement.jobs), None)

    def move(self, running: RunningPlacement, cores: tuple[int, ...]) -> None:
        """Let a placement go on with these cores; without any, it pauses and keeps those it has."""
        running.paused = not cores
        if not cores or cores == running.placement.cores:
            return
        self._change(running, cores=cores)
        for task in running.tasks:
            self._note_cores(task.job.id, task.attempt, cores)

    def learn_gpu_share(self, job_ids: Collection[str], share: float) -> None:
        """Expect a share of a GPU's time from those of some jobs that run beside others."""
        for running in self._running.values():
            is_shared = running.placement.gpu_share < FULL_SHARE
            if is_shared and running.placement.jobs[0] in job_ids:
                self._change(running, gpu_share=share)

    def _change(self, running: RunningPlacement, **changes: Any) -> None:
        self.reservations.remove(running.placement)
        running.placement = replace(running.placement, **changes)
        self.reservations.add(running.placement)


class Attempts:
    """Records the attempts of a sweep and decides on retries."""

    def __init__(
        self,
        store: RunStore,
        pending: PendingJobs,
        running: RunningJobs,
        finish: Finish,
        observer: SweepObserver,
        race: Race | None,
    ) -> None:
        self._race = race
        self._store = store
        self._pending = pending
        self._running = running
        self._finish = finish
        self._observer = observer
        self._jobs = job_by_id(store.reader.plan)
        self._history: dict[str, list[str]] = {}
        self._recorded: list[Result] = []
        self._outdated: list[str] = []
        self._leaving = False
        if race is not None:
            for name, (status, scores) in store.reader.scores().items():
                race.take(name, status, scores)
            with store.together():
                self._leave_out()
            self.acknowledge()

    def start(self, placement: Placement) -> list[Task]:
        """Number the attempts of a placement; durable before a worker hears of them."""
        tasks, waits = [], self._pending.waits_of(placement)
        for name in placement.jobs:
            number = self._store.start_attempt(
                name,
                placement.cores,
                placement.threads,
                _device(placement),
                self._pending.expected_seconds(name),
                placement.memory,
                waits[name],
                placement.node,
            )
            checkpoints = tuple(self._store.reader.checkpoints(name))
            measures = placement.gpu is not None and self._pending.measures_gpu(name)
            tasks.append(Task(self._jobs[name], number, checkpoints, measures))
        return tasks

    def note_begun(self, event: JobStart) -> None:
        """Record that a worker has started a job."""
        at = None
        if item := self._running.holding(event.job_id):
            item.begun.add(event.job_id)
            at = item.started if item.placement.is_job_batch else None
        self._store.started(event.job_id, event.attempt, event.pid, at)

    def learn_gpu_share(self, event: GpuShare) -> None:
        """Let jobs share a GPU by what one has measured, the first of its model."""
        if job_ids := self._pending.learn_gpu(event.job_id, event.share):
            self._running.learn_gpu_share(job_ids, event.share)
            text = f"its steps keep a GPU busy for {event.share:.1%} of their time"
            self._store.event("gpu_share", text, event.job_id)

    def note(self, event: Note) -> None:
        """Record an event and pass it on."""
        self._store.event(event.kind, event.text, event.job_id)
        self._observer.heard(event)

    def outdate(self, checkpoints: Sequence[str]) -> None:
        """Remove checkpoints once their successors are durable."""
        self._outdated += checkpoints

    def end(self, future: Future[Answer]) -> None:
        """Record the outcome of a placement; raise if it concerns the whole sweep."""
        item = self._running.pop(future)
        error = future.exception()
        if error is None:
            answer = future.result()
            for task, outcome in zip(item.tasks, answer.results, strict=True):
                if task.job.id not in item.ended:
                    self._take_result(task, outcome, item, answer)
        left = [task for task in item.tasks if task.job.id not in item.ended]
        for task in left if error is not None else ():
            if isinstance(error, WorkerDiedError):
                if item.begun and task.job.id not in item.begun:
                    # In a batch of short jobs, only the job in progress is responsible.
                    self._store.end_attempt(task.job.id, task.attempt, "interrupted")
                    continue
                result = _failed(task, str(error), str(error))
                self._retry_or_fail(task, error.outcome, result, item, error.pid, error.peak_memory)
            elif isinstance(error, UnpackError):
                self._record(_failed(task, error.line, error.trace), item, 0, 0)
            else:
                with contextlib.suppress(StorageError):
                    self._store.end_attempt(task.job.id, task.attempt, "io", error=str(error))
        if error is not None and not isinstance(error, (WorkerDiedError, UnpackError)):
            raise error
        # A foreign SIGTERM stopped the worker, or it did not reach all jobs of a batch.
        if not self._leaving:
            self._pending.add_again(item.placement)

    def end_early(self, result: Result) -> None:
        """Record the result of one job while others of its placement go on."""
        if item := self._running.holding(result.job_id):
            self._record(result, item, result.pid, result.peak_memory)
            item.ended.add(result.job_id)
            if item.placement.is_job_batch:
                item.started = self._store.now()

    def _take_result(
        self, task: Task, outcome: Any, item: RunningPlacement, answer: Answer
    ) -> None:
        if outcome is None:
            pid = answer.pid if not item.begun or task.job.id in item.begun else 0
            self._store.end_attempt(task.job.id, task.attempt, "interrupted", pid=pid)
        elif isinstance(outcome, RetryableFailure):
            self._retry_or_fail(
                task, outcome.outcome, outcome.result, item, answer.pid, answer.peak_memory
            )
        else:
            self._record(outcome, item, answer.pid, answer.peak_memory)

    def _leave_out(self) -> None:
        """Mark what cannot win, also jobs that were started ahead of the decision."""
        for name, reason in self._race.losers() if self._race else ():
            self._pending.leave_out(name)
            self._recorded.append(self._store.leave_out(name, reason))

    def _record(self, result: Result, item: RunningPlacement, pid: int, peak: int) -> None:
        if self._race and result.job_id in self._race:
            self._store.end_attempt(result.job_id, result.attempt, CANCELLED, pid=pid)
            return
        complete = replace(
            self._finish(result),
            pid=pid,
            peak_memory=peak,
            cores=item.placement.cores,
            threads=item.placement.threads,
            device=_device(item.placement),
            node=item.placement.node,
            started=item.started,
            ended=self._store.now(),
        )
        self._pending.finish(result.job_id)
        if complete.peak_gpu_memory:
            self._pending.learn_gpu(result.job_id, peak=complete.peak_gpu_memory)
        if self._store.record(complete):
            self._recorded.append(complete)
            if self._race:
                self._race.take(complete.job_id, complete.status, complete.scores)
                self._leave_out()

    def _retry_or_fail(
        self, task: Task, outcome: str, result: Result, item: RunningPlacement, pid: int, peak: int
    ) -> None:
        """Retry the job, or record `result`, as `decide` says."""
        name, number = task.job.id, task.attempt
        if self._race and name in self._race:
            self._record(result, item, pid, peak)
            return
        if self._leaving:
            # The sweep itself may have killed a worker that did not stop in time.
            self._store.end_attempt(name, number, "interrupted", pid=pid, error=result.error)
            return
        from asynckfold.scheduling.retries import decide

        history = self._history.setdefault(name, [])
        retry = decide(history, outcome)
        history.append(outcome)
        node = item.placement.node
        text = f"attempt {number}{f' on {node}' if node else ''}: {result.error}"
        if retry is not None:
            self._store.end_attempt(name, number, outcome, pid=pid, error=result.error)
            self._pending.pause(name, retry, f"its pause after attempt {number} ({outcome})")
            when = f"in {retry.after_s:g} s"
            if retry.alone or retry.alone_on_gpu:
                machine = "a node" if node else "the machine"
                when = f"alone on {machine if retry.alone else 'a GPU'}"
            kind = "oom_retry" if outcome in ("oom", "gpu_oom") else outcome
            self.note(Note(name, kind, f"{text}; retried {when}"))
            return
        self._store.event(outcome, text, name)
        account = f"{len(history)} attempts: {', '.join(history)}"
        if outcome == "oom":
            machine = "a node" if node else "the machine"
            account += f"; peak memory {gibibytes(peak)}, the last time alone on {machine}"
        if outcome == "gpu_oom":
            account += "; the last time alone on a GPU"
        # A worker that died does not report how long it trained.
        together = self._pending.group_size(name)
        seconds = result.fit_seconds or self._seconds_of(name) / together
        result = replace(result, fit_seconds=seconds, error=f"{result.error} ({account})")
        self._record(result, item, pid, peak)

    def _seconds_of(self, job_id: str) -> float:
        """Return the seconds of all attempts at a job, until now where one still runs."""
        now = self._store.now()
        return math.fsum(
            (now if item.ended is None else item.ended) - item.started
            for item in self._store.reader.attempts()
            if item.job_id == job_id
        )

    def acknowledge(self) -> None:
        """After a commit: report durable results and remove outdated checkpoints."""
        if self._leaving:
            # A refused commit has rolled back what was recorded since the one before.
            kept = self._store.reader.finished()
            self._recorded = [result for result in self._recorded if result.job_id in kept]
            self._outdated = []
        while self._recorded:
            self._observer.ended(self._recorded.pop(0))
        while self._outdated:
            remove(self._store.root / self._outdated.pop())

    def forget(self) -> None:
        """Drop what is not durable."""
        self._store.file.roll_back()
        self._recorded, self._outdated = [], []

    def leave(self) -> None:
        """From now on, dead workers are no reason for a retry."""
        self._leaving = True


def _failed(task: Task, line: str, trace: str) -> Result:
    return Result(task.job.id, task.attempt, FAILED, error=line, traceback=trace)


def _device(placement: Placement) -> str:
    return "cpu" if placement.gpu is None else f"cuda:{placement.gpu}"
