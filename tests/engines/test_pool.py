"""Worker processes: how they end, and that nothing of them stays. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckfold import TrainerParams
from asynckfold.engines import pool as pools
from asynckfold.engines import warm_pool
from asynckfold.engines.pool import Worker
from asynckfold.errors import UnpackError, WorkerDiedError
from asynckfold.jobs.placement import Command, Placement
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.torch_settings import SHARE, denormals_are_flushed
from tests.engines.own_pool import Sleeps, busy_worker, engine, submit
from tests.fake_gpu import OnFakeGpu
from tests.leftovers import alive, descendants, gone, until
from tests.started import Nursery
from tests.toy import Tiny


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


@pytest.mark.parametrize(
    ("model", "cause"), [(Kills, "SIGKILL"), (Exits, "exit code 0 without an answer")]
)
def test_a_dead_worker_is_reported_with_its_cause(
    root: Path, model: type[Tiny], cause: str
) -> None:
    with engine(root, model) as (made, _, bundle, _):
        with pytest.raises(WorkerDiedError) as caught:
            submit(made, bundle).result(60)
        assert caught.value.cause == cause


def test_a_dead_server_ends_its_workers_and_is_replaced(root: Path) -> None:
    with engine(root, Sleeps, epochs=1000) as (made, pool, bundle, _):
        future = submit(made, bundle)
        worker = busy_worker(pool)
        os.kill(pool.server.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            future.result(10)
        assert gone({worker.pid}, 2)
        again = submit(made, bundle, 1)
        assert alive(pool.server.pid)
        made.close()
        with pytest.raises(WorkerDiedError):
            again.result(10)


@pytest.mark.parametrize("end", ["engine closed", "server killed, pool closed"])
def test_what_workers_started_ends_with_them(root: Path, end: str) -> None:
    with engine(root, Forks) as (made, pool, bundle, _):
        future = submit(made, bundle)
        worker = busy_worker(pool)
        until(lambda: bool(descendants(worker.pid)), 30)
        family = descendants(worker.pid) | {worker.pid}
        assert len(family) == 2
        if end == "engine closed":
            made.close()
        else:
            os.kill(pool.server.pid, signal.SIGKILL)
            pool.close()
        assert gone(family)
        with pytest.raises(WorkerDiedError):
            future.result(10)
        assert pool.healthy is (end == "engine closed")


def test_close_with_grace_lets_a_job_save_itself(root: Path) -> None:
    with engine(root, Sleeps, epochs=1000) as (made, pool, bundle, _):
        future = submit(made, bundle)
        worker = busy_worker(pool)
        folder = root / "model" / "cosine" / "fold-0"
        until((folder / "log.txt").exists, 30)
        time.sleep(0.3)
        made.close(grace_s=20)
        assert future.result(0).results == [None]
        assert list(folder.glob("checkpoint-*"))
        assert alive(worker.pid)  # warm for the next sweep


class _Unfit:
    """Pickles, but cannot be unpickled."""

    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> None:
    raise LookupError("cannot be unpacked here")


def test_an_unpickling_error_is_reported_and_the_worker_lives(root: Path) -> None:
    with engine(root, Tiny, criterion=_Unfit()) as (made, pool, bundle, _):
        with pytest.raises(UnpackError, match="LookupError"):
            submit(made, bundle).result(60)
        assert all(worker.alive for worker in pool.workers)


def threads_of(pid: int, seconds: float = 5.0) -> int:
    """How many threads a process keeps: one that was joined may be on its way out."""
    deadline = time.monotonic() + seconds
    while True:
        found = len(list(Path(f"/proc/{pid}/task").iterdir()))
        if found == 1 or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def test_workers_have_one_thread_and_are_reused(root: Path) -> None:
    with engine(root, Tiny) as (made, _, bundle, _):
        pids = {submit(made, bundle, index).result(60).pid for index in range(3)}
        (pid,) = pids
        assert threads_of(pid) == 1


def test_a_job_with_a_process_on_a_gpu_has_a_worker_of_its_own(root: Path) -> None:
    words = {"trainer": "averaging", "processes": 2, "epochs": 1}
    params = TrainerParams(**words, partition_size=20, gpu_partition_size=30)
    with engine(root, OnFakeGpu, params=params) as (made, _, bundle, _):
        jobs = bundle.plan.jobs
        usual = Placement((jobs[0].id,), (), command=Command.DRY_RUN)
        first = made.submit(usual, []).result(60).pid
        answers = [
            submit(made, bundle, index, 2, gpu=0, trainer="averaging").result(60)
            for index in range(len(jobs))
        ]
        last = made.submit(usual, []).result(60).pid
        assert all(item.status == "done" for answer in answers for item in answer.results)
        logs = [(root / job.id / "log.txt").read_text() for job in jobs]
        pids = [answer.pid for answer in answers]
        assert len({first, *pids}) == 4
        assert last == first
        assert gone({*pids})
    for pid, log in zip(pids, logs, strict=True):
        assert "GPU 0 taken by " in log
        assert f", a child of {pid}:" in log


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
import sys, time
from pathlib import Path
from tests.engines.own_pool import busy_worker, engine, submit
from tests.engines.test_pool import Forks

with engine(Path(sys.argv[1]), Forks) as (made, pool, bundle, _):
    submit(made, bundle)
    busy_worker(pool)
    print("busy", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_users_process_takes_everything_along(
    root: Path, number: int, warm: Nursery
) -> None:
    script = warm.start(["-c", SCRIPT, root], root.with_name("printed"))
    until(lambda: script.printed() == "busy", 30)
    # The server, a worker, and what the worker started.
    until(lambda: len(descendants(script.pid)) == 3, 30)
    family = descendants(script.pid)
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


def test_tiny_numbers_are_0_to_all_threads_of_a_worker(root: Path) -> None:
    with engine(root, Flushes) as (made, _, bundle, _):
        assert submit(made, bundle, threads=2).result(60).results[0].error == ""
