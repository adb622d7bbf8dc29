"""The loop of a sweep: place, submit, wait for the first news, record, repeat.

::

    pending ── place(pending, running, load) ──► submit ──► future
       ▲                                                      │
       └─ waiting ◄── decide(history) ◄── inbox ◄─────────────┴── news: progress, checkpoints
          a pause        set back           │
                                            └──► result: scored, recorded, then told

No barrier: one queue for the whole sweep, and every core that becomes idle gets the next job.
Resume is the first line: pending is what has no result in the store.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Protocol

from asynckfold.engines.engine import Answer, Engine
from asynckfold.errors import (
    InterruptedRunError,
    StorageError,
    UnpackError,
    WorkerDiedError,
)
from asynckfold.jobs.messages import (
    CheckpointWritten,
    EpochEnded,
    JobEnded,
    Left,
    Noted,
    RetryableFailure,
    RunEvent,
    Started,
    Task,
)
from asynckfold.jobs.placement import Load, Placement, Request, Wait, fused
from asynckfold.jobs.result import FAILED, Result, job_by_id
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.preemption import reassign_cores
from asynckfold.scheduling.retries import decide
from asynckfold.scheduling.wait_reasons import Obstacle, Waits
from asynckfold.store import Placed, RunStore, Waiting
from asynckfold.sweep.running import Running, RunningJobs
from asynckfold.sweep.single_task import TICK_SECONDS, Patience, Sampler
from asynckfold.system.files import remove
from asynckfold.system.signals import Interruption
from asynckfold.system.units import gibibytes

FIRST_WAITS = (0.025,) * 8
"""Seconds between the first looks at the load. What is idle is known some tenths of a second after
the call, which short plans take less than: until then one job runs alone."""

FLUSH_SECONDS = 1.0
"""Longest time that progress stays only in memory."""

GRACE_SECONDS = 10.0
"""What an interrupted job gets to reach its next batch and save itself."""

Inbox = queue.SimpleQueue["RunEvent | Future[Answer]"]
Finish = Callable[[Result], Result]


class Watch(Protocol):
    """Who is told what happens: a display, or a test."""

    def placed(self, placement: Placement) -> None:
        """A placement starts."""
        ...

    def heard(self, news: RunEvent) -> None:
        """A worker said something."""
        ...

    def ended(self, result: Result) -> None:
        """A result is durable."""
        ...

    def ticked(self, load: Load) -> None:
        """The load was looked at."""
        ...


@dataclass(frozen=True)
class _Pause:
    """Between two attempts of a job: since when, until when, and why."""

    since: float
    due: float
    text: str


class Sweep:
    """One pass over the pending jobs of a run.

    Parameters
    ----------
    store : RunStore
        Held for writing, with its plan.
    engine : Engine
        Executes.
    inbox : queue
        Where the engine's news arrive.
    requests : Mapping of str to Request
        By job id.
    finish : callable
        Completes a done result: scores it.
    watch : Watch
        Is told.
    clock : callable
        Seconds that never jump.
    signals : Interruption, optional
        Looked at between two steps.
    max_wait : float or None
        Seconds for which nothing may be able to start while nothing runs; None: any.
    yields : bool
        Whether running jobs make room where others come to their cores.
    """

    def __init__(
        self,
        store: RunStore,
        engine: Engine,
        inbox: Inbox,
        requests: Mapping[str, Request],
        finish: Finish,
        watch: Watch,
        clock: Callable[[], float] = time.monotonic,
        signals: Interruption | None = None,
        max_wait: float | None = None,
        yields: bool = False,
    ) -> None:
        self._yields = yields
        self._patience = Patience(max_wait)
        self._store = store
        self._engine = engine
        self._inbox = inbox
        self._finish = finish
        self._watch = watch
        self._signals = signals or Interruption()
        self._clock = clock
        self._jobs = job_by_id(store.plan)
        finished = store.finished()
        self._requests = dict(requests)
        self._groups = {name: group for group in store.plan.groups for name in group}
        self._left = {name: None for name in self._jobs if name not in finished}
        self._backlog = Backlog()
        self._running = RunningJobs(store.note_cores)
        self._reservations = self._running.reservations
        self._waits = Waits()
        self._waiting = Waiting((), (), (), {})
        self._pauses: dict[str, _Pause] = {}
        self._history: dict[str, list[str]] = {}
        self._recorded: list[Result] = []
        self._outdated: list[str] = []
        self._sampler = Sampler(store, "packed")
        self._flushed = clock()
        self._told_shortage = False
        self._leaving = False
        for unit in dict.fromkeys(map(self._unit, self._left)):
            self._add(unit)

    def run(self) -> None:
        """Work until every job has a result.

        Raises
        ------
        StorageError
            The disk refused; the run can be continued.
        NoRoomError
            Not one job could start for too long; the run can be continued.
        InterruptedRunError
            After the running jobs saved themselves.
        """
        try:
            waits = chain(FIRST_WAITS, repeat(TICK_SECONDS))
            while self.unfinished:
                self._signals.check()
                self.step(next(waits))
            self._store.note_waiting(None)
            self._flush()
        except BaseException as error:
            # Ctrl-C, a full disk: whatever it is, running jobs save themselves first.
            if is_stray(error):
                self._store.forget()
                self._recorded, self._outdated = [], []
            self.leave()
            raise

    @property
    def unfinished(self) -> bool:
        """Whether there are jobs without a result."""
        return bool(self._backlog or self._pauses or self._running)

    def step(self, wait_s: float) -> None:
        """Start what can start, then take the news that come within `wait_s` seconds."""
        self._end_pauses()
        with self._store.together():
            starts = [self._attempt(placement) for placement in self._placements()]
        self._acknowledge()
        for placement, tasks in starts:
            self._submit(placement, tasks)
        due = min((pause.due for pause in self._pauses.values()), default=math.inf)
        self._hear(max(0.0, min(wait_s, due - self._clock())))

    def leave(self) -> None:
        """End early: let running jobs save themselves, and note how far they came."""
        self._leaving = True
        with contextlib.suppress(StorageError):
            self._flush()
        self._engine.close(GRACE_SECONDS)
        for item in self._arrived():
            # What one of them cannot store must not keep the others from it.
            with contextlib.suppress(StorageError):
                if not isinstance(item, Future) or item in self._running:
                    self._take(item)
        with contextlib.suppress(StorageError):
            self._store.note_waiting(None)
            self._store.interrupt()
            self._acknowledge()

    def _end_pauses(self) -> None:
        now = self._clock()
        for unit in [unit for unit, pause in self._pauses.items() if pause.due <= now]:
            pause = self._pauses.pop(unit)
            self._add(unit, Wait(now - pause.since, "pause", pause.text))

    def _unit(self, job_id: str) -> str:
        """Name what is placed as one: a group by its first job."""
        return self._groups.get(job_id, (job_id,))[0]

    def _units(self, placement: Placement) -> list[str]:
        """Name the units of a placement: several for a row."""
        return list(dict.fromkeys(map(self._unit, placement.jobs)))

    def _left_of(self, unit: str) -> tuple[str, ...]:
        """Return the jobs of a unit that have no result yet."""
        return tuple(name for name in self._groups.get(unit, (unit,)) if name in self._left)

    def _request(self, unit: str) -> Request:
        """Ask a place for a job, or for those of a group that have no result yet."""
        if unit not in self._groups:
            return self._requests[unit]
        return fused([self._requests[name] for name in self._groups[unit]], self._left_of(unit))

    def _add(self, unit: str, *before: Wait) -> None:
        """Let a unit be pending; `before` is what it waited for until now."""
        request = self._request(unit)
        self._backlog.add(request)
        self._waits.arrive(request, self._clock(), before)

    def _placements(self) -> list[Placement]:
        load = self._engine.load([item.placement for item in self._running])
        self._sampler.look(load)
        self._watch.ticked(load)
        if self._yields:
            self._make_room(load)
        placed = place(self._backlog, self._reservations, load)
        stuck = bool(self._backlog) and not (placed or self._running)
        if self._patience.look(self._clock(), _obstacle(load) if stuck else ""):
            self._take(Noted(None, "waiting", f"nothing can start: {_obstacle(load)}"))
        taken = [self._backlog.remove(self._unit(placement.jobs[0])) for placement in placed]
        placed = [
            self._backlog.extend(request, placement, len(load.cores))
            for request, placement in zip(taken, placed, strict=True)
        ]
        for placement in placed:
            self._reservations.add(placement)
        self._look(load, placed)
        return placed

    def _look(self, load: Load, placed: Sequence[Placement]) -> None:
        """Note what the jobs that are left wait for, where that has changed."""
        obstacles = self._waits.look(self._backlog, self._reservations, load, self._clock())
        jobs = {reason.text: count for reason, count in obstacles.items()}
        for unit, pause in self._pauses.items():
            jobs[pause.text] = jobs.get(pause.text, 0) + len(self._left_of(unit))
        neighbours = tuple(core for core in load.cores if core not in load.idle)
        gpus = tuple(gpu.index for gpu in load.gpus)
        waiting = Waiting(load.cores, neighbours, gpus, jobs)
        if waiting != self._waiting:
            self._waiting = waiting
            self._store.note_waiting(waiting)
        if placed:
            self._told_shortage = False
        elif self._running and not self._told_shortage:
            self._tell_shortage(obstacles)

    def _make_room(self, load: Load) -> None:
        """Move, pause and continue running jobs as the load asks for."""
        movable = {future: item.held for future, item in self._running.items() if item.can_move}
        fixed = [
            core for item in self._running if not item.can_move for core in item.placement.cores
        ]
        for future, cores in reassign_cores(movable, load, fixed).items():
            item = self._running[future]
            self._engine.shift(future, cores)
            self._take(Noted(item.placement.jobs[0], *_told(item, cores)))
            changed = self._running.moved_to(item, cores or item.placement.cores)
            self._running[future] = replace(changed, paused=not cores)

    def _tell_shortage(self, obstacles: Iterable[Obstacle]) -> None:
        """Say it, once, where jobs wait for nothing but memory."""
        texts = [reason.text for reason in obstacles if reason.kind == "memory"]
        if texts:
            self._told_shortage = True
            self._take(Noted(None, "memory", f"jobs wait for {texts[0]}"))

    def _attempt(self, placement: Placement) -> tuple[Placement, list[Task]]:
        """Number the attempts: durable before a worker hears of them."""
        tasks, now = [], self._clock()
        placed = {
            unit: Placed(placement.memory, self._waits.start(unit, now))
            for unit in self._units(placement)
        }
        for name in placement.jobs:
            unit = self._unit(name)
            expected = self._request(unit).seconds
            number = self._store.start_attempt(
                name, placement.cores, placement.threads, _device(placement), expected
            )
            self._store.note_placed(name, number, placed[unit])
            tasks.append(Task(self._jobs[name], number, tuple(self._store.checkpoints(name))))
        return placement, tasks

    def _submit(self, placement: Placement, tasks: list[Task]) -> None:
        self._watch.placed(placement)
        started = self._store.now()
        future = self._engine.submit(placement, tasks)
        self._running.add(future, Running(placement, tasks, started))
        future.add_done_callback(self._inbox.put)

    def _hear(self, wait_s: float) -> None:
        """Take what comes until a place is free, or the time is over; durable with the next commit.

        Most news (a start, an epoch, a checkpoint) make nothing possible that was not before, so
        that the load, which costs more to look at than they, need not be looked at for them.
        """
        deadline = self._clock() + wait_s
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=wait_s)
            freed = False
            while True:
                with self._store.together(at_once=False):
                    # One after another: what follows one that raises stays in the inbox.
                    for news in chain([item], self._arrived()):
                        self._take(news)
                        freed = freed or isinstance(news, Future)
                left = deadline - self._clock()
                if left <= 0 or freed:
                    break
                item = self._inbox.get(timeout=left)
        if self._clock() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def _arrived(self) -> Iterator[RunEvent | Future[Answer]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._inbox.get_nowait()

    def _flush(self) -> None:
        self._store.flush()
        self._flushed = self._clock()
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Tell what is durable by now, and remove what nobody needs any more."""
        if self._leaving:
            # A commit that the disk refused has taken back what was noted since the one before.
            kept = self._store.finished()
            self._recorded = [item for item in self._recorded if item.job_id in kept]
            self._outdated = []
        while self._recorded:
            self._watch.ended(self._recorded.pop(0))
        while self._outdated:
            remove(self._store.root / self._outdated.pop())

    def _take(self, item: RunEvent | Future[Answer]) -> None:
        if isinstance(item, Future):
            self._end(item)
            return
        if isinstance(item, Started):
            self._note_begun(item)
        elif isinstance(item, EpochEnded):
            self._store.epoch(item.job_id, item.attempt, item.epoch)
        elif isinstance(item, CheckpointWritten):
            self._outdated += self._store.checkpoint(item.ref)
        elif isinstance(item, JobEnded):
            self._end_early(item.result)
        elif isinstance(item, Noted):
            self._store.event(item.kind, item.text, item.job_id)
        elif isinstance(item, Left):
            self._note_left(item)
        self._watch.heard(item)

    def _note_left(self, item: Left) -> None:
        """Say what a job did to its process, and whether others feel it."""
        names = ", ".join(item.names)
        then = "its worker was replaced, so that no other job is affected"
        if item.goes_on:
            then = "further jobs are trained in this process"
        if item.goes_on and item.numbers:
            self._store.note_left(f"{names} ({item.job_id or 'the dry run'})")
            then += ": bit-identity is no longer claimed"
        text = f"left changed in its process: {names}; {then}"
        self._take(Noted(item.job_id, "isolation", text))

    def _note_begun(self, item: Started) -> None:
        at = None
        if found := self._running.holding(item.job_id):
            _, start = found
            start.begun.add(item.job_id)
            at = start.at if start.placement.is_row else None
        self._store.started(item.job_id, item.attempt, item.pid, at)

    def _end(self, future: Future[Answer]) -> None:
        start = self._running.pop(future)
        error = future.exception()
        if error is None:
            answer = future.result()
            for task, found in zip(start.tasks, answer.results, strict=True):
                if task.job.id not in start.ended:
                    self._take_result(task, found, start, answer)
            self._add_again(start.placement)
            return
        for task in (task for task in start.tasks if task.job.id not in start.ended):
            if isinstance(error, WorkerDiedError):
                if start.begun and task.job.id not in start.begun:
                    # Of a row, only the job in hand has to do with it.
                    self._store.end_attempt(task.job.id, task.attempt, "interrupted")
                    continue
                result = _failed(task, str(error), str(error))
                self._set_back(task, error.outcome, result, start, error.pid, error.peak_memory)
            elif isinstance(error, UnpackError):
                self._record(_failed(task, error.line, error.trace), start, 0, 0)
            else:
                with contextlib.suppress(StorageError):
                    self._store.end_attempt(task.job.id, task.attempt, "io", error=str(error))
        if not isinstance(error, (WorkerDiedError, UnpackError)):
            raise error
        self._add_again(start.placement)

    def _add_again(self, placement: Placement) -> None:
        """Let what has no result be pending, unless it pauses first.

        Nothing of it failed: the worker was stopped by somebody else's SIGTERM, or did not come to
        all jobs of a row.
        """
        for unit in self._units(placement):
            if self._left_of(unit) and not (unit in self._pauses or self._leaving):
                self._add(unit)

    def _end_early(self, result: Result) -> None:
        """Record what one of several jobs of a placement came to; the others go on."""
        if found := self._running.holding(result.job_id):
            future, start = found
            self._record(result, start, result.pid, result.peak_memory)
            start.ended.add(result.job_id)
            if start.placement.is_row:
                self._running[future] = replace(start, at=self._store.now())

    def _take_result(self, task: Task, found: Any, start: Running, answer: Answer) -> None:
        if found is None:
            pid = answer.pid if not start.begun or task.job.id in start.begun else 0
            self._store.end_attempt(task.job.id, task.attempt, "interrupted", pid=pid)
        elif isinstance(found, RetryableFailure):
            self._set_back(task, found.outcome, found.result, start, answer.pid, answer.peak_memory)
        else:
            self._record(found, start, answer.pid, answer.peak_memory)

    def _record(self, result: Result, start: Running, pid: int, peak: int) -> None:
        complete = replace(
            self._finish(result),
            pid=pid,
            peak_memory=peak,
            cores=start.placement.cores,
            threads=start.placement.threads,
            device=_device(start.placement),
            started=start.at,
            ended=self._store.now(),
        )
        self._left.pop(result.job_id, None)
        if self._store.record(complete):
            self._recorded.append(complete)

    def _set_back(
        self, task: Task, outcome: str, result: Result, start: Running, pid: int, peak: int
    ) -> None:
        """Try again, or record `result`, as `decide` says."""
        name, number = task.job.id, task.attempt
        if self._leaving:
            # It may be our own kill of a worker that did not stop in time: no verdict on the job.
            self._store.end_attempt(name, number, "interrupted", pid=pid, error=result.error)
            return
        history = self._history.setdefault(name, [])
        retry = decide(history, outcome)
        history.append(outcome)
        told = f"attempt {number}: {result.error}"
        if retry is not None:
            self._store.end_attempt(name, number, outcome, pid=pid, error=result.error)
            self._requests[name] = replace(self._requests[name], alone=retry.alone)
            now, unit = self._clock(), self._unit(name)
            text = f"its pause after attempt {number} ({outcome})"
            self._pauses[unit] = _Pause(now, now + retry.after_s, text)
            when = "alone on the machine" if retry.alone else f"in {retry.after_s:g} s"
            kind = "oom_retry" if outcome == "oom" else outcome
            self._take(Noted(name, kind, f"{told}; tried again {when}"))
            return
        self._store.event(outcome, told, name)
        account = f"{len(history)} attempts: {', '.join(history)}"
        if outcome == "oom":
            account += f"; peak memory {gibibytes(peak)}, the last time alone on the machine"
        # A worker that died does not tell how long it trained.
        together = len(self._groups.get(name, (name,)))
        seconds = result.fit_seconds or self._store.seconds_of(name, self._store.now()) / together
        result = replace(result, fit_seconds=seconds, error=f"{result.error} ({account})")
        self._record(result, start, pid, peak)


def _obstacle(load: Load) -> str:
    return load.blocked or "no GPU that this run may use can be seen"


def _told(start: Running, cores: Sequence[int]) -> tuple[str, str]:
    """What becomes of a job because of others: the kind of event, and a sentence."""
    before = ", ".join(map(str, start.placement.cores))
    if not cores:
        return "paused", f"paused between two batches: others use its cores ({before})"
    where = ", ".join(map(str, cores))
    if start.paused:
        return "resumed", f"goes on after its pause, on cores {where}"
    return "moved", f"moved from cores {before} to {where}: others use the former"


def _failed(task: Task, line: str, trace: str) -> Result:
    return Result(task.job.id, task.attempt, FAILED, error=line, traceback=trace)


def _device(placement: Placement) -> str:
    return "cpu" if placement.gpu is None else f"cuda:{placement.gpu}"


def is_stray(error: BaseException) -> bool:
    """Whether a signal raised this anywhere: a host's handler, in the middle of a row perhaps."""
    return isinstance(error, KeyboardInterrupt) and not isinstance(error, InterruptedRunError)
