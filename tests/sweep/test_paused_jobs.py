"""Paused and moved jobs with real workers: they change no bit and leave no process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, RunStore
from asynckfold.engines import warm_pool
from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.result import DONE
from asynckfold.system.limits import allowed_cores
from asynckfold.system.machine import Machine
from tests.leftovers import gone
from tests.started import Nursery
from tests.toy import Tiny, adam, samples, task, toy_bundle


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


@contextlib.contextmanager
def paused(
    root: Path, pool: WorkerPool, epochs: int = 50, limit_s: float | None = None
) -> Iterator[tuple[ProcessEngine, Future[Answer]]]:
    """Yield the engine of a job that pauses, and what the job comes to."""
    with toy_bundle(root, models={"Slow": Slow}, epochs=epochs) as (bundle, data):
        job, limited = bundle.plan.jobs[0], replace(bundle, job_timeout_s=limit_s)
        engine = ProcessEngine(limited, data.handle().fds, look, lambda news: None, pool)
        future = engine.submit(Placement((job.id,), ()), [task(job)])
        engine.shift(future, ())
        wait_for(lambda: any(worker.heartbeat.paused for worker in pool.workers))
        yield engine, future


@pytest.mark.nightly
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
    with paused(root, pool, 6, limit_s) as (engine, future):
        time.sleep(limit_s)
        engine.shift(future, sorted(os.sched_getaffinity(0)))
        (found,) = future.result(60).results
        engine.close()
    assert (found.status, found.error) == (DONE, "")


def test_a_paused_job_saves_itself_when_the_run_is_interrupted(
    root: Path, pool: WorkerPool
) -> None:
    with paused(root, pool) as (engine, future):
        engine.close(30)
        assert future.result(1).results == [None]
        assert list((root / "Slow").rglob("checkpoint-*"))


SWEEP = """
import sys, time
from pathlib import Path
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.jobs.placement import Placement
from tests.sweep.test_paused_jobs import Slow, look
from tests.toy import task, toy_bundle

with toy_bundle(Path(sys.argv[1]), models={"Slow": Slow}, epochs=500) as (bundle, data):
    pool = WorkerPool()
    engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
    job = bundle.plan.jobs[0]
    future = engine.submit(Placement((job.id,), ()), [task(job)])
    engine.shift(future, ())
    while not any(worker.heartbeat.paused for worker in pool.workers):
        time.sleep(0.01)
    print(pool.server.pid, pool.workers[0].pid, flush=True)
    time.sleep(600)
"""


def test_a_paused_worker_dies_with_its_server(root: Path, pool: WorkerPool) -> None:
    with paused(root, pool) as (engine, future):
        workers = {worker.pid for worker in pool.workers}
        os.kill(pool.server.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            future.result(60)
        assert gone(workers)
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


class Waits(Tiny):
    """Goes on after its fourth batch once somebody was asked to pause; a dry run takes three."""

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
    warm_pool.close_warm()


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
