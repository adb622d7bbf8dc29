"""Events of a sweep in any order, against an oracle that remembers what was promised.

The sweep and the store are real; engine and clock are fakes, so that a job lasts as long as the
next rule wants. By default some hundred steps; `make nightly` takes ten thousand.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asynckfold import Epoch, Result, RunReader, RunStore, StorageError
from asynckfold.engines.engine import Answer
from asynckfold.errors import UnpackError, WorkerDiedError
from asynckfold.jobs.folds import make_folds
from asynckfold.jobs.messages import (
    CheckpointRef,
    EpochEnd,
    NewCheckpoint,
    Progress,
    RetryableFailure,
    RunEvent,
    Task,
)
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.result import DIVERGED, DONE, ENDED, FAILED
from asynckfold.store import job_folder, run_store
from asynckfold.store.layout import DATABASE
from asynckfold.store.run_file import RunFile
from asynckfold.sweep.loop import Sweep
from tests.size import NIGHTLY
from tests.sweep.test_loop import plan_of, set_full

TARGETS = np.arange(4) % 2
FOLDS = make_folds(4, TARGETS, 2)
MEMORY = 10
"""What every job asks for."""

PAUSES = (0.5, 2.0)
"""Least seconds before the first and the second retry after a death, as promised."""


def result_of(task: Task, status: str) -> Result:
    """The same for each attempt, as it must be."""
    outputs = np.full((2, 2), task.job.fold, np.float32) if status == DONE else None
    error = "" if status == DONE else f"{status} on purpose"
    return Result(task.job.id, task.attempt, status, outputs=outputs, error=error, traceback=error)


def live_reader(root: Path) -> RunReader:
    """Another connection, which always sees what is committed by now: no copy of one moment."""
    database = f"{(root / DATABASE).absolute().as_uri()}?mode=ro"
    db = sqlite3.connect(database, uri=True, isolation_level=None)
    return RunReader(root, RunFile(root, db))


@dataclass
class Promises:
    """What must stay true over all sessions of a run."""

    told: dict[str, str] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)


@dataclass
class Engine:
    """Holds what it is given until a rule ends it; objects to what must not be given to it."""

    runs_in_submit, batch_seconds = False, None

    root: Path
    promises: Promises
    finished: frozenset[str]
    cores: int
    idle: int
    memory: int = 1000
    now: float = 0.0
    interrupts: int = 0
    submitted: int = 0
    endings: Iterator[str] = field(default_factory=lambda: iter(()))
    running: dict[Future[Answer], tuple[Placement, Task]] = field(default_factory=dict)
    history: dict[str, list[str]] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    unheard: dict[str, float] = field(default_factory=dict)
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def clock(self) -> float:
        return self.now

    def load(self, running: Sequence[Placement]) -> Load:
        self.interrupt()
        cores = tuple(range(self.cores))
        return Load(cores, cores[: self.idle], self.memory, use=(0.5,), own=0.5)

    def interrupt(self) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        (task,) = tasks
        name = task.job.id
        past = self.history.setdefault(name, [])
        assert name not in self.finished, "a finished job runs again"
        assert name not in self.promises.told, "a job whose result was told runs again"
        assert name not in {other.job.id for _, other in self.running.values()}, "runs twice"
        assert past.count("infra") <= 2, "more retries than promised"
        assert past.count("oom") <= 1, "more retries than promised"
        assert past.count("gpu_oom") <= 1, "more retries than promised"
        assert "user" not in past, "the user's own failure is tried again"
        assert self.now >= self.due.get(name, 0.0), "runs in its pause"
        assert placement.alone == ("oom" in past)
        assert not (self.running and placement.alone), "not alone"
        assert not any(other.alone for other, _ in self.running.values()), "beside one alone"
        found = max((ref.epoch for ref in task.checkpoints), default=0)
        assert found == self.promises.newest.get(name, 0), "does not go on from its last checkpoint"
        assert all((self.root / ref.file).exists() for ref in task.checkpoints)
        future: Future[Answer] = Future()
        self.submitted += 1
        Sessions.seen["alone" if placement.alone else "retry" if past else "first"] += 1
        self.running[future] = (placement, task)
        return future

    def end(self, future: Future[Answer], outcome: str) -> Task:
        """End what runs as the outcome says, and remember it as the promises count it."""
        _, task = self.running.pop(future)
        past = self.history[task.job.id]
        failed = result_of(task, FAILED)
        if outcome in (DONE, DIVERGED):
            future.set_result(Answer([result_of(task, outcome)], 1, 5))
        elif outcome == FAILED:
            past.append("user")
            future.set_result(Answer([failed], 1, 5))
        elif outcome == "unpack":
            past.append("user")
            future.set_exception(UnpackError("ImportError: on purpose", "trace"))
        elif outcome == "refused":
            past.append("oom")
            future.set_result(Answer([RetryableFailure("oom", failed)], 1, 5))
        elif outcome == "gpu_oom":
            past.append("gpu_oom")
            future.set_result(Answer([RetryableFailure("gpu_oom", failed)], 1, 5))
        elif outcome == "oom":
            past.append("oom")
            future.set_exception(WorkerDiedError(7, "SIGKILL, out of memory", "oom", 5))
        elif outcome == "stopped":
            future.set_result(Answer([None], 1, 5))
        elif outcome == "io":
            future.set_exception(StorageError(28, "No space left on device"))
        else:
            deaths = past.count("infra")
            past.append("infra")
            if deaths < len(PAUSES):
                self.due[task.job.id] = self.now + PAUSES[deaths]
                self.unheard[task.job.id] = PAUSES[deaths]
            future.set_exception(WorkerDiedError(7, "SIGKILL", outcome))
        return task

    def save(self, task: Task) -> None:
        """Write a checkpoint, one epoch further than the last."""
        name = task.job.id
        epoch = self.promises.newest.get(name, 0) + 1
        self.promises.newest[name] = epoch
        content = f"{name} {epoch}".encode()
        path = job_folder(self.root, task.job) / f"checkpoint-{epoch:04}-0-1.safetensors"
        path.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        file = str(path.relative_to(self.root))
        ref = CheckpointRef(name, task.attempt, epoch, 0, file, digest, len(content))
        self.inbox.put(NewCheckpoint(ref))

    def close(self, grace_s: float = 0.0) -> None:
        assert grace_s > 0
        for future, (_, task) in list(self.running.items()):
            ending = next(self.endings, "stopped")
            if ending == "stopped":
                self.save(task)
            self.end(future, ending)
        self.interrupt()


@dataclass
class Watch:
    """What is told is durable, and told once."""

    reader: RunReader
    promises: Promises

    def placed(self, placement: Placement) -> None:
        pass

    def heard(self, news: RunEvent) -> None:
        pass

    def ended(self, result: Result) -> None:
        assert result.job_id not in self.promises.told, "told twice"
        assert self.reader.finished()[result.job_id] == result.status, "told before it is durable"
        self.promises.told[result.job_id] = result.digest
        Sessions.seen[f"told {result.status}"] += 1

    def ticked(self, load: Load) -> None:
        pass


ENDINGS = st.lists(st.sampled_from(["stopped", DONE, FAILED, "died", "io"]), max_size=6)
ENDS = ("ctrl-c", "ctrl-c twice", "kill -9", "worker's disk", "store's disk")
FINAL = (DONE, FAILED, DIVERGED, "unpack")
OUTCOMES = st.sampled_from(
    [*FINAL, "died", "hang", "device_lost", "oom", "refused", "gpu_oom", "died", "stopped"]
)


class Sessions(RuleBasedStateMachine):
    """One run over several sessions, each of which may end in any way at any time."""

    seen: ClassVar[Counter[str]] = Counter()
    """What happened, to know that it did."""

    @initialize(models=st.integers(1, 9), cores=st.integers(1, 6))
    def start(self, models: int, cores: int) -> None:
        # Where it can be, in memory: what survives a power cut is tested elsewhere.
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(prefix="asynckfold-", dir=place))
        self.root = self.home / "0"
        self.plan = plan_of([f"M{number}" for number in range(models)], FOLDS)
        self.cores = cores
        self.promises = Promises()
        self.seen["examples"] += 1
        self.begin()

    def begin(self) -> None:
        """Hold the run and start a new session."""
        self.store = RunStore.hold(self.root)
        self.store.begin(self.plan, FOLDS, TARGETS)
        self.reader = live_reader(self.root)
        kept = {name: result.digest for name, result in self.store.reader.results().items()}
        for name, digest in self.promises.told.items():
            assert kept[name] == digest, "what was told is gone, or another"
        self.promises.told = kept
        self.promises.newest = {
            job.id: max((ref.epoch for ref in self.store.reader.checkpoints(job.id)), default=0)
            for job in self.plan.jobs
        }
        self.dead: list[Task] = []
        self.engine = Engine(self.root, self.promises, frozenset(kept), self.cores, self.cores)
        requests = {
            job.id: Request(job.id, float(number % 3), memory=MEMORY)
            for number, job in enumerate(self.plan.jobs)
        }
        self.seen["sessions"] += 1
        self.sweep = Sweep(
            self.store,
            self.engine,
            self.engine.inbox,
            requests,
            lambda result: result,
            Watch(self.reader, self.promises),
            self.engine.clock,
        )
        self.alive, self.ending = True, False
        self.ticks(1)

    def over(self) -> None:
        """The session has ended; failures are forgotten, as the next session tries them again."""
        self.alive = False
        set_full(self.store, False)
        self.store.close()
        self.promises.told = {
            name: digest
            for name, digest in self.promises.told.items()
            if self.reader.finished()[name] != FAILED
        }
        self.reader.close()

    def step(self) -> None:
        finished, now = self.store.reader.finished(), self.engine.now
        ready = any(
            job.id not in finished and self.engine.due.get(job.id, 0.0) <= now
            for job in self.plan.jobs
        )
        must_start = ready and not self.engine.running and self.engine.inbox.empty()
        before = self.engine.submitted
        # A pause begins when the sweep hears of the death, which is in this step.
        for name, pause in self.engine.unheard.items():
            self.engine.due[name] = now + pause
        self.engine.unheard.clear()
        try:
            self.sweep.step(0.0)
        except (StorageError, KeyboardInterrupt):
            with contextlib.suppress(KeyboardInterrupt):
                self.sweep.leave()
            self.over()
        else:
            assert self.engine.submitted > before or not must_start, "nothing runs"

    # What may happen

    @precondition(lambda self: self.alive and self.sweep.unfinished)
    @rule(
        times=st.integers(1, 3),
        seconds=st.sampled_from([0.0, 0.1, 0.6, 2.5]),
        idle=st.integers(0, 9),
        memory=st.sampled_from([0, MEMORY, 1000, 1000]),
        endings=ENDINGS,
    )
    def time_passes(
        self, times: int, seconds: float, idle: int, memory: int, endings: list[str]
    ) -> None:
        """The load is another now, and the sweep looks at it."""
        self.engine.now += seconds
        self.engine.idle, self.engine.memory = min(idle, self.cores), memory
        self.engine.endings = iter(endings)
        self.ticks(times)

    def ticks(self, times: int) -> None:
        for _ in range(times):
            if self.alive and self.sweep.unfinished:
                self.step()

    @precondition(lambda self: self.alive and self.engine.running)
    @rule(endings=st.lists(st.tuples(st.integers(0, 9), OUTCOMES), min_size=1, max_size=4))
    def some_end(self, endings: list[tuple[int, str]]) -> None:
        """One after the other, each seen by the sweep before the next, which ends what is new."""
        for place, outcome in endings:
            if self.alive and self.engine.running:
                running = list(self.engine.running)
                task = self.engine.end(running[place % len(running)], outcome)
                if outcome not in FINAL:
                    self.dead.append(task)
                self.ticks(2)

    @precondition(lambda self: self.alive and len(self.engine.running) > 1)
    @rule(outcome=st.sampled_from([DONE, "died", "oom"]))
    def all_end_in_one_tick(self, outcome: str) -> None:
        for future in list(self.engine.running):
            self.engine.end(future, outcome)

    @precondition(lambda self: self.alive and self.engine.running)
    @rule(places=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=4))
    def some_tell(self, places: list[tuple[int, bool]]) -> None:
        """Of their epochs or checkpoints; also those that are dead by now."""
        item = Epoch(1, 0.5, 0.5, 0.5, 0.1, 0.1)
        for place, saves in places:
            tasks = [task for _, task in self.engine.running.values()]
            task = tasks[place % len(tasks)]
            if saves:
                self.engine.save(task)
            self.engine.inbox.put(EpochEnd(task.job.id, task.attempt, item))
            for past in self.dead:
                self.engine.inbox.put(Progress(past.job.id, past.attempt, 1, 1, 1, 1, 0.5))
                self.engine.inbox.put(EpochEnd(past.job.id, past.attempt, item))

    @precondition(lambda self: self.alive and self.engine.running and not self.ending)
    @rule(how=st.sampled_from(ENDS), spared=st.integers(0, 2))
    def the_session_is_to_end(self, how: str, spared: int) -> None:
        """One time in three, so that sessions become long enough to matter."""
        self.ending = not spared
        if spared:
            return
        if how == "kill -9":
            self.kill()
        elif how == "store's disk":
            set_full(self.store, True)
        elif how == "worker's disk":
            self.engine.end(next(iter(self.engine.running)), "io")
        else:
            self.engine.interrupts = 2 if how == "ctrl-c twice" else 1

    def kill(self) -> None:
        """What is on the disk now is all that the next session finds."""
        root = self.home / str(int(self.root.name) + 1)
        shutil.copytree(self.root, root)
        with contextlib.suppress(StorageError):
            self.over()
        self.root = root

    @precondition(lambda self: self.alive and not self.sweep.unfinished)
    @rule()
    def the_run_is_complete(self) -> None:
        self.sweep.run()
        assert set(self.promises.told) == {job.id for job in self.plan.jobs}
        self.over()

    @precondition(lambda self: not self.alive)
    @rule()
    def the_same_command_again(self) -> None:
        self.begin()

    # What must be true at any time

    @invariant()
    def every_job_is_accounted_for(self) -> None:
        self.seen["steps"] += 1
        if getattr(self, "alive", False):
            counts = self.reader.counts()
            assert counts["planned"] == len(self.plan.jobs)
            assert counts["planned"] == sum(counts[state] for state in (*ENDED, "pending"))
            finished = self.reader.finished()
            assert set(self.promises.told) <= set(finished)

    def teardown(self) -> None:
        if not hasattr(self, "home"):
            return
        try:
            self.finish()
        finally:
            shutil.rmtree(self.home)

    def finish(self) -> None:
        """From wherever it is, the run comes to its end, in a bounded number of steps."""
        if self.alive:
            set_full(self.store, False)
            self.engine.interrupts = 0
            self.engine.endings = iter(())
        else:
            self.begin()
        for _ in range(4 * len(self.plan.jobs) + 20):
            if not self.alive:
                self.begin()
            if not self.sweep.unfinished:
                break
            self.engine.idle, self.engine.memory = self.cores, 1000
            self.engine.now += 3.0
            self.step()
            for future in list(self.engine.running) if self.alive else ():
                self.engine.end(future, DONE)
        assert not self.sweep.unfinished, "it does not end"
        self.sweep.run()
        assert self.reader.counts()["pending"] == 0
        assert set(self.promises.told) == {job.id for job in self.plan.jobs}
        self.over()


@pytest.mark.timeout(600)
def test_any_order_of_events(
    record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # When a full disk refuses depends on how many digits the times have that are written.
    monkeypatch.setattr(run_store, "time", SimpleNamespace(monotonic=lambda: 0.0))
    Sessions.TestCase.settings = settings(
        max_examples=250 if NIGHTLY else 16,
        stateful_step_count=60 if NIGHTLY else 40,
        deadline=None,
        derandomize=not NIGHTLY,
        suppress_health_check=list(HealthCheck),
    )
    Sessions.seen.clear()
    Sessions.TestCase().runTest()
    record_property("seen", dict(Sessions.seen))
    print(f"\n{dict(Sessions.seen)}")
    # A campaign in which little happens proves little.
    assert Sessions.seen["sessions"] > Sessions.seen["examples"] > 0
    for event in ("alone", "retry", "told done", "told failed", "told diverged"):
        assert Sessions.seen[event] > 2, event
