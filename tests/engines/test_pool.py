"""Worker processes: how they end, and that nothing of them stays. Real processes, real signals."""

from __future__ import annotations

import errno
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckfold import TrainerParams
from asynckfold.engines import pool as pools
from asynckfold.engines import warm_pool
from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import Worker, WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.engines.server_process import start_failure
from asynckfold.errors import UnpackError, WorkerDiedError
from asynckfold.jobs.placement import Command, Load, Placement
from asynckfold.jobs.result import DONE
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.isolation.torch_settings import SHARE, denormals_are_flushed
from tests.fake_gpu import OnFakeGpu
from tests.leftovers import alive, descendants, gone
from tests.started import Nursery
from tests.toy import Tiny, task, toy_bundle


def look(running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
    return Load((0,), (0,), 1 << 30)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


class Sleeps(Tiny):
    """Takes a while without using a core."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.05)
        return super().forward(inputs)


class Knows(Tiny):
    """Can be made only where a module was imported before."""

    def __init__(self) -> None:
        assert "colorsys" in sys.modules
        super().__init__()


class Flushes(Tiny):
    """Fails where a thread of its process does not take tiny numbers for 0."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 2
        assert denormals_are_flushed(2 * SHARE)
        return super().forward(inputs)


class Kills(Tiny):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return inputs


class Exits(Tiny):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        os._exit(0)


class Forks(Tiny):
    """Starts a process of its own and waits, as a DataLoader with workers does."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
        return inputs


def start(
    pool: WorkerPool, root: Path, model: type[Tiny], threads: int = 1, **changes: Any
) -> tuple[ProcessEngine, Any, Any]:
    context = toy_bundle(root, models={"model": model}, **changes)
    bundle, data = context.__enter__()
    engine = ProcessEngine(bundle, data.handle().fds, look, queue.SimpleQueue().put, pool)
    job = bundle.plan.jobs[0]
    future = engine.submit(Placement((job.id,), (), threads), [task(job)])
    return engine, future, context


def busy_worker(pool: WorkerPool) -> Worker:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for worker in pool.workers:
            if worker.pid and worker.busy:
                return worker
        time.sleep(0.01)
    raise AssertionError("no worker got busy")


@pytest.mark.parametrize(
    ("model", "cause"), [(Kills, "SIGKILL"), (Exits, "exit code 0 without an answer")]
)
def test_a_dead_worker_is_reported_with_its_cause(
    pool: WorkerPool, root: Path, model: type[Tiny], cause: str
) -> None:
    engine, future, context = start(pool, root, model)
    with pytest.raises(WorkerDiedError) as caught:
        future.result(60)
    assert caught.value.cause == cause
    engine.close()
    context.__exit__(None, None, None)


def test_killing_one_worker_from_outside_leaves_the_other_alone(
    pool: WorkerPool, root: Path
) -> None:
    engine, first, context = start(pool, root, Sleeps)
    victim = busy_worker(pool)
    bundle = context.gen.gi_frame.f_locals["bundle"]
    job = bundle.plan.jobs[1]
    second = engine.submit(Placement((job.id,), ()), [task(job)])
    os.kill(victim.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        first.result(10)
    assert time.monotonic() - begun < 2
    answer: Answer = second.result(60)
    assert answer.results[0].status == DONE
    engine.close()
    context.__exit__(None, None, None)


def test_a_dead_server_ends_its_workers_and_is_replaced(pool: WorkerPool, root: Path) -> None:
    engine, future, context = start(pool, root, Sleeps, epochs=1000)
    worker = busy_worker(pool)
    os.kill(pool.server.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        future.result(10)
    assert gone({worker.pid}, 2)
    bundle = context.gen.gi_frame.f_locals["bundle"]
    job = bundle.plan.jobs[1]
    again = engine.submit(Placement((job.id,), ()), [task(job)])
    assert alive(pool.server.pid)
    engine.close()
    with pytest.raises(WorkerDiedError):
        again.result(10)
    context.__exit__(None, None, None)


def test_close_takes_along_what_workers_started(pool: WorkerPool, root: Path) -> None:
    engine, future, context = start(pool, root, Forks)
    worker = busy_worker(pool)
    deadline = time.monotonic() + 30
    while not descendants(worker.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    family = descendants(worker.pid) | {worker.pid}
    assert len(family) == 2
    engine.close()
    assert gone(family)
    with pytest.raises(WorkerDiedError):
        future.result(10)
    pool.close()
    context.__exit__(None, None, None)


@pytest.mark.parametrize("closing", [False, True])
def test_a_dead_server_takes_along_what_workers_started(
    pool: WorkerPool, root: Path, closing: bool
) -> None:
    engine, future, context = start(pool, root, Forks)
    worker = busy_worker(pool)
    deadline = time.monotonic() + 30
    while not descendants(worker.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    family = descendants(worker.pid) | {worker.pid}
    assert len(family) == 2
    os.kill(pool.server.pid, signal.SIGKILL)
    if closing:
        pool.close()
    assert gone(family)
    with pytest.raises(WorkerDiedError):
        future.result(10)
    assert not pool.healthy
    engine.close()
    context.__exit__(None, None, None)


def test_close_with_grace_lets_a_job_save_itself(pool: WorkerPool, root: Path) -> None:
    engine, future, context = start(pool, root, Sleeps, epochs=1000)
    worker = busy_worker(pool)
    folder = root / "model" / "cosine" / "fold-0"
    deadline = time.monotonic() + 30
    while not (folder / "log.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    engine.close(grace_s=20)
    assert future.result(0).results == [None]
    assert list(folder.glob("checkpoint-*"))
    assert alive(worker.pid)  # warm for the next sweep
    context.__exit__(None, None, None)


class _Unfit:
    """Pickles, but cannot be unpickled."""

    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> None:
    raise LookupError("cannot be unpacked here")


def test_an_unpickling_error_is_reported_and_the_worker_lives(pool: WorkerPool, root: Path) -> None:
    with toy_bundle(root, criterion=_Unfit()) as (bundle, data):
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
        job = bundle.plan.jobs[0]
        with pytest.raises(UnpackError, match="LookupError"):
            engine.submit(Placement((job.id,), ()), [task(job)]).result(60)
        assert all(worker.alive for worker in pool.workers)
        engine.close()


def threads_of(pid: int, seconds: float = 5.0) -> int:
    """How many threads a process keeps: one that was joined may be on its way out."""
    deadline = time.monotonic() + seconds
    while True:
        found = len(list(Path(f"/proc/{pid}/task").iterdir()))
        if found == 1 or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def test_workers_have_one_thread_and_are_reused(pool: WorkerPool, root: Path) -> None:
    with toy_bundle(root) as (bundle, data):
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
        pids = []
        for job in bundle.plan.jobs:
            pids.append(engine.submit(Placement((job.id,), ()), [task(job)]).result(60).pid)
        assert len(set(pids)) == 1
        assert threads_of(pids[0]) == 1
        engine.close()


def test_a_job_with_a_process_on_a_gpu_has_a_worker_of_its_own(
    pool: WorkerPool, root: Path
) -> None:
    words = {"trainer": "averaging", "processes": 2, "epochs": 1}
    params = TrainerParams(**words, partition_size=20, gpu_partition_size=30)
    with toy_bundle(root, {"model": OnFakeGpu}, params=params) as (bundle, data):
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
        jobs, pids = bundle.plan.jobs, []
        usual = Placement((jobs[0].id,), (), command=Command.DRY_RUN)
        for placement in [
            usual,
            *(Placement((job.id,), (), 2, gpu=0, trainer="averaging") for job in jobs),
            usual,
        ]:
            tasks = [
                task(job) for job in jobs if placement is not usual and job.id in placement.jobs
            ]
            answer = engine.submit(placement, tasks).result(60)
            pids.append(answer.pid)
            assert all(item.status == DONE for item in answer.results if tasks)
        engine.close()
        logs = [(root / job.id / "log.txt").read_text() for job in jobs]
    first, *own, last = pids
    assert len({first, *own}) == 4
    assert last == first
    assert gone({*own})
    for pid, log in zip(own, logs, strict=True):
        assert "GPU 0 taken by " in log
        assert f", a child of {pid}:" in log


class WhereGpusAre(Tiny):
    """On a machine with GPUs, none of which the process of a job must see."""

    def __init__(self) -> None:
        super().__init__()
        process.has_gpu = lambda: True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        return super().forward(inputs)


def test_where_there_are_gpus_a_worker_that_forks_is_a_new_one_and_sees_none(
    pool: WorkerPool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "has_gpu", lambda: True)
    params = TrainerParams(trainer="hogwild", processes=2, epochs=1)
    pids = []
    with toy_bundle(root, {"model": WhereGpusAre}, params=params) as (bundle, data):
        engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
        for job in bundle.plan.jobs:
            placement = Placement((job.id,), (), 2, trainer="hogwild")
            answer = engine.submit(placement, [task(job)]).result(60)
            pids.append(answer.pid)
            assert [item.status for item in answer.results] == [DONE]
        engine.close()
    assert len({*pids}) == len(pids) > 1
    assert gone({*pids})


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (
            errno.EAGAIN,
            r"Raise the limit of processes \(ulimit -u.* \(ulimit -n\), or free memory;",
        ),
        (errno.EFBIG, r"Raise the limit of the size of a file \(ulimit -f\);"),
    ],
)
def test_a_refusal_names_what_helps(number: int, remedy: str) -> None:
    assert re.search(rf"{os.strerror(number)}\. {remedy} the same call", start_failure(number))


def test_the_warm_pool_is_taken_once_and_ends_after_its_time() -> None:
    pool = warm_pool.take()
    server = pool.server.pid
    warm_pool.give_back(pool, idle_s=600)
    assert warm_pool.take() is pool
    warm_pool.give_back(pool, idle_s=0.05)
    assert gone({server})
    other = warm_pool.take()
    assert other is not pool
    other.close()


SCRIPT = """
import os, queue, signal, sys, time
from pathlib import Path
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.jobs.placement import Placement
from tests.engines.test_pool import Forks, busy_worker, look
from tests.toy import task, toy_bundle

with toy_bundle(Path(sys.argv[1]), models={"model": Forks}) as (bundle, data):
    pool = WorkerPool()
    engine = ProcessEngine(bundle, data.handle().fds, look, lambda news: None, pool)
    job = bundle.plan.jobs[0]
    engine.submit(Placement((job.id,), ()), [task(job)])
    busy_worker(pool)
    print("busy", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_users_process_takes_everything_along(
    root: Path, number: int, warm: Nursery
) -> None:
    script = warm.start(["-c", SCRIPT, root], root.with_name("printed"))
    deadline = time.monotonic() + 30
    while script.printed() != "busy":
        assert script.poll() is None, script.printed()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while len(descendants(script.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    family = descendants(script.pid)
    assert len(family) == 3  # the server, a worker, and what the worker started
    script.send_signal(number)
    script.wait(10)
    assert gone(family)


@pytest.mark.parametrize(
    ("kills_before", "outcome", "told"),
    [(2, "died", "oom"), (3, "died", "died"), (2, "device_lost", "device_lost")],
)
def test_a_rank_killed_out_of_memory_is_told_from_a_dead_one(
    kills_before: int, outcome: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "was_short_of_memory", lambda before, peak: before < 3)
    here, _ = Pipe()
    worker = Worker(1, here, Heartbeat())
    worker._oom_kills = kills_before
    error = worker.loss("process 2 of the job ended (SIGKILL)", outcome)
    assert error.outcome == told
    assert "process 2 of the job ended (SIGKILL)" in error.cause
    assert ("out of memory" in error.cause) is (told == "oom")


def test_a_server_imports_for_its_workers_what_it_can(pool: WorkerPool, tmp_path: Path) -> None:
    sys.modules.pop("colorsys", None)
    pool.preload(["no_such_module", "colorsys"])
    engine, future, context = start(pool, tmp_path, Knows)
    assert [result.status for result in future.result(60).results] == [DONE]
    engine.close()
    context.__exit__(None, None, None)


def test_tiny_numbers_are_0_to_all_threads_of_a_worker(pool: WorkerPool, tmp_path: Path) -> None:
    engine, future, context = start(pool, tmp_path, Flushes, threads=2)
    assert [result.error for result in future.result(60).results] == [""]
    engine.close()
    context.__exit__(None, None, None)
