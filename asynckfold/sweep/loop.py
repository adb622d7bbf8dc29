"""The loop of a sweep: place, submit, wait for the first event, record, repeat.

::

    PendingJobs ── place(pending, running, load) ──► engine.submit ──► future
       ▲                                                                 │
       └─ a pause ◄── retries.decide ◄── Attempts ◄── inbox ◄────────────┴── events: epochs,
                                            │                                checkpoints
                                            └──► result: scored, recorded, then reported

No barrier: one queue for the whole sweep, and every core that becomes idle gets the next job. A
sweep resumes by construction: pending are the jobs that have no result in the store.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from asynckfold.engines.engine import Answer, Engine
from asynckfold.engines.serial import SerialEngine
from asynckfold.errors import InterruptedRunError, StorageError
from asynckfold.jobs.messages import (
    EpochEnd,
    GpuShare,
    JobEnd,
    JobStart,
    Leftovers,
    NewCheckpoint,
    Note,
    RunEvent,
)
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.reproducibility import with_left
from asynckfold.scheduling.wait_reasons import blocked_everywhere
from asynckfold.store import RunStore, WaitReasons
from asynckfold.sweep.attempts import Attempts, Finish, RunningJobs, RunningPlacement, SweepObserver
from asynckfold.sweep.pending import PendingJobs
from asynckfold.sweep.tasks import TICK_SECONDS, Patience, Sampler
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.sweep.race import Race

FIRST_WAITS = (0.025,) * 8
"""Seconds between the first readings of the load. It takes some tenths of a second until idle cores
are known, longer than a short sweep lasts; until then one job runs alone."""

FLUSH_SECONDS = 1.0
"""Longest time that progress stays only in memory."""

GRACE_SECONDS = 10.0
"""Time for interrupted jobs to reach their next batch and save themselves."""

Inbox = queue.SimpleQueue["RunEvent | Future[Answer]"]


class Sweep:
    """One pass over the pending jobs of a run.

    Parameters
    ----------
    store : RunStore
        Held for writing, with its plan.
    engine : Engine
        Executes the placements.
    inbox : queue
        Receives the engine's events.
    requests : Mapping of str to Request
        By job id.
    finish : callable
        Completes a successful result by its scores.
    observer : SweepObserver
        Notified of placements, events and results.
    clock : callable
        Monotonic seconds.
    signals : Interruption, optional
        Checked between steps.
    max_wait : float or None
        Longest time in seconds during which nothing runs and nothing can start; None: no limit.
    yields : bool
        Whether running jobs leave cores that other processes start to use.
    race : Race, optional
        Leaves out jobs of candidates that can no longer win.
    outside : collection of str
        Ids of jobs that are left to others.
    """

    def __init__(
        self,
        store: RunStore,
        engine: Engine,
        inbox: Inbox,
        requests: Mapping[str, Request],
        finish: Finish,
        observer: SweepObserver,
        clock: Callable[[], float] = time.monotonic,
        signals: Interruption | None = None,
        max_wait: float | None = None,
        yields: bool = False,
        race: Race | None = None,
        outside: Collection[str] = (),
    ) -> None:
        self._yields = yields
        self._patience = Patience(max_wait)
        self._store = store
        self._engine = engine
        self._inbox = inbox
        self._observer = observer
        self._signals = signals or Interruption()
        self._clock = clock
        self._pending = PendingJobs(
            store.plan,
            {*store.reader.finished(), *outside},
            requests,
            clock,
            # Else jobs that start together would be recorded as parallel.
            one_at_a_time=engine.runs_in_submit,
            batch_seconds=engine.batch_seconds,
        )
        self._running = RunningJobs(store.moved)
        self._attempts = Attempts(store, self._pending, self._running, finish, observer, race)
        self._waiting = WaitReasons((), (), (), {})
        self._sampler = Sampler(store, "packed", clock)
        self._flushed = self._heard = clock()
        if isinstance(engine, SerialEngine):
            engine.between = self._hear_between

    def run(self) -> None:
        """Work until every job has a result.

        Raises
        ------
        StorageError
            The disk refused; the run can be continued.
        NoRoomError
            No job could start for `max_wait` seconds; the run can be continued.
        InterruptedRunError
            After the running jobs saved themselves.
        """
        try:
            waits = chain(FIRST_WAITS, repeat(TICK_SECONDS))
            while self.unfinished:
                self._signals.check()
                self.step(next(waits))
            self._sampler.look(self._engine.load([]), at_end=True)
            self._store.set_waiting(None)
            self._flush()
        except BaseException as error:
            # Ctrl-C, a full disk: whatever it is, running jobs save themselves first.
            if is_stray(error):
                self._attempts.forget()
            self.leave()
            raise

    @property
    def unfinished(self) -> bool:
        """Whether there are jobs without a result."""
        return bool(self._pending or self._running)

    def step(self, wait_s: float) -> None:
        """Start what can start, then take the events that arrive within `wait_s` seconds."""
        self._pending.end_pauses()
        with self._store.together():
            starts = [(item, self._attempts.start(item)) for item in self._place()]
        self._attempts.acknowledge()
        for placement, tasks in starts:
            self._observer.placed(placement)
            item = self._running.submitted = RunningPlacement(placement, tasks, self._store.now())
            future = self._engine.submit(placement, tasks)
            self._running.submitted = None
            self._running.add(future, item)
            future.add_done_callback(self._inbox.put)
        self._hear(max(0.0, min(wait_s, self._pending.next_due() - self._clock())))

    def leave(self) -> None:
        """End early: let running jobs save themselves, and record how far they got."""
        self._attempts.leave()
        with contextlib.suppress(StorageError):
            self._flush()
        self._engine.close(GRACE_SECONDS)
        for item in self._arrived():
            # One that cannot be stored must not prevent the others.
            # What it decides for others is durable together with it.
            with contextlib.suppress(StorageError), self._store.together():
                if not isinstance(item, Future) or item in self._running:
                    self._take(item)
        with contextlib.suppress(StorageError):
            self._store.set_waiting(None)
            self._store.interrupt()
            self._attempts.acknowledge()

    def _place(self) -> list[Placement]:
        load = self._engine.load(self._running.placements())
        self._sampler.look(load)
        self._observer.ticked(load)
        if self._yields:
            self._preempt(load)
        placed = self._pending.place(self._running.reservations, load)
        stuck = self._pending.can_start and not (placed or self._running)
        self._note_waiting(load)
        obstacle = blocked_everywhere(load) or "no GPU that this run may use can be seen"
        if self._patience.look(self._clock(), obstacle if stuck else ""):
            self._attempts.note(Note(None, "waiting", f"nothing can start: {obstacle}"))
        return placed

    def _note_waiting(self, load: Load) -> None:
        """Record what the pending jobs wait for, if that has changed."""
        jobs = self._pending.obstacles(self._running.reservations, load)
        first, *peers = map(_seen, load.nodes)
        waiting = replace(first, jobs=jobs, peers=tuple(peers))
        if waiting != self._waiting:
            self._waiting = waiting
            self._store.set_waiting(waiting)

    def _preempt(self, load: Load) -> None:
        """Move, pause and resume running jobs as the load requires."""
        from asynckfold.scheduling.preemption import reassign_cores

        items = dict(self._running.items())
        movable = {future: item.held for future, item in items.items() if item.can_move}
        fixed = [item.held for item in items.values() if not item.can_move]
        for future, cores in reassign_cores(movable, load, fixed).items():
            item = items[future]
            self._engine.shift(future, cores)
            self._attempts.note(Note(item.placement.jobs[0], *_describe_move(item, cores)))
            self._running.move(item, cores)

    def _hear(self, wait_s: float) -> None:
        """Take events until a placement ends or the time is over.

        Most events (a start, an epoch, a checkpoint) free no core, so the load, which costs more to
        read than they cost, is not read for them. They are durable with the next commit.
        """
        deadline = self._clock() + wait_s
        with contextlib.suppress(queue.Empty):
            item = self._next(wait_s)
            freed = False
            while True:
                with self._store.together(at_once=False):
                    # One by one: what follows an event that raises stays in the inbox.
                    for event in chain([item], self._arrived()):
                        self._take(event)
                        freed = freed or isinstance(event, Future)
                left = deadline - self._clock()
                if left <= 0 or freed:
                    break
                item = self._next(left)
        if self._clock() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def _hear_between(self) -> None:
        """Take the events of a job that runs in this process."""
        if self._clock() - self._heard > TICK_SECONDS:
            self._hear(0.0)
            self._heard = self._clock()

    def _next(self, wait_s: float) -> RunEvent | Future[Answer]:
        """Wait for the next event; raise `queue.Empty` when the time is over."""
        # A SimpleQueue of Python 3.10 may wait for ever if its timeout has passed when it looks.
        return self._inbox.get(wait_s > 1e-3, wait_s)

    def _arrived(self) -> Iterator[RunEvent | Future[Answer]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._inbox.get_nowait()

    def _flush(self) -> None:
        self._store.flush()
        self._flushed = self._clock()
        self._attempts.acknowledge()

    def _take(self, item: RunEvent | Future[Answer]) -> None:
        if isinstance(item, Future):
            self._attempts.end(item)
            return
        if isinstance(item, JobStart):
            self._attempts.note_begun(item)
        elif isinstance(item, GpuShare):
            self._attempts.learn_gpu_share(item)
        elif isinstance(item, EpochEnd):
            self._store.epoch(item.job_id, item.attempt, item.epoch)
        elif isinstance(item, NewCheckpoint):
            self._attempts.outdate(self._store.checkpoint(item.ref))
        elif isinstance(item, JobEnd):
            self._attempts.end_early(item.result)
        elif isinstance(item, Note):
            self._store.event(item.kind, item.text, item.job_id)
        elif isinstance(item, Leftovers):
            self._note_leftovers(item)
        self._observer.heard(item)

    def _note_leftovers(self, item: Leftovers) -> None:
        """Report what a job left changed in its process, and whether other jobs are affected."""
        names = ", ".join(item.names)
        then = "its worker was replaced, so that no other job is affected"
        if item.goes_on:
            then = "further jobs are trained in this process"
        if item.goes_on and item.numbers:
            left = f"{names} ({item.job_id or 'the dry run'})"
            self._store.set_software(with_left(self._store.session_software, left))
            then += ": the run is no longer reproducible"
        text = f"changed in its process and not restored: {names}; {then}"
        self._attempts.note(Note(item.job_id, "isolation", text))


def _seen(node: Load) -> WaitReasons:
    """Return what a sweep records of a node that it sees."""
    idle = {*node.idle}
    others = tuple(core for core in node.cores if core not in idle)
    gpus = tuple(gpu.index for gpu in node.gpus if not gpu.busy)
    return WaitReasons(node.cores, others, gpus, {}, node.node)


def _describe_move(item: RunningPlacement, cores: Sequence[int]) -> tuple[str, str]:
    """Return the kind and the text of the event when a job moves, pauses or resumes."""
    node = f" of {item.placement.node}" if item.placement.node else ""
    before, after = (", ".join(map(str, each)) for each in (item.placement.cores, cores))
    if not cores:
        return "paused", f"other processes use its cores ({before}{node})"
    return "resumed" if item.paused else "moved", f"from cores {before} to {after}{node}"


def is_stray(error: BaseException) -> bool:
    """Whether a foreign signal handler raised this, perhaps in the middle of a transaction."""
    return isinstance(error, KeyboardInterrupt) and not isinstance(error, InterruptedRunError)
