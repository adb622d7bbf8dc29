"""User code that is no good guest of its process, and machines that start no further one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckfold import StorageError
from asynckfold.engines.process import ProcessEngine
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import Note
from tests.engines.own_pool import Sleeps, busy_worker, engine, look, submit, watched
from tests.leftovers import alive, descendants, gone, until
from tests.started import Nursery
from tests.toy import Tiny


class Deaf(Sleeps):
    """Wants to hear nothing of SIGTERM."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().forward(inputs)


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(root: Path) -> None:
    with engine(root, Deaf, epochs=1000) as (made, pool, bundle, _):
        future = submit(made, bundle)
        busy_worker(pool)
        log = root / "model" / "cosine" / "fold-0" / "log.txt"
        until(lambda: log.exists() and b"epoch 1 " in log.read_bytes())
        made.close(grace_s=0.5)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            future.result(0)


class DeafOnce(Sleeps):
    """The first of a process leaves its handlers behind, the others set none."""

    made = False

    def __init__(self) -> None:
        super().__init__()
        if not DeafOnce.made:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        DeafOnce.made = True


def test_the_next_job_of_the_worker_hears_sigterm_again(root: Path) -> None:
    with engine(root, DeafOnce, epochs=4) as (made, _, bundle, _):
        first = submit(made, bundle).result(60)
        assert first.results[0].status == "done"
        second = submit(made, bundle, 1)
        while not second.done():
            # Heard once the job has begun; before, the first one's deafness is still there.
            os.kill(first.pid, signal.SIGTERM)
            time.sleep(0.05)
        # It left the job, and may be asked for it again.
        assert second.result(60).results == [None]
        assert second.result().pid == first.pid


class Threads(Tiny):
    """Leaves a thread running that nobody can end."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=time.sleep, args=(600,), daemon=False).start()


class ForksAway(Tiny):
    """Leaves a forked process behind."""

    def __init__(self) -> None:
        super().__init__()
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)


class Doubles(Tiny):
    """Comes back twice from its constructor: in the worker, and in a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        os.fork()


@pytest.mark.parametrize("model", [Threads, ForksAway, Doubles])
def test_what_a_job_leaves_behind_ends_with_the_pool(root: Path, model: type[Tiny]) -> None:
    with engine(root, model) as (made, pool, bundle, _):
        pids = set()
        for index in range(3):
            answer = submit(made, bundle, index).result(60)
            assert answer.results[0].status == "done"
            pids.add(answer.pid)
        assert pids == {worker.pid for worker in pool.workers}
        assert all(map(alive, pids))


# What cannot be ended


@pytest.mark.nightly
def test_closing_does_not_wait_for_a_worker_that_cannot_be_killed(root: Path) -> None:
    with engine(root, Sleeps, ("unkillable",), epochs=1000) as (made, pool, bundle, _):
        future = submit(made, bundle)
        busy_worker(pool)
        made.close()
        with pytest.raises(WorkerDiedError, match="cannot be killed"):
            future.result(0)


@pytest.mark.nightly
def test_a_server_that_does_not_obey_is_replaced(root: Path) -> None:
    with engine(root, Sleeps, epochs=1000, stall_timeout=0.5) as (made, pool, bundle, _):
        future = submit(made, bundle)
        worker = busy_worker(pool)
        first = pool.server.pid
        for pid in (first, worker.pid):
            os.kill(pid, signal.SIGSTOP)
        watched(made, future)
        error = future.exception()
        assert isinstance(error, WorkerDiedError)
        assert error.outcome == "hang"
        assert gone({first, worker.pid})
        submit(made, bundle, 1)
        assert busy_worker(pool).pid != worker.pid
        assert pool.server.pid != first


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_servers")
def test_a_pool_of_a_thread_that_ended_lives(root: Path) -> None:
    """The kernel kills children whose parent thread ends, where they asked for it."""
    found: list[Any] = []

    def start() -> None:
        context = engine(root, Sleeps)
        made, _, bundle, _ = context.__enter__()
        found.extend((context, submit(made, bundle)))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    context, future = found
    assert future.result(60).results[0].status == "done"
    context.__exit__(None, None, None)


# Limits of the machine


def test_where_one_process_can_be_started_it_does_all_the_work(root: Path) -> None:
    with engine(root, Tiny, ("forks_once",)) as (made, _, bundle, news):
        futures = [submit(made, bundle, index) for index in range(3)]
        watched(made, *futures)
        assert len({future.result().pid for future in futures}) == 1
        assert all(future.result().results[0].status == "done" for future in futures)
    found = [news.get() for _ in range(news.qsize())]
    told = [item for item in found if isinstance(item, Note)]
    assert [item.kind for item in told] == ["workers"]
    assert told[0].text.startswith(
        "fewer workers: no further worker process could be started: Resource"
    )
    assert "ulimit -u" in told[0].text


def test_while_one_waits_for_a_worker_nothing_more_is_placed(root: Path) -> None:
    with engine(root, Sleeps, ("forks_once",), epochs=1000) as (made, _, bundle, _):
        futures = [submit(made, bundle, index) for index in range(2)]
        until(lambda: not made.load([]).idle, 60)
        made.close()
        assert futures[1].result(0).results == [None]  # as one that was asked to stop
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            futures[0].result(0)


def test_where_no_process_can_be_started_the_limit_is_named(root: Path) -> None:
    with engine(root, Tiny, ("forks_never",)) as (made, _, bundle, _):
        futures = [submit(made, bundle, index) for index in range(2)]
        watched(made, *futures)
        for future in futures:
            with pytest.raises(StorageError, match=r"no further worker process .*ulimit -u"):
                future.result(0)


def test_engines_of_one_pool_keep_their_own_refused_work(root: Path) -> None:
    with engine(root, Tiny, ("forks_never",)) as (made, pool, bundle, _):
        other = ProcessEngine(bundle, [], look, lambda news: None, pool)
        future = submit(other, bundle)
        for _ in range(20):  # the refusal may arrive at any of these looks
            made.load([])
            time.sleep(0.05)
        watched(other, future)
        with pytest.raises(StorageError, match=r"no further worker process"):
            future.result(0)
        other.close()


RUN = """
import resource, sys, torch
from asynckfold import AsyncKFold
from asynckfold.errors import AsyncKFoldError
from tests.toy import Tiny, adam, samples

limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
kfold = AsyncKFold(
    4, samples(), sys.argv[1], torch.nn.CrossEntropyLoss(), 10, baseline=None, verbose=0, n_jobs=4,
    report=False,
)
try:
    print(kfold({"Tiny": Tiny}, ["step"], adam, {"epochs": 2}).counts["done"])
except AsyncKFoldError as error:
    print(error.exit_code, error)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("limit", "enough"), [(64, True), (12, False)])
def test_few_open_files_are_enough_or_the_limit_is_named(
    root: Path, limit: int, enough: bool
) -> None:
    found = subprocess.run(
        [sys.executable, "-c", RUN, root, str(limit)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    assert found.returncode == 0
    assert found.stderr == ""
    if enough:
        assert found.stdout.strip() == "4"
    else:
        assert found.stdout.startswith("5 [Errno 24] ")
        assert len(found.stdout.splitlines()) == 1


# The end of the sweep's process at any moment

COLD = """
from asynckfold.engines import server_process
from tests.nursery import fresh_server
server_process.start_server = fresh_server
"""
"""The server starts as it does for a user; only the sweep need not import torch before."""


@pytest.mark.crashes("the sweep is killed at any moment, also while a job writes")
@pytest.mark.nightly(but=["0.5"])
@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_killed_while_workers_start_it_leaves_no_orphan(
    root: Path, delay: float, warm: Nursery
) -> None:
    mark = f"{root}-{delay}"
    environment = {**os.environ, "ASYNCKFOLD_TEST_MARK": mark}
    script = warm.start(["-c", COLD + RUN, root, "1000"], root.with_name("printed"), environment)
    started = until(lambda: marked(mark))
    assert started <= descendants(script.pid)
    time.sleep(delay)
    script.kill()
    script.wait()
    until(lambda: not marked(mark), 30)


def marked(mark: str) -> set[int]:
    """Return the processes that have the mark in their environment, wherever they hang now."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue  # it ended, or is somebody else's
    return {pid for pid in found if alive(pid)}
