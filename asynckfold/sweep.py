"""The loop of a sweep: place, submit, wait for the first news, record, repeat.

::

    pending ── place(pending, running, load) ──► submit ──► future
       ▲                                                      │
       └── died: again, from its checkpoint ◄── inbox ◄───────┴── news: progress, checkpoints
                                                  │
                                                  └──► result: scored, recorded, then told

No barrier: one queue for the whole sweep, and every core that becomes idle gets the next job.
Resume is the first line: pending is what has no result in the store.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asynckfold.engines.engine import Answer, Engine
from asynckfold.errors import InterruptedRunError, StorageError, UnpackError, WorkerDiedError
from asynckfold.files import remove
from asynckfold.interruption import Interruption
from asynckfold.messages import CheckpointWritten, EpochEnded, News, Remark, Started, Task
from asynckfold.placement import Load, Placement, Request, place
from asynckfold.result import FAILED, Result, job_by_id
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
class Limits:
    """When the sweep gives up on a job: after so many attempts that ended with a dead worker."""

    attempts: int = 3


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
    limits : Limits, optional
        When to give up on a job.
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
        limits: Limits | None = None,
        signals: Interruption | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._inbox = inbox
        self._finish = finish
        self._watch = watch
        self._limits = limits or Limits()
        self._signals = signals or Interruption()
        self._jobs = job_by_id(store.plan)
        self._requests = dict(requests)
        finished = store.finished()
        self._pending = {name: requests[name] for name in self._jobs if name not in finished}
        self._running: dict[Future[Answer], tuple[Placement, list[Task], float]] = {}
        self._deaths: dict[str, int] = {}
        self._recorded: list[Result] = []
        self._outdated: list[str] = []
        self._sampler = Sampler(store, "packed")
        self._flushed = time.monotonic()

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
            while self._pending or self._running:
                self._signals.check()
                with self._store.together():
                    starts = [self._attempt(placement) for placement in self._placements()]
                self._acknowledge()
                for placement, tasks in starts:
                    self._submit(placement, tasks)
                self._hear()
            self._flush()
        except BaseException as error:
            # Ctrl-C, a full disk: whatever it is, running jobs save themselves first.
            if is_stray(error):
                self._store.forget()
                self._recorded, self._outdated = [], []
            self._leave()
            raise

    def _placements(self) -> list[Placement]:
        running = [placement for placement, _, _ in self._running.values()]
        load = self._engine.load(running)
        self._sampler.look(load)
        self._watch.ticked(load)
        return place(list(self._pending.values()), running, load)

    def _attempt(self, placement: Placement) -> tuple[Placement, list[Task]]:
        """Number the attempts: durable before a worker hears of them."""
        tasks = []
        for name in placement.jobs:
            request = self._pending.pop(name)
            number = self._store.start_attempt(
                name, placement.cores, placement.threads, _device(placement), request.seconds
            )
            tasks.append(Task(self._jobs[name], number, tuple(self._store.checkpoints(name))))
        return placement, tasks

    def _submit(self, placement: Placement, tasks: list[Task]) -> None:
        self._watch.placed(placement)
        started = self._store.now()
        future = self._engine.submit(placement, tasks)
        self._running[future] = (placement, tasks, started)
        future.add_done_callback(self._inbox.put)

    def _hear(self) -> None:
        """Wait for the first news, then take all that are there; durable with the next commit."""
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=TICK_SECONDS)
            with self._store.together(at_once=False):
                self._take(item)
                while True:
                    self._take(self._inbox.get_nowait())
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._store.flush()
        self._flushed = time.monotonic()
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Tell what is durable by now, and remove what nobody needs any more."""
        for result in self._recorded:
            self._watch.ended(result)
        for file in self._outdated:
            remove(self._store.root / file)
        self._recorded, self._outdated = [], []

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
        elif isinstance(item, Remark):
            self._store.event(item.kind, item.text, item.job_id)
        self._watch.heard(item)

    def _end(self, future: Future[Answer]) -> None:
        placement, tasks, started = self._running.pop(future)
        error = future.exception()
        if isinstance(error, WorkerDiedError):
            for task in tasks:
                self._died(task, placement, started, error)
        elif isinstance(error, UnpackError):
            for task in tasks:
                self._record(
                    Result(
                        task.job.id, task.attempt, FAILED, error=error.line, traceback=error.trace
                    ),
                    placement,
                    started,
                    0,
                    0,
                )
        elif error is not None:
            for task in tasks:
                self._store.end_attempt(task.job.id, task.attempt, "io", error=str(error))
            raise error
        else:
            answer = future.result()
            for task, result in zip(tasks, answer.results, strict=True):
                if result is None:
                    self._store.end_attempt(
                        task.job.id, task.attempt, "interrupted", pid=answer.pid
                    )
                else:
                    self._record(result, placement, started, answer.pid, answer.peak_memory)

    def _record(
        self, result: Result, placement: Placement, started: float, pid: int, peak: int
    ) -> None:
        complete = replace(
            self._finish(result),
            pid=pid,
            peak_memory=peak,
            cores=placement.cores,
            threads=placement.threads,
            device=_device(placement),
            started=started,
            ended=self._store.now(),
        )
        if self._store.record(complete):
            self._recorded.append(complete)

    def _died(
        self, task: Task, placement: Placement, started: float, error: WorkerDiedError
    ) -> None:
        name = task.job.id
        self._deaths[name] = self._deaths.get(name, 0) + 1
        self._store.event(error.outcome, f"attempt {task.attempt}: {error}", name)
        if self._deaths[name] < self._limits.attempts:
            self._store.end_attempt(
                name, task.attempt, error.outcome, pid=error.pid, error=str(error)
            )
            self._pending[name] = self._requests[name]
            return
        text = f"{error} ({self._deaths[name]} attempts, each ended this way)"
        self._record(
            Result(name, task.attempt, FAILED, error=text, traceback=text),
            placement,
            started,
            error.pid,
            0,
        )

    def _leave(self) -> None:
        """Let running jobs save themselves, and note how far they came."""
        with contextlib.suppress(StorageError):
            self._flush()
        self._engine.close(GRACE_SECONDS)
        with contextlib.suppress(StorageError):
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._inbox.get_nowait()
                    if not isinstance(item, Future) or self._counts(item):
                        self._take(item)
            self._store.interrupt()
            self._acknowledge()

    def _counts(self, future: Future[Answer]) -> bool:
        """Whether a job ended by itself; a worker that was killed to leave is no death of a job."""
        return future in self._running and not isinstance(future.exception(), WorkerDiedError)


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


def requests_for(
    names: Sequence[str],
    seconds: Mapping[str, float],
    threads: int,
    memory: Mapping[str, int],
    gpu: bool,
) -> dict[str, Request]:
    """Return one request a job, from what is known by job id."""
    return {
        name: Request(name, seconds.get(name, 0.0), threads, memory.get(name, 0), gpu)
        for name in names
    }
