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
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asynckfold.engines.engine import Answer, Engine
from asynckfold.errors import InterruptedRunError, StorageError, UnpackError, WorkerDiedError
from asynckfold.files import remove
from asynckfold.interruption import Interruption
from asynckfold.messages import (
    CheckpointWritten,
    EpochEnded,
    JobEnded,
    News,
    Remark,
    Setback,
    Started,
    Task,
)
from asynckfold.placement import Load, Placement, Request, fused, place
from asynckfold.result import FAILED, Result, job_by_id
from asynckfold.retries import decide
from asynckfold.store import RunStore

TICK_SECONDS = 0.25
"""Longest wait before the load is looked at again."""

FLUSH_SECONDS = 1.0
"""Longest time that progress stays only in memory."""

GRACE_SECONDS = 10.0
"""What an interrupted job gets to reach its next batch and save itself."""

Inbox = queue.SimpleQueue["News | Future[Answer]"]
Finish = Callable[[Result], Result]


class Watch(Protocol):
    """Who is told what happens: a display, or a test."""

    def placed(self, placement: Placement) -> None:
        """A placement starts."""
        ...

    def heard(self, news: News) -> None:
        """A worker said something."""
        ...

    def ended(self, result: Result) -> None:
        """A result is durable."""
        ...

    def ticked(self, load: Load) -> None:
        """The load was looked at."""
        ...


@dataclass(frozen=True)
class _Start:
    """A placement that runs, its tasks, when it started in run seconds, and jobs that ended."""

    placement: Placement
    tasks: list[Task]
    at: float
    ended: set[str] = field(default_factory=set)


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
    ) -> None:
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
        self._pending = {unit: self._request(unit) for unit in map(self._unit, self._left)}
        self._waiting: dict[str, float] = {}
        self._running: dict[Future[Answer], _Start] = {}
        self._history: dict[str, list[str]] = {}
        self._recorded: list[Result] = []
        self._outdated: list[str] = []
        self._sampler = Sampler(store, "packed")
        self._flushed = clock()
        self._told_shortage = False
        self._leaving = False

    def run(self) -> None:
        """Work until every job has a result.

        Raises
        ------
        StorageError
            The disk refused; the run can be continued.
        InterruptedRunError
            After the running jobs saved themselves.
        """
        try:
            while self.unfinished:
                self._signals.check()
                self.step(TICK_SECONDS)
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
        return bool(self._pending or self._waiting or self._running)

    def step(self, wait_s: float) -> None:
        """Start what can start, then take the news that come within `wait_s` seconds."""
        self._end_pauses()
        with self._store.together():
            starts = [self._attempt(placement) for placement in self._placements()]
        self._acknowledge()
        for placement, tasks in starts:
            self._submit(placement, tasks)
        pause = min(self._waiting.values(), default=math.inf) - self._clock()
        self._hear(max(0.0, min(wait_s, pause)))

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
            self._store.interrupt()
            self._acknowledge()

    def _end_pauses(self) -> None:
        now = self._clock()
        for name in [name for name, due in self._waiting.items() if due <= now]:
            del self._waiting[name]
            self._pending[name] = self._request(name)

    def _unit(self, job_id: str) -> str:
        """Name what is placed as one: a group by its first job."""
        return self._groups.get(job_id, (job_id,))[0]

    def _request(self, unit: str) -> Request:
        """Ask a place for a job, or for those of a group that have no result yet."""
        if unit not in self._groups:
            return self._requests[unit]
        left = [name for name in self._groups[unit] if name in self._left]
        return fused(unit, [self._requests[name] for name in left])

    def _placements(self) -> list[Placement]:
        running = [start.placement for start in self._running.values()]
        load = self._engine.load(running)
        self._sampler.look(load)
        self._watch.ticked(load)
        pending = list(self._pending.values())
        placed = place(pending, running, load)
        if placed:
            self._told_shortage = False
        elif not self._told_shortage:
            self._tell_shortage(pending, running, load)
        return placed

    def _tell_shortage(
        self, pending: Sequence[Request], running: Sequence[Placement], load: Load
    ) -> None:
        """Say it, once, where jobs wait for nothing but memory."""
        if place(pending, running, replace(load, free_memory=sys.maxsize)):
            left = load.free_memory - sum(placement.memory for placement in running)
            self._told_shortage = True
            self._take(
                Remark(None, "memory", f"jobs wait for memory: {_mebibytes(left)} are left to them")
            )

    def _attempt(self, placement: Placement) -> tuple[Placement, list[Task]]:
        """Number the attempts: durable before a worker hears of them."""
        tasks = []
        request = self._pending.pop(self._unit(placement.jobs[0]))
        for name in placement.jobs:
            number = self._store.start_attempt(
                name, placement.cores, placement.threads, _device(placement), request.seconds
            )
            tasks.append(Task(self._jobs[name], number, tuple(self._store.checkpoints(name))))
        return placement, tasks

    def _submit(self, placement: Placement, tasks: list[Task]) -> None:
        self._watch.placed(placement)
        started = self._store.now()
        future = self._engine.submit(placement, tasks)
        self._running[future] = _Start(placement, tasks, started)
        future.add_done_callback(self._inbox.put)

    def _hear(self, wait_s: float) -> None:
        """Wait for the first news, then take all that are there; durable with the next commit."""
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=wait_s)
            with self._store.together(at_once=False):
                self._take(item)
                for further in self._arrived():
                    self._take(further)
        if self._clock() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def _arrived(self) -> Iterator[News | Future[Answer]]:
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

    def _take(self, item: News | Future[Answer]) -> None:
        if isinstance(item, Future):
            self._end(item)
            return
        if isinstance(item, Started):
            self._store.started(item.job_id, item.attempt, item.pid)
        elif isinstance(item, EpochEnded):
            self._store.epoch(item.job_id, item.attempt, item.epoch)
        elif isinstance(item, CheckpointWritten):
            self._outdated += self._store.checkpoint(item.ref)
        elif isinstance(item, JobEnded):
            self._end_early(item.result)
        elif isinstance(item, Remark):
            self._store.event(item.kind, item.text, item.job_id)
        self._watch.heard(item)

    def _end(self, future: Future[Answer]) -> None:
        start = self._running.pop(future)
        error = future.exception()
        if error is None:
            answer = future.result()
            for task, found in zip(start.tasks, answer.results, strict=True):
                if task.job.id not in start.ended:
                    self._take_result(task, found, start, answer)
            return
        for task in (task for task in start.tasks if task.job.id not in start.ended):
            if isinstance(error, WorkerDiedError):
                result = _failed(task, str(error), str(error))
                self._set_back(task, error.outcome, result, start, error.pid, error.peak_memory)
            elif isinstance(error, UnpackError):
                self._record(_failed(task, error.line, error.trace), start, 0, 0)
            else:
                with contextlib.suppress(StorageError):
                    self._store.end_attempt(task.job.id, task.attempt, "io", error=str(error))
        if not isinstance(error, (WorkerDiedError, UnpackError)):
            raise error

    def _end_early(self, result: Result) -> None:
        """Record what one of several jobs came to that are trained as one; the others go on."""
        for start in self._running.values():
            ended = [task for task in start.tasks if task.job.id == result.job_id]
            if ended:
                self._record(result, start, result.pid, result.peak_memory)
                start.ended.add(result.job_id)

    def _take_result(self, task: Task, found: Any, start: _Start, answer: Answer) -> None:
        if found is None:
            self._store.end_attempt(task.job.id, task.attempt, "interrupted", pid=answer.pid)
            if not self._leaving:
                # Somebody else's SIGTERM: nothing failed, and the job goes on from where it is.
                unit = self._unit(task.job.id)
                self._pending[unit] = self._request(unit)
        elif isinstance(found, Setback):
            self._set_back(task, found.outcome, found.result, start, answer.pid, answer.peak_memory)
        else:
            self._record(found, start, answer.pid, answer.peak_memory)

    def _record(self, result: Result, start: _Start, pid: int, peak: int) -> None:
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
        self, task: Task, outcome: str, result: Result, start: _Start, pid: int, peak: int
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
            self._waiting[self._unit(name)] = self._clock() + retry.after_s
            when = "alone on the machine" if retry.alone else f"in {retry.after_s:g} s"
            kind = "oom_retry" if outcome == "oom" else outcome
            self._take(Remark(name, kind, f"{told}; tried again {when}"))
            return
        self._store.event(outcome, told, name)
        account = f"{len(history)} attempts: {', '.join(history)}"
        if outcome == "oom":
            account += f"; peak memory {_mebibytes(peak)}, the last time alone on the machine"
        self._record(replace(result, error=f"{result.error} ({account})"), start, pid, peak)


def _failed(task: Task, line: str, trace: str) -> Result:
    return Result(task.job.id, task.attempt, FAILED, error=line, traceback=trace)


def _mebibytes(count: int) -> str:
    return f"{max(0, count) / 2**20:.0f} MiB"


def _device(placement: Placement) -> str:
    return "cpu" if placement.gpu is None else f"cuda:{placement.gpu}"


class Sampler:
    """Notes the CPU use, often at first and seldom in a long run.

    Parameters
    ----------
    store : RunStore
        Where it is noted.
    phase : {"packed", "serial"}
        What is running.
    """

    def __init__(self, store: RunStore, phase: str) -> None:
        self._store = store
        self._phase = phase
        self._started = time.monotonic()
        self._next = 0.0

    def look(self, load: Load) -> None:
        """Note the use in `load` when it is time."""
        passed = time.monotonic() - self._started
        if load.use and passed >= self._next:
            self._store.sample(self._phase, sum(load.use), load.own, load.use)
            self._next = passed + max(TICK_SECONDS, passed / 400)


def is_stray(error: BaseException) -> bool:
    """Whether a signal raised this anywhere: a host's handler, in the middle of a row perhaps."""
    return isinstance(error, KeyboardInterrupt) and not isinstance(error, InterruptedRunError)


def ask(
    engine: Engine,
    placement: Placement,
    sampler: Sampler | None = None,
    signals: Interruption | None = None,
) -> Any:
    """Run a placement that belongs to no job (a preflight, a baseline); return its finding.

    Parameters
    ----------
    engine : Engine
        Executes.
    placement : Placement
        With the trainer that answers.
    sampler : Sampler, optional
        Notes the CPU use meanwhile.
    signals : Interruption, optional
        Looked at meanwhile.

    Raises
    ------
    WorkerDiedError
        The process ended without an answer.
    """
    future = engine.submit(placement, [])
    while not wait([future], timeout=TICK_SECONDS).done:
        if signals is not None:
            signals.check()
        load = engine.load([placement])
        if sampler is not None:
            sampler.look(load)
    return future.result().results[0]
