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
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from asynckfold.elastic import Elastic, Pace, stretched
from asynckfold.engines.engine import Answer, Engine
from asynckfold.engines.steady import MOST_CHANGES, WINDOW_SECONDS
from asynckfold.errors import (
    InterruptedRunError,
    NoRoomError,
    StorageError,
    UnpackError,
    WorkerDiedError,
)
from asynckfold.files import remove
from asynckfold.interruption import Interruption
from asynckfold.messages import (
    CheckpointWritten,
    EpochEnded,
    JobEnded,
    News,
    Progress,
    Remark,
    Resized,
    Setback,
    Started,
    Task,
)
from asynckfold.placement import Backlog, Bookings, Load, Placement, Request, fused, place
from asynckfold.plan import SEVERAL
from asynckfold.result import FAILED, Result, job_by_id
from asynckfold.retries import decide
from asynckfold.sizes import gibibytes
from asynckfold.store import Placed, RunStore, Waiting
from asynckfold.waiting import Obstacle, Wait, Waits, named_cores
from asynckfold.yielding import Held, yielded

TICK_SECONDS = 0.25
"""Longest wait before the load is looked at again."""

FLUSH_SECONDS = 1.0
"""Longest time that progress stays only in memory."""

GRACE_SECONDS = 10.0
"""What an interrupted job gets to reach its next batch and save itself."""

GAP_SECONDS = 1.0
"""Most of the time between two looks that counts as waiting: this process may have been stopped."""

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
    """A placement that runs, its tasks, when it started in run seconds, and jobs that ended.

    It can be moved once a worker has it in hand: that pins itself before it says so. Beyond the
    cores of its placement it may hold some that are lent to it, until its worker has given them
    back and goes on with those that it keeps; `given_back` says when that was asked for lately, and
    `asks` how often its worker was asked for another number of threads. `pace` is that of its job
    since the last change of threads, by the news of `paced`; `before`, seconds of a batch until
    then. It grows no more once it was slower with what was lent.
    """

    placement: Placement
    tasks: list[Task]
    at: float
    ended: set[str] = field(default_factory=set)
    begun: bool = False
    paused: bool = False
    lent: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    given_back: tuple[float, ...] = ()
    asks: int = 0
    pace: Pace | None = None
    paced: str = ""
    before: float | None = None
    slower: bool = False

    @property
    def seconds(self) -> float | None:
        """Seconds of a batch with the threads that it has now, once they are known."""
        return None if self.pace is None else self.pace.seconds

    @property
    def held(self) -> Held:
        return Held(self.placement.cores, self.paused)

    @property
    def whole(self) -> Placement:
        """The placement with all cores that it holds now."""
        if not self.lent:
            return self.placement
        return replace(self.placement, cores=(*self.placement.cores, *self.lent))


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
    steps : Mapping of str to sequence of float, optional
        By model, seconds of a step with 1, 2, … threads: running jobs then take cores that became
        free where that pays, and give them back.
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
        steps: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._yields = yields
        self._steps = steps or {}
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
        self._bookings = Bookings()
        self._waits = Waits()
        self._waiting = Waiting((), (), (), {})
        self._pauses: dict[str, _Pause] = {}
        self._running: dict[Future[Answer], _Start] = {}
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
            while self.unfinished:
                self._signals.check()
                self.step(TICK_SECONDS)
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
        self._waits.come(request, self._clock(), before)

    def _placements(self) -> list[Placement]:
        load = self._engine.load([start.whole for start in self._running.values()])
        self._sampler.look(load)
        self._watch.ticked(load)
        if self._yields:
            self._make_room(load)
        # What is lent counts as free, and what would start there waits until it is given back.
        lent = {core for start in self._running.values() for core in start.lent}
        lent_last = tuple(sorted(load.idle, key=lent.__contains__))
        found = place(self._backlog, self._bookings, replace(load, idle=lent_last))
        placed = [placement for placement in found if lent.isdisjoint(placement.cores)]
        soon = [placement for placement in found if not lent.isdisjoint(placement.cores)]
        stuck = bool(self._backlog) and not (placed or self._running)
        if self._patience.look(self._clock(), _obstacle(load) if stuck else ""):
            self._take(Remark(None, "waiting", f"nothing can start: {_obstacle(load)}"))
        for placement in placed:
            self._bookings.add(placement)
            self._backlog.remove(self._unit(placement.jobs[0]))
        if self._steps:
            self._stretch(load, placed, soon)
        whole = [start.whole for start in self._running.values()]
        self._look(load, placed, Bookings([*whole, *placed]) if soon else self._bookings)
        return placed

    def _look(self, load: Load, placed: Sequence[Placement], bookings: Bookings) -> None:
        """Note what the jobs that are left wait for, where that has changed."""
        obstacles = self._waits.look(self._backlog, bookings, load, self._clock())
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
        movable = {
            future: start.held
            for future, start in self._running.items()
            # The processes of a job that has several are pinned by themselves.
            if start.begun
            and start.placement.cores
            and start.placement.trainer not in SEVERAL
            and not start.lent
        }
        others = [start.whole for future, start in self._running.items() if future not in movable]
        fixed = [core for placement in others for core in placement.cores]
        for future, cores in yielded(movable, load, fixed).items():
            start = self._running[future]
            self._engine.shift(future, cores)
            self._take(Remark(start.placement.jobs[0], *_told(start, cores)))
            changed = self._rebooked(start, cores or start.placement.cores)
            self._running[future] = replace(changed, paused=not cores, pace=None)

    def _rebooked(self, start: _Start, cores: tuple[int, ...]) -> _Start:
        """Let a placement hold these cores and no others, those beyond its threads lent."""
        count = len(start.placement.cores)
        placement = replace(start.placement, cores=cores[:count])
        self._bookings.remove(start.placement)
        self._bookings.add(placement)
        if cores != start.whole.cores:
            for task in start.tasks:
                self._store.note_cores(task.job.id, task.attempt, cores)
        return replace(start, placement=placement, lent=cores[count:])

    def _stretch(self, load: Load, placed: Sequence[Placement], soon: Sequence[Placement]) -> None:
        """Lend idle cores to running jobs, and ask for those back on which others start soon."""
        starts = self._running
        held = Bookings([*(start.whole for start in starts.values()), *placed, *soon])
        # Threads wait for each other: for the one whose core somebody else uses.
        load = replace(load, idle=tuple(core for core in load.idle if core not in load.others))
        free = [] if load.blocked else held.free_cores(load)
        wanted = {core for item in soon for core in item.cores}
        if not free and not any(start.lent for start in starts.values()):
            return
        if self._yields and any(_is_disturbed(start, load) for start in starts.values()):
            # Those that must make room come first.
            free, wanted = [], {core for start in starts.values() for core in start.lent}
        last_first = sorted(starts, key=lambda future: -self._expected_end(starts[future]))
        running = {
            future: self._elastic(starts[future])
            for future in last_first
            if starts[future].begun and not starts[future].keeps and _can_stretch(starts[future])
        }
        for future, cores in stretched(running, load, free, wanted).items():
            start = replace(starts[future], slower=running[future].slower)
            starts[future] = self._asked(future, start, cores)

    def _asked(self, future: Future[Answer], start: _Start, cores: tuple[int, ...]) -> _Start:
        """Lend a job the cores that it has not yet, or ask it to keep only these."""
        asked = replace(start, asks=start.asks + 1)
        if len(cores) > len(start.whole.cores):
            self._engine.shift(future, cores, len(cores))
            self._take(_resized(start, "grown", cores))
            return self._rebooked(asked, cores)
        self._engine.shift(future, start.whole.cores, len(cores))
        given_back = (*start.given_back, self._clock())[-MOST_CHANGES:]
        return replace(asked, keeps=cores, given_back=given_back)

    def _elastic(self, start: _Start) -> Elastic:
        now = self._clock()
        lately = sum(now - moment < WINDOW_SECONDS for moment in start.given_back)
        model, seconds = self._jobs[start.placement.jobs[0]].model, start.seconds
        slower = bool(start.lent and seconds and start.before and seconds > start.before)
        return Elastic(
            start.whole.cores,
            start.placement.threads,
            self._steps[model],
            # What is not known before cannot be seen to become slower.
            seconds is None or lately == MOST_CHANGES,
            slower or start.slower,
        )

    def _note_pace(self, item: Progress) -> None:
        """Note how fast a job is that may grow."""
        batches, now = (item.epoch - 1) * item.batches + item.batch, self._clock()
        for future, start in self._running.items():
            if item.job_id in start.placement.jobs:
                known = start.pace
                if known is None:
                    pace = Pace(now, now, batches, batches)
                    self._running[future] = replace(start, pace=pace, paced=item.job_id)
                elif start.paced == item.job_id:
                    pace = replace(known, until=now, last=batches)
                    self._running[future] = replace(start, pace=pace)
                return

    def _expected_end(self, start: _Start) -> float:
        """In run seconds, had it the threads of the plan all the time."""
        return start.at + self._request(self._unit(start.placement.jobs[0])).seconds

    def _note_resized(self, item: Resized) -> None:
        """Free the cores that a worker has given back, and watch its pace from now on."""
        for future, start in self._running.items():
            if item.job_id in start.placement.jobs and item.ask == start.asks:
                if start.keeps:
                    self._engine.shift(future, start.keeps)
                    self._take(_resized(start, "shrunk", start.keeps))
                    start = self._rebooked(start, start.keeps)
                else:
                    start = replace(start, before=start.seconds)
                known, now = start.pace, self._clock()
                pace = known and Pace(now, now, known.last, known.last)
                self._running[future] = replace(start, keeps=(), pace=pace)
                return

    def _tell_shortage(self, obstacles: Iterable[Obstacle]) -> None:
        """Say it, once, where jobs wait for nothing but memory."""
        texts = [reason.text for reason in obstacles if reason.kind == "memory"]
        if texts:
            self._told_shortage = True
            self._take(Remark(None, "memory", f"jobs wait for {texts[0]}"))

    def _attempt(self, placement: Placement) -> tuple[Placement, list[Task]]:
        """Number the attempts: durable before a worker hears of them."""
        tasks = []
        unit = self._unit(placement.jobs[0])
        expected = self._request(unit).seconds
        placed = Placed(placement.memory, self._waits.start(unit, self._clock()))
        for name in placement.jobs:
            number = self._store.start_attempt(
                name, placement.cores, placement.threads, _device(placement), expected
            )
            self._store.note_placed(name, number, placed)
            tasks.append(Task(self._jobs[name], number, tuple(self._store.checkpoints(name))))
        return placement, tasks

    def _submit(self, placement: Placement, tasks: list[Task]) -> None:
        self._watch.placed(placement)
        started = self._store.now()
        future = self._engine.submit(placement, tasks)
        self._running[future] = _Start(placement, tasks, started)
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
                        freed = freed or isinstance(news, (Future, Resized))
                left = deadline - self._clock()
                if left <= 0 or freed:
                    break
                item = self._inbox.get(timeout=left)
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
            self._note_begun(item.job_id)
        elif isinstance(item, Resized):
            self._note_resized(item)
        elif isinstance(item, Progress) and self._steps:
            self._note_pace(item)
        elif isinstance(item, EpochEnded):
            self._store.epoch(item.job_id, item.attempt, item.epoch)
        elif isinstance(item, CheckpointWritten):
            self._outdated += self._store.checkpoint(item.ref)
        elif isinstance(item, JobEnded):
            self._end_early(item.result)
        elif isinstance(item, Remark):
            self._store.event(item.kind, item.text, item.job_id)
        self._watch.heard(item)

    def _note_begun(self, job_id: str) -> None:
        for future, start in self._running.items():
            if job_id in start.placement.jobs:
                self._running[future] = replace(start, begun=True)
                return

    def _end(self, future: Future[Answer]) -> None:
        start = self._running.pop(future)
        self._bookings.remove(start.placement)
        error = future.exception()
        if error is None:
            answer = future.result()
            for task, found in zip(start.tasks, answer.results, strict=True):
                if task.job.id not in start.ended:
                    self._take_result(task, found, start, answer)
            unit = self._unit(start.tasks[0].job.id)
            if self._left_of(unit) and not (unit in self._pauses or self._leaving):
                # Somebody else's SIGTERM: nothing failed, and it goes on from where it is.
                self._add(unit)
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
            now, unit = self._clock(), self._unit(name)
            text = f"its pause after attempt {number} ({outcome})"
            self._pauses[unit] = _Pause(now, now + retry.after_s, text)
            when = "alone on the machine" if retry.alone else f"in {retry.after_s:g} s"
            kind = "oom_retry" if outcome == "oom" else outcome
            self._take(Remark(name, kind, f"{told}; tried again {when}"))
            return
        self._store.event(outcome, told, name)
        account = f"{len(history)} attempts: {', '.join(history)}"
        if outcome == "oom":
            account += f"; peak memory {gibibytes(peak)}, the last time alone on the machine"
        self._record(replace(result, error=f"{result.error} ({account})"), start, pid, peak)


class Patience:
    """How long nothing could start at all.

    Parameters
    ----------
    max_wait : float or None
        Seconds after which that is told as an error; None: never.
    """

    def __init__(self, max_wait: float | None) -> None:
        self._max_wait = max_wait
        self._waited: float | None = None
        self._looked = 0.0

    def look(self, now: float, obstacle: str) -> bool:
        """Return whether waiting begins now.

        Parameters
        ----------
        now : float
            Seconds of a monotonic clock.
        obstacle : str
            Why nothing can start; empty where it can.

        Raises
        ------
        NoRoomError
            It was too long.
        """
        passed, self._looked = now - self._looked, now
        if not obstacle:
            self._waited = None
            return False
        begins = self._waited is None
        self._waited = 0.0 if self._waited is None else self._waited + min(passed, GAP_SECONDS)
        if self._max_wait is not None and self._waited >= self._max_wait:
            raise NoRoomError(
                f"nothing could start for {self._waited:.0f} s (max_wait): {obstacle}; what was "
                "finished stays, and the same call continues"
            )
        return begins


def room(engine: Engine, max_wait: float | None, signals: Interruption | None = None) -> Load:
    """Wait until something may start, and return the load.

    Raises
    ------
    NoRoomError
        That took too long.
    """
    patience = Patience(max_wait)
    while (load := engine.load([])).blocked:
        patience.look(time.monotonic(), load.blocked)
        time.sleep(TICK_SECONDS)
        if signals is not None:
            signals.check()
    return load


def _obstacle(load: Load) -> str:
    return load.blocked or "no GPU that this run may use can be seen"


def _is_disturbed(start: _Start, load: Load) -> bool:
    return start.paused or not {*start.whole.cores} <= {*load.idle}


def _can_stretch(start: _Start) -> bool:
    """Whether more threads may help: not on a GPU, nor where memory was short before.

    Several processes of a job have one thread each.
    """
    placement = start.placement
    single = placement.trainer not in SEVERAL
    return bool(placement.cores) and placement.gpu is None and not placement.alone and single


def _resized(start: _Start, kind: str, cores: Sequence[int]) -> Remark:
    """What becomes of a job whose threads change: in the log of the run."""
    now, before = len(cores), len(start.whole.cores)
    text = (
        f"{now} {'thread' if now == 1 else 'threads'} on {named_cores(cores)}, before {before}: "
        + (
            "cores became free"
            if kind == "grown"
            else "with more it was slower"
            if start.slower
            else "others need the cores that it gave back"
        )
    )
    return Remark(start.placement.jobs[0], kind, text)


def _told(start: _Start, cores: Sequence[int]) -> tuple[str, str]:
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
    max_wait: float | None = None,
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
    max_wait : float or None
        Seconds to wait where nothing may start.
    sampler : Sampler, optional
        Notes the CPU use meanwhile.
    signals : Interruption, optional
        Looked at meanwhile.

    Raises
    ------
    WorkerDiedError
        The process ended without an answer.
    NoRoomError
        It could not start for too long.
    """
    room(engine, max_wait, signals)
    future = engine.submit(placement, [])
    while not wait([future], timeout=TICK_SECONDS).done:
        if signals is not None:
            signals.check()
        load = engine.load([placement])
        if sampler is not None:
            sampler.look(load)
    return future.result().results[0]
