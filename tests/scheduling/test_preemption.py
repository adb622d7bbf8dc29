"""Running jobs make room for others: they move, pause and go on, and change no bit by it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asynckfold import AsyncKFold, InputError
from asynckfold.cli import main
from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import Started, Task
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.result import DONE, Result
from asynckfold.results.report.charts.timeline import _lanes
from asynckfold.results.report.summary import summarize
from asynckfold.results.utilization import packing_of
from asynckfold.scheduling.place import place
from asynckfold.scheduling.preemption import Held, yielded
from asynckfold.store import RunStore
from asynckfold.sweep.loop import Sweep
from asynckfold.system.limits import Host, allowed_cores
from asynckfold.system.machine import Machine
from tests.faults.test_other_programs import (
    HOG,
    HOG_SECONDS,
    Works,
    quiet_machine,
    skip_if_others_came,
)
from tests.leftovers import gone
from tests.nursery import Nursery
from tests.results.test_utilization import CHOICE, FOLDS, PLAN, TARGETS
from tests.size import examples
from tests.sweep.test_loop import FakeEngine, Recording, done, open_store, store
from tests.synthetic import FakeClockStore
from tests.system.fakes import FakeMachine
from tests.system.test_hysteresis import CORES, TICK, Wave, most_in_a_minute, waves
from tests.toy import Tiny, adam, samples, task, toy_bundle

__all__ = ["quiet_machine", "store"]  # fixtures

# The rule


@st.composite
def machines(draw: st.DrawFn) -> tuple[dict[str, Held], Load, list[int]]:
    """Jobs that hold each core once, cores that are idle now, and cores of jobs about to start."""
    cores = draw(st.permutations(range(8)))
    running, at = {}, 0
    for name in "abcdef"[: draw(st.integers(0, 6))]:
        width = draw(st.integers(1, 3))
        if at + width > len(cores):
            break
        running[name] = Held(tuple(cores[at : at + width]), draw(st.booleans()))
        at += width
    fixed = cores[at : at + draw(st.integers(0, 2))]
    idle = draw(st.permutations(range(8)))[: draw(st.integers(0, 8))]
    return running, Load(tuple(range(8)), tuple(idle), 1), fixed


def after(running: Mapping[str, Held], changes: Mapping[str, tuple[int, ...]]) -> dict[str, Held]:
    return {
        name: Held(changes[name] or held.cores, not changes[name]) if name in changes else held
        for name, held in running.items()
    }


@given(machines())
def test_laws_of_making_room(machine: tuple[dict[str, Held], Load, list[int]]) -> None:
    running, load, fixed = machine
    changes = yielded(running, load, fixed)
    found = after(running, changes)
    active = [held for held in found.values() if not held.paused]
    # At least one goes on, and nothing that is not disturbed changes.
    assert active or not running
    calm = {
        name for name, held in running.items() if not held.paused and {*held.cores} <= {*load.idle}
    }
    assert not calm & changes.keys()
    # No core twice, as many cores as before, and beside others nobody but the only one.
    cores = [core for held in active for core in held.cores]
    assert len(set(cores)) == len(cores)
    assert all(len(found[name].cores) == len(held.cores) for name, held in running.items())
    assert len(active) == 1 or all({*held.cores} <= {*load.idle} for held in active)
    # What moves does not go to a core that is taken.
    assert not {core for name in changes for core in changes[name]} & {*fixed} or len(active) == 1
    # It settles at once.
    assert yielded(found, load, fixed) == {}


@given(waves, st.integers(1, 2), st.booleans())
@settings(max_examples=examples(50))
def test_at_most_two_changes_a_minute_whatever_others_do(
    others: list[Wave], threads: int, quota: bool
) -> None:
    fake, host = FakeMachine(CORES), Host(Path("/no"), Path("/no"), {}, lambda: range(CORES))
    found = Machine(
        "cpu", host=host, readers=fake.readers(), clock=fake.clock, yields=True, reserve_cores=quota
    )
    running: dict[str, Held] = {}
    pending = [Request(f"{number:02}", 1.0, threads) for number in range(20)]
    begun, moments = fake.now, []
    while fake.now - begun < 380:
        now = fake.now - begun
        fake.run(
            TICK,
            foreign={
                core: min(1.0, sum(wave.at(now) for wave in others if wave.core == core))
                for core in range(CORES)
            },
        )
        held = [Placement((name,), item.cores, threads) for name, item in running.items()]
        load = found.load(running=held)
        changes = yielded(running, load)
        running = after(running, changes)
        held = [Placement((name,), item.cores, threads) for name, item in running.items()]
        placed = place(pending, held, load)
        running |= {item.jobs[0]: Held(item.cores) for item in placed}
        pending = [item for item in pending if item.job_id not in running]
        if changes or placed:
            moments.append(now)
    # Where it begins, the first job starts before anything is known of the cores.
    assert most_in_a_minute([moment for moment in moments if moment > 1]) <= 2
    assert all(not held.paused for held in running.values())


# The sweep


class Moving(FakeEngine):
    """Ends nothing by itself; its cores are as idle as it is told."""

    idle: tuple[int, ...] = (0, 1, 2)
    shifts: Sequence[tuple[str, tuple[int, ...]]] = ()

    def load(self, running: Sequence[Placement]) -> Load:
        return Load((0, 1, 2), self.idle, 1 << 40)

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        (name,) = (item.job.id for running, item in self.waiting if running is future)
        self.shifts = [*self.shifts, (name, tuple(cores))]


def test_jobs_move_pause_and_go_on_as_others_come_and_go(store: RunStore) -> None:
    names = [job.id for job in store.reader.plan.jobs][:3]
    engine = Moving(done, queue.SimpleQueue())
    requests = {job.id: Request(job.id, 1.0) for job in store.reader.plan.jobs}
    sweep = Sweep(
        store, engine, engine.inbox, requests, lambda result: result, Recording(), yields=True
    )

    def see(*idle: int) -> list[tuple[str, tuple[int, ...]]]:
        engine.idle, engine.shifts = idle, []
        sweep.step(0.001)
        return [*engine.shifts]

    engine.idle = (0, 1)
    sweep.step(0.001)
    assert [item.job.id for _, item in engine.waiting] == names[:2]
    assert see(1, 2) == []  # no worker has it in hand yet
    for _, item in engine.waiting:
        engine.inbox.put(Started(item.job.id, 1, 7))
    see(0, 1)
    assert see(1, 2) == [(names[0], (2,))]
    assert see(1) == [(names[0], ())]
    assert see() == []  # one goes on beside others
    assert see(0) == [(names[1], (0,))]
    assert len(engine.waiting) == 2  # nothing starts while one pauses
    engine.end(engine.waiting.pop(1))
    assert see() == []  # its end is heard now
    assert see() == [(names[0], (2,))]
    engine.end(engine.waiting.pop(0))
    sweep.step(0.001)
    kinds = [event.kind for event in store.reader.events()]
    assert [kind for kind in kinds if kind in ("moved", "paused", "resumed")] == [
        "moved", "paused", "moved", "resumed",
    ]  # fmt: skip
    assert store.reader.results()[names[0]].cores == (2,)
    assert store.reader.results()[names[1]].cores == (0,)
    sweep.leave()


@dataclass
class Job:
    """What runs in the fake world, and on which cores."""

    placement: Placement
    cores: tuple[int, ...]
    paused: bool = False


@dataclass
class World:
    """An engine that ends nothing by itself; its cores are as idle as it is told."""

    idle: tuple[int, ...] = tuple(range(CORES))
    memory: int = 1 << 40
    now: float = 0.0
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    running: dict[Future[Answer], tuple[Job, Task]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def load(self, running: Sequence[Placement]) -> Load:
        self.now += 0.1
        told = {core for item in running for core in item.cores}
        assert told >= {core for job, _ in self.running.values() for core in job.cores}
        return Load(tuple(range(CORES)), self.idle, self.memory)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.running[future] = (Job(placement, placement.cores), tasks[0])
        self.inbox.put(Started(tasks[0].job.id, tasks[0].attempt, 7))
        return future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        if future in self.running:
            job, _ = self.running[future]
            job.paused, job.cores = not cores, tuple(cores) or job.cores

    def check(self) -> None:
        jobs = [job for job, _ in self.running.values() if not job.paused]
        held = [core for job in jobs for core in job.cores]
        assert len(set(held)) == len(held)
        assert all(len(job.cores) == job.placement.threads for job in jobs)

    def end(self, future: Future[Answer], error: Exception | None = None) -> None:
        _, task = self.running.pop(future)
        if error is None:
            future.set_result(Answer([done(task)], pid=1))
        else:
            future.set_exception(error)

    def close(self, grace_s: float = 0.0) -> None:
        pass


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["end", "die"]), st.integers(0, 5)),
    st.tuples(st.just("time"), st.sampled_from([0, 1, 3, 61])),
    st.tuples(st.just("idle"), st.integers(0, 2**CORES - 1)),
    st.tuples(st.just("memory"), st.sampled_from([0, 30, 1 << 40])),
)


@given(st.lists(ACTIONS, max_size=60), st.lists(st.integers(1, 2), min_size=6, max_size=6))
@settings(max_examples=60)
def test_no_core_is_held_twice_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], threads: list[int]
) -> None:
    for opened in open_store(tmp_path_factory.mktemp("run") / "run"):
        happens(opened, actions, threads)


def happens(store: RunStore, actions: Sequence[tuple[str, int]], threads: Sequence[int]) -> None:
    store.file.connection.execute("PRAGMA synchronous=OFF")
    world = World()
    requests = {
        job.id: Request(job.id, float(number), count, memory=10)
        for number, (job, count) in enumerate(zip(store.reader.plan.jobs, threads, strict=True))
    }
    sweep = Sweep(
        store, world, world.inbox, requests, lambda result: result, Recording(), world.clock,
        yields=True,
    )  # fmt: skip
    for what, which in actions:
        jobs = list(world.running)
        if what == "time":
            world.now += which
        elif what == "idle":
            world.idle = tuple(core for core in range(CORES) if which >> core & 1)
        elif what == "memory":
            world.memory = which
        elif jobs:
            error = WorkerDiedError(9, "SIGKILL") if what == "die" else None
            world.end(jobs[which % len(jobs)], error)
        if sweep.unfinished:
            sweep.step(0.0)
            world.check()
    world.idle, world.memory = tuple(range(CORES)), 1 << 40
    for _ in range(200):
        if not sweep.unfinished:
            break
        world.now += 3
        sweep.step(0.0)
        assert not world.running or any(not job.paused for job, _ in world.running.values())
        if world.running:
            world.end(next(iter(world.running)))
    assert not sweep.unfinished, "it does not end"
    assert store.reader.counts()["pending"] == 0


def test_cores_to_which_a_job_moved_are_told_counted_and_drawn(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, other = "A/cosine/fold-0", "B/cosine/fold-0"
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.begin(PLAN, FOLDS, TARGETS, {"decision": CHOICE.to_dict()})
        store.clock = 1.0
        number = store.start_attempt(name, (0,), 1, "cpu", 5.0)
        store.start_attempt(other, (1,), 1, "cpu", 5.0)
        store.clock = 3.0
        store.end_attempt(other, 1, "died")
        store.note_cores(name, number, (1,))
        store.flush()
        assert main(["status", str(root), "--json"]) == 0
        (job,) = json.loads(capsys.readouterr().out)["running_jobs"]
        store.clock = 8.0
        store.record(Result(name, number, DONE, {"accuracy": 1.0}))
        assert "held" not in [event.kind for event in store.events()]
        found = packing_of(store)
        (item,) = [item for item in store.attempts() if item.job_id == name]
        bars = summarize(store).bars
    assert (job["cores"], job["threads"]) == ([1], 1)
    assert item.changes == ((3.0, (1,)),)
    assert (item.cores, item.last_cores) == ((0,), (1,))
    assert found is not None
    assert found.core_seconds == pytest.approx(7 + 2)
    assert {
        label: sorted((piece.start, piece.end) for piece in row) for label, row in _lanes(bars)
    } == {
        "core 0": [(1, 3)],
        "core 1": [(1, 3), (3, 8)],
    }


# Real workers


class Slow(Tiny):
    """Takes 20 ms a batch."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.02)
        return super().forward(inputs)


def look(running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
    return Load((0,), (0,), 1 << 30)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def affinities(pid: int) -> set[frozenset[int]]:
    threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    return {frozenset(os.sched_getaffinity(thread)) for thread in threads}


def test_a_paused_job_hangs_not_and_comes_to_the_same_bits(root: Path, pool: WorkerPool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with toy_bundle(root, models={"Slow": Slow}, epochs=6) as (bundle, data):
        job = bundle.plan.jobs[0]
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool, 1.0)
        placement = Placement((job.id,), (cores[0],))
        usual = engine.submit(placement, [task(job)]).result(60).results[0]
        future = engine.submit(placement, [replace(task(job), attempt=2)])
        (worker,) = pool.workers
        before = worker.heartbeat.value
        wait_for(lambda: worker.heartbeat.value > before + 6)
        engine.shift(future, ())
        wait_for(lambda: worker.heartbeat.paused)
        sign, until = worker.heartbeat.value, time.monotonic() + 2.5
        while time.monotonic() < until:
            engine.load([placement])
            time.sleep(0.1)
        assert worker.heartbeat.value == sign
        assert not future.done()
        engine.shift(future, cores[-1:])
        wait_for(lambda: affinities(worker.pid) == {frozenset(cores[-1:])} or future.done())
        # It is watched again, and the time of its pause is not held against it.
        while not future.done():
            engine.load([placement])
            time.sleep(0.05)
        found = future.result().results[0]
        engine.close()
    assert (found.status, found.digest) == (DONE, usual.digest)


@pytest.mark.nightly
def test_a_pause_is_no_training_that_a_limit_counts(root: Path, pool: WorkerPool) -> None:
    limit_s = 5.0
    with toy_bundle(root, models={"Slow": Slow}, epochs=6) as (bundle, data):
        job, limited = bundle.plan.jobs[0], replace(bundle, job_timeout_s=limit_s)
        engine = ProcessEngine(limited, data.handle().fds, look, lambda news: None, pool)
        future = engine.submit(Placement((job.id,), ()), [task(job)])
        engine.shift(future, ())
        wait_for(lambda: any(worker.heartbeat.paused for worker in pool.workers))
        time.sleep(limit_s)
        engine.shift(future, sorted(os.sched_getaffinity(0)))
        (found,) = future.result(60).results
        engine.close()
    assert (found.status, found.error) == (DONE, "")


def test_a_paused_job_saves_itself_when_the_run_is_interrupted(
    root: Path, pool: WorkerPool
) -> None:
    with toy_bundle(root, models={"Slow": Slow}, epochs=50) as (bundle, data):
        job = bundle.plan.jobs[0]
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
        future = engine.submit(Placement((job.id,), ()), [task(job)])
        engine.shift(future, ())
        wait_for(lambda: any(worker.heartbeat.paused for worker in pool.workers))
        engine.close(30)
        assert future.result(1).results == [None]
        assert list((root / "Slow").rglob("checkpoint-*"))


@pytest.mark.nightly
def test_a_paused_worker_that_is_lost_is_told_as_ever(root: Path, pool: WorkerPool) -> None:
    with toy_bundle(root, models={"Slow": Slow}, epochs=50) as (bundle, data):
        job = bundle.plan.jobs[0]
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
        future = engine.submit(Placement((job.id,), ()), [task(job)])
        engine.shift(future, ())
        wait_for(lambda: any(worker.heartbeat.paused for worker in pool.workers))
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            future.result(60)
        engine.shift(future, (0,))  # too late, and no harm
        engine.close()


SWEEP = """
import sys, time
from pathlib import Path
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.jobs.placement import Placement
from tests.scheduling.test_preemption import Slow, look
from tests.toy import task, toy_bundle

with toy_bundle(Path(sys.argv[1]), models={"Slow": Slow}, epochs=500) as (bundle, data):
    pool = WorkerPool()
    engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
    job = bundle.plan.jobs[0]
    future = engine.submit(Placement((job.id,), ()), [task(job)])
    engine.shift(future, ())
    while not any(worker.heartbeat.paused for worker in pool.workers):
        time.sleep(0.01)
    print(pool.server_pid, pool.workers[0].pid, flush=True)
    time.sleep(600)
"""


def test_a_paused_worker_dies_with_its_server(root: Path, pool: WorkerPool) -> None:
    with toy_bundle(root, models={"Slow": Slow}, epochs=50) as (bundle, data):
        job = bundle.plan.jobs[0]
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
        future = engine.submit(Placement((job.id,), ()), [task(job)])
        engine.shift(future, ())
        wait_for(lambda: any(worker.heartbeat.paused for worker in pool.workers))
        paused = {worker.pid for worker in pool.workers}
        os.kill(pool.server_pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            future.result(60)
        assert gone(paused)
        engine.close()


@pytest.mark.nightly
@pytest.mark.crashes("the sweep is killed while a job pauses")
def test_a_paused_worker_dies_with_its_sweep(root: Path, warm: Nursery) -> None:
    sweep = warm.start(["-c", SWEEP, root], root.with_name("printed"))
    wait_for(lambda: len(sweep.printed().split()) == 2)
    left = set(map(int, sweep.printed().split()))
    sweep.kill()
    sweep.wait()
    assert len(left) == 2
    assert gone(left)


def test_a_run_that_cannot_yield_is_refused(root: Path) -> None:
    for given_settings, told in (
        ({"yield_to_others": "always"}, "must be True or False: received 'always'"),
        ({"yield_to_others": True, "parallelize": False}, "parallelize=False starts none"),
    ):
        with pytest.raises(InputError, match=told):
            AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, **given_settings)


class Waits(Tiny):
    """Goes on after its fourth batch once somebody was asked to pause; a dry run takes two."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker, self.steps = marker, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps > 4:
            wait_for(self.marker.exists)
        return super().forward(inputs)


class Visitor:
    """Comes to the last core when two jobs run, and leaves when one of them paused for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, marker: Path) -> None:
        self.looks_beside, self.came, self.paused = 0, False, False
        load, shift = Machine.load, ProcessEngine.shift

        def seen(machine: Machine, n_jobs: Any, running: Any, own: Any, **rest: Any) -> Load:
            self.came = self.came or len(running) == 2
            self.looks_beside += self.paused
            return load(machine, n_jobs, running, own, **rest)

        def shifted(engine: ProcessEngine, future: Any, cores: Sequence[int]) -> None:
            shift(engine, future, cores)
            self.paused = self.paused or not cores
            marker.touch()

        monkeypatch.setattr(Machine, "load", seen)
        monkeypatch.setattr(Machine, "_left", lambda machine: self.cores())
        monkeypatch.setattr(ProcessEngine, "shift", shifted)

    def cores(self) -> frozenset[int]:
        here = self.came and self.looks_beside < 8
        return frozenset({max(allowed_cores())} if here else ())


def train(root: Path, model: Callable[[], nn.Module], epochs: int, **given: Any) -> Any:
    kfold = AsyncKFold(
        2, samples(60), root, nn.CrossEntropyLoss(), 10,
        baseline=None, verbose=0, threads_per_job=1, **given,
    )  # fmt: skip
    return kfold({"model": model}, ["constant"], adam, {"epochs": epochs})


def shifts_in(root: Path) -> list[str]:
    with RunStore.read(root) as found:
        kinds = [event.kind for event in found.events()]
    return [kind for kind in kinds if kind in ("paused", "resumed", "moved")]


@pytest.fixture
def no_worker_stays() -> Iterator[None]:
    yield
    pools.close_warm()


needs_two_cores = pytest.mark.skipif(
    len(allowed_cores()) != 2, reason="needs two cores, and none to move to"
)


@needs_two_cores
@pytest.mark.usefixtures("no_worker_stays")
def test_a_run_in_which_a_job_paused_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "paused"
    with monkeypatch.context() as patch:
        Visitor(patch, marker)
        polite = train(
            tmp_path / "polite", lambda: Waits(marker), 3, yield_to_others=True, n_jobs=2
        )
    usual = train(tmp_path / "usual", lambda: Waits(marker), 3, n_jobs=2)
    assert shifts_in(tmp_path / "polite") == ["paused", "resumed"]
    assert shifts_in(tmp_path / "usual") == []
    assert polite.fingerprint == usual.fingerprint


@pytest.mark.nightly
@needs_two_cores
@pytest.mark.usefixtures("quiet_machine", "no_worker_stays")
def test_a_job_pauses_for_a_busy_process_and_goes_on_when_it_ends(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    # Others come when both jobs have trained for two seconds: how long a start takes, nobody knows.
    logs = str(tmp_path / "polite" / "model" / "constant" / "fold-*" / "log.txt")
    code = (
        f"import glob, time\nwhile len(glob.glob({logs!r})) < 2: time.sleep(0.1)\n"
        f"time.sleep(2)\nend = time.monotonic() + {HOG_SECONDS}\n{HOG % core}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code.replace("while True", "while time.monotonic() < end")],
        stdout=subprocess.DEVNULL,
    ):
        train(tmp_path / "polite", lambda: Works(8, 3), 120, yield_to_others=True)
    kinds = shifts_in(tmp_path / "polite")
    if kinds != ["paused", "resumed"]:
        skip_if_others_came(tmp_path / "polite", known=HOG_SECONDS)
    assert kinds[:2] == ["paused", "resumed"]
    assert len(kinds) <= 4
