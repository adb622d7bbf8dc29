"""The loop of a sweep, driven with an engine that runs nothing: milliseconds, no processes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import Fold, Plan, Result, RunStore, StorageError, TrainerParams
from asynckfold.engines.engine import Answer
from asynckfold.errors import UnpackError, WorkerDiedError
from asynckfold.jobs.folds import make_folds
from asynckfold.jobs.messages import (
    CheckpointRef,
    GpuShare,
    NewCheckpoint,
    RetryableFailure,
    RunEvent,
    Task,
)
from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, Gpu, Load, Placement, Request
from asynckfold.jobs.plan import folds_fingerprint
from asynckfold.jobs.result import DONE, FAILED
from asynckfold.sweep.loop import Sweep
from tests.toy import make_jobs

GIB = 1 << 30

Behaviour = Callable[[Task], Any]


def done(task: Task) -> Result:
    outputs = np.full((3, 2), task.job.fold, np.float32)
    return Result(task.job.id, task.attempt, DONE, outputs=outputs, weights="w", fit_seconds=1.0)


@dataclass
class FakeEngine:
    """Answers at once, as `behaviour` says; remembers what it was given."""

    runs_in_submit, batch_seconds = False, None

    behaviour: Behaviour
    inbox: queue.SimpleQueue[Any]
    cores: tuple[int, ...] = (0, 1)
    started: list[Task] = field(default_factory=list)
    most: int = 0
    waiting: list[tuple[Future[Answer], Task]] = field(default_factory=list)

    def load(self, running: Sequence[Placement]) -> Load:
        # The world moves on when it is looked at: one of the running jobs ends.
        self.now += 0.1
        self.most = max(self.most, len(self.waiting))
        if len(self.waiting) == len(self.cores) or (self.waiting and self.looked):
            self.end(self.waiting.pop(0))
        self.looked = not getattr(self, "looked", False)
        use = (0.5,) * len(self.cores)
        return Load(self.cores, self.cores, 1 << 40, self.gpus, use=use, own=0.5)

    looked: bool = False
    gpus: tuple[Gpu, ...] = ()
    now: float = 0.0

    def clock(self) -> float:
        return self.now

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.started += tasks
        self.waiting.append((future, tasks[0]))
        return future

    def end(self, item: tuple[Future[Answer], Task]) -> None:
        future, task = item
        found = self.behaviour(task)
        if isinstance(found, BaseException):
            future.set_exception(found)
        else:
            future.set_result(Answer([found], pid=1, peak_memory=2))

    def close(self, grace_s: float = 0.0) -> None:
        for item in self.waiting:
            item[0].set_result(Answer([None], pid=1))
        self.waiting = []


class Moving(FakeEngine):
    """Ends nothing by itself; its cores are as idle as it is told."""

    idle: tuple[int, ...] = (0, 1, 2)
    shifts: Sequence[tuple[str, tuple[int, ...]]] = ()

    def load(self, running: Sequence[Placement]) -> Load:
        return Load((0, 1, 2), self.idle, 1 << 40)

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        (name,) = (item.job.id for running, item in self.waiting if running is future)
        self.shifts = [*self.shifts, (name, tuple(cores))]

    def close(self, grace_s: float = 0.0) -> None:
        pass


Tell = Callable[[Any], None]


@dataclass
class Prompt:
    """Answers at once what `behaviour` says of the n-th placement."""

    runs_in_submit, batch_seconds = False, None

    behaviour: Callable[[int, Sequence[Task], Tell], Any]
    cores: tuple[int, ...]
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    placed: list[Placement] = field(default_factory=list)
    now: float = 0.0

    def clock(self) -> float:
        return self.now

    def load(self, running: Sequence[Placement]) -> Load:
        self.now += 1.0
        return Load(self.cores, self.cores, 1 << 40)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        future: Future[Answer] = Future()
        assert tuple(task.job.id for task in tasks) == placement.jobs
        self.placed.append(placement)
        found = self.behaviour(len(self.placed), tasks, self.inbox.put)
        if isinstance(found, BaseException):
            future.set_exception(found)
        else:
            future.set_result(Answer(found, pid=1))
        return future

    def close(self, grace_s: float = 0.0) -> None:
        pass


@dataclass
class Recording:
    """A watch that writes down."""

    results: list[Result] = field(default_factory=list)
    news: list[RunEvent] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)

    def placed(self, placement: Placement) -> None:
        self.placements.append(placement)

    def heard(self, news: RunEvent) -> None:
        self.news.append(news)

    def ended(self, result: Result) -> None:
        self.results.append(result)

    def ticked(self, load: Load) -> None:
        assert load.cores


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """A fake world needs no waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynckfold.sweep.loop.TICK_SECONDS", 0.001)
        yield


@pytest.fixture
def store(root: Path) -> Iterator[RunStore]:
    yield from open_store(root)


def plan_of(models: Sequence[str], folds: Sequence[Fold]) -> Plan:
    jobs, digest = make_jobs(models, ["cosine"], folds, 0), folds_fingerprint(folds)
    params, scoring = TrainerParams(epochs=1), ("accuracy",)
    return Plan(jobs, params, 4, 1, 0, "cpu", scoring, "data", digest, ("0", "1"))


def open_store(
    root: Path,
    folds: int = 3,
    models: Sequence[str] = ("A", "B"),
    groups: tuple[tuple[str, ...], ...] = (),
    samples: int = 12,
) -> Iterator[RunStore]:
    targets = np.arange(samples) % 2
    made = make_folds(samples, targets, folds)
    with RunStore.hold(root) as held:
        held.begin(replace(plan_of(models, made), groups=groups), made, targets)
        yield held


def set_full(store: RunStore, full: bool) -> None:
    """Let SQLite find its disk full at the next page that it needs, or not any more."""
    store.file.connection.execute(f"PRAGMA max_page_count = {1 if full else 1 << 30}")


def driven(
    store: RunStore, engine: Any, like: Request | None = None, **changes: Any
) -> tuple[Sweep, Recording]:
    """Return a sweep on an engine, all jobs of which ask for the same."""
    watch, like = Recording(), like or Request("", 1.0)
    requests = {job.id: replace(like, job_id=job.id) for job in store.reader.plan.jobs}
    made = Sweep(
        store, engine, engine.inbox, requests, lambda result: result, watch, engine.clock, **changes
    )
    return made, watch


def sweep(
    store: RunStore,
    behaviour: Behaviour = done,
    memory: int = 0,
    like: Request | None = None,
    **changes: Any,
) -> tuple[Sweep, FakeEngine, Recording]:
    engine = FakeEngine(behaviour, queue.SimpleQueue(), **changes)
    made, watch = driven(store, engine, like or Request("", 1.0, memory=memory))
    return made, engine, watch


@pytest.mark.damages("the checkpoints are named, not written")
def test_old_checkpoint_files_are_removed_and_two_stay(store: RunStore) -> None:
    name = "A/cosine/fold-0"
    files = [f"c{number}" for number in range(4)]
    for file in files:
        (store.root / file).write_text(file)

    def saves(task: Task) -> Any:
        if task.job.id == name:
            for number, file in enumerate(files):
                made._inbox.put(NewCheckpoint(CheckpointRef(name, 1, number, 0, file, "s", 1)))
        return done(task)

    made, _, _ = sweep(store, saves)
    made.run()
    assert [file for file in files if (store.root / file).exists()] == ["c2", "c3"]


def test_a_gpu_out_of_memory_is_retried_alone_on_a_gpu_and_others_go_on(store: RunStore) -> None:
    greedy, beside = "A/cosine/fold-0", []

    def full(task: Task) -> Any:
        if task.job.id == greedy and task.attempt == 1:
            error = "OutOfMemoryError: CUDA out of memory"
            return RetryableFailure("gpu_oom", Result(greedy, 1, FAILED, error=error))
        if task.job.id == greedy:
            beside.append([other.job.id for _, other in engine.waiting])
        return replace(done(task), peak_gpu_memory=3 * GIB)

    gpus = (Gpu(0, 20 * GIB, 20 * GIB), Gpu(1, 20 * GIB, 20 * GIB))
    like = Request("", 1.0, gpu=True, gpu_memory=GIB, gpu_share=0.45)
    made, engine, watch = sweep(store, full, like=like, gpus=gpus, cores=(0, 1, 2, 3))
    made.run()
    assert store.reader.counts()["done"] == 6
    again = [item for item in watch.placements if item.jobs == (greedy,)]
    assert [(item.alone, item.gpu_share) for item in again] == [(False, 0.45), (False, 1.0)]
    (event,) = [item for item in store.reader.events() if item.kind == "oom_retry"]
    assert event.text.endswith("retried alone on a GPU")
    # What the first job of a model took is expected of the others.
    expected = 3 * GIB + GPU_CONTEXT_BYTES
    assert {item.gpu_memory for item in watch.placements} == {GIB, expected}
    assert again[1].gpu_memory == expected
    (result,) = [item for item in watch.results if item.job_id == greedy]
    assert result.peak_gpu_memory == 3 * GIB


class EndsNothing(FakeEngine):
    def load(self, running: Sequence[Placement]) -> Load:
        return Load(self.cores, self.cores, 1 << 40, self.gpus)


def on_a_gpu(store: RunStore, **request: Any) -> tuple[Any, FakeEngine]:
    """A step after some events, which returns what started so far; and its engine."""
    inbox = queue.SimpleQueue[Any]()
    peaks = (0, GIB, GIB)  # by fold
    engine = EndsNothing(
        lambda task: replace(done(task), peak_gpu_memory=peaks[task.job.fold]), inbox, (*range(8),)
    )
    engine.gpus = (Gpu(0, 80 * GIB, 80 * GIB),)
    made, watch = driven(store, engine, Request("", 1.0, gpu=True, gpu_memory=GIB, **request))

    def step(**shares: float) -> str:
        for name, value in shares.items():
            inbox.put(GpuShare(f"{name[0]}/cosine/fold-{name[1]}", value))
        made.step(0.0)
        made.step(0.0)
        pairs = zip(watch.placements, engine.started, strict=True)
        return ", ".join(
            f"{task.job.model}{task.job.fold} {item.gpu_share}{' measures' * task.measures_gpu}"
            for item, task in pairs
        )

    return step, engine


def test_jobs_start_beside_others_while_these_leave_the_gpu_idle(store: RunStore) -> None:
    step, _ = on_a_gpu(store, gpu_share=0.45, measures_gpu=True)
    started = "A0 0.45 measures, A1 0.45 measures"
    assert step() == started
    # The first of a model counts, for what runs and what waits: 0.2, 0.3, 0.75.
    started += ", A2 0.1, B0 0.45 measures, B1 0.45 measures"
    assert step(A1=0.1, A0=0.8) == step(B0=0.95) == started
    events = [item for item in store.reader.events() if item.kind == "gpu_share"]
    assert [item.job_id for item in events] == ["A/cosine/fold-1", "B/cosine/fold-0"]
    assert events[0].text == "its steps keep a GPU busy for 10.0% of their time"


def test_a_job_that_has_its_gpu_alone_keeps_it_and_later_ones_share_it(store: RunStore) -> None:
    """Its memory has no limit, and is not known before one ends."""
    step, engine = on_a_gpu(store, gpu_share=0.9, measures_gpu=True)
    assert step(A0=0.2) == "A0 0.9 measures"
    engine.end(engine.waiting.pop())
    assert step() == "A0 0.9 measures, A1 0.9"
    engine.end(engine.waiting.pop())
    assert step() == "A0 0.9 measures, A1 0.9, A2 0.2"


def test_a_fixed_number_of_jobs_on_a_gpu_stays(store: RunStore) -> None:
    step, _ = on_a_gpu(store, gpu_share=0.45)
    assert step() == step(A0=0.1) == "A0 0.45, A1 0.45"


def test_out_of_memory_alone_is_a_failure_with_its_peak(store: RunStore) -> None:
    def killed(task: Task) -> Any:
        return WorkerDiedError(7, "SIGKILL, out of memory", "oom", 300 << 20)

    made, engine, _ = sweep(store, killed)
    made.run()
    assert len(engine.started) == 12
    result = store.reader.results()["A/cosine/fold-0"]
    assert result.status == FAILED
    assert "2 attempts: oom, oom; peak memory 300 MiB" in result.error
    assert result.peak_memory == 300 << 20


def test_what_one_worker_cannot_store_keeps_no_other_from_it(store: RunStore) -> None:
    made, engine, _ = sweep(store)
    made.step(0.0)
    (first, _), (second, task) = engine.waiting
    engine.waiting = []
    first.set_exception(StorageError(28, "full"))
    second.set_result(Answer([done(task)], 1))
    with pytest.raises(StorageError, match="full"):
        made.run()
    assert list(store.reader.finished()) == [task.job.id]


def test_what_a_worker_cannot_unpack_fails_its_job_with_the_traceback(store: RunStore) -> None:
    made, engine, _ = sweep(store, lambda task: UnpackError("ImportError: no module", "trace"))
    made.run()
    assert store.reader.counts()["failed"] == 6
    assert len(engine.started) == 6  # not tried again: it would fail again
    assert store.reader.results()["A/cosine/fold-0"].traceback == "trace"


def test_our_own_kill_at_the_end_is_no_verdict_on_a_job(store: RunStore) -> None:
    """A job that died twice does not stop in time after Ctrl-C: it is tried again next time."""
    name = "A/cosine/fold-0"

    def deadly(task: Task) -> Any:
        if task.job.id == name and task.attempt == 3:
            raise KeyboardInterrupt
        return WorkerDiedError(7, "SIGKILL") if task.job.id == name else done(task)

    made, engine, _ = sweep(store, deadly)

    def kill(grace_s: float = 0.0) -> None:
        for future, _ in made._running.items():
            future.set_exception(WorkerDiedError(7, "SIGKILL"))

    engine.close = kill  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert name not in store.reader.finished()
    outcomes = [item.outcome for item in store.reader.attempts() if item.job_id == name]
    assert outcomes == ["died", "died", "interrupted"]


def test_every_attempt_knows_what_its_job_waited_for(store: RunStore) -> None:
    """Two cores for six jobs; one of them dies once."""

    def first_dies(task: Task) -> Any:
        if task.job.id == "A/cosine/fold-0" and task.attempt == 1:
            return WorkerDiedError(7, "SIGKILL")
        return done(task)

    made, _, _ = sweep(store, first_dies, memory=3)
    made.run()
    placed = {(item.job_id, item.attempt): item for item in store.reader.attempts()}
    assert {item.memory for item in placed.values()} == {3}
    assert placed["A/cosine/fold-0", 1].waits == ()
    again = placed["A/cosine/fold-0", 2].waits
    assert again[0].text == "its pause after attempt 1 (died)"
    assert again[0].seconds >= 0.5
    (last,) = placed["B/cosine/fold-2", 1].waits
    assert (last.kind, last.text) == ("cores", "cores: 2 of 2 busy with own jobs")
    assert last.seconds > 0
    assert store.reader.waiting is None
    assert not [event for event in store.reader.events() if event.kind == "placed"]
