"""Short jobs that one worker does one after another: rows."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asynckfold import AsyncKFold, RunStore
from asynckfold.cli.status import state_of
from asynckfold.engines.engine import Answer
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import JobEnd, JobStart, Task
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.results.utilization import packing_of
from asynckfold.scheduling.backlog import JOB_BATCH_SECONDS, JOB_BATCHES_PER_CORE, Backlog
from asynckfold.scheduling.place import place
from asynckfold.sweep.loop import Sweep
from tests.sweep.test_loop import Recording, done, open_store
from tests.toy import Tiny, adam, samples

FOLDS = 8
NAMES = tuple(f"A/cosine/fold-{fold}" for fold in range(FOLDS))

requests = st.builds(
    Request,
    job_id=st.text("abc", min_size=1, max_size=4),
    seconds=st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.3, 1.0]),
    threads=st.integers(1, 2),
    memory=st.integers(0, 3),
    alone=st.sampled_from([False, False, False, True]),
    jobs_per_gpu=st.integers(1, 2),
    trainer=st.sampled_from(["plain", "plain", "plain", "hogwild"]),
)


@given(
    st.lists(requests, max_size=40, unique_by=lambda request: request.job_id),
    st.integers(1, 4),
)
def test_a_job_batch_is_short_fits_where_its_first_job_does_and_loses_none(
    pending: list[Request], cores: int
) -> None:
    every = {request.job_id: request for request in pending}
    backlog = Backlog(pending)
    load = Load(tuple(range(cores)), tuple(range(cores)), 100)
    found = place(backlog, [], load)
    taken = [backlog.remove(item.jobs[0]) for item in found]
    rows = [backlog.extend(first, item, cores) for first, item in zip(taken, found, strict=True)]
    started = [name for row in rows for name in row.jobs]
    assert sorted([*started, *(request.job_id for request in backlog)]) == sorted(every)
    for before, row in zip(found, rows, strict=True):
        first, *others = (every[name] for name in row.jobs)
        assert (row.cores, row.threads, row.memory) == (before.cores, before.threads, before.memory)
        assert len(others) <= len(pending) / (JOB_BATCHES_PER_CORE * cores)
        if others:
            assert row.is_job_batch
            assert sum(item.seconds for item in (first, *others)) <= JOB_BATCH_SECONDS + 1e-9
        for other in others:
            assert other.trainer == first.trainer == "plain"
            assert other.seconds > 0
            assert not other.alone
            assert other.threads == first.threads
            assert other.memory <= first.memory


@dataclass
class Engine:
    """Answers at once what `behaviour` says of the n-th placement."""

    runs_in_submit, batch_seconds = False, None

    behaviour: Callable[[int, Sequence[Task], Callable[[Any], None]], Any]
    inbox: queue.SimpleQueue[Any]
    placed: list[Placement] = field(default_factory=list)
    now: float = 0.0

    def load(self, running: Sequence[Placement]) -> Load:
        self.now += 1.0
        return Load((0,), (0,), 1 << 40)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.placed.append(placement)
        found = self.behaviour(len(self.placed), tasks, self.inbox.put)
        if isinstance(found, BaseException):
            future.set_exception(found)
        else:
            future.set_result(Answer(found, pid=1))
        return future

    def close(self, grace_s: float = 0.0) -> None:
        pass


@pytest.fixture
def store(root: Path) -> Iterator[RunStore]:
    yield from open_store(root, FOLDS, ["A"], samples=32)


def run(store: RunStore, behaviour: Any) -> tuple[Engine, Recording]:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine, watch = Engine(behaviour, inbox), Recording()
    asked = {job.id: Request(job.id, 0.01) for job in store.reader.plan.jobs}
    Sweep(store, engine, inbox, asked, lambda found: found, watch, lambda: engine.now).run()
    return engine, watch


def in_turn(tasks: Sequence[Task], tell: Callable[[Any], None]) -> list[Any]:
    """Do as a worker does."""
    for task in tasks[:-1]:
        tell(JobStart(task.job.id, task.attempt, 1))
        tell(JobEnd(done(task)))
    tell(JobStart(tasks[-1].job.id, tasks[-1].attempt, 1))
    return [*(None for _ in tasks[:-1]), done(tasks[-1])]


def test_short_jobs_are_placed_in_batches_and_each_has_its_result(store: RunStore) -> None:
    engine, watch = run(store, lambda number, tasks, tell: in_turn(tasks, tell))
    assert [len(placement.jobs) for placement in engine.placed] == [2, 2, 1, 1, 1, 1]
    assert sorted(result.job_id for result in watch.results) == sorted(NAMES)
    results = store.reader.results()
    assert {result.status for result in results.values()} == {"done"}
    assert {result.attempt for result in results.values()} == {1}
    # Their times do not overlap: a core belongs to one job at a time.
    spans = sorted((result.started, result.ended) for result in results.values())
    assert all(ended <= later for (_, ended), (later, _) in pairwise(spans))
    packing = packing_of(store.reader)
    assert packing is not None
    assert 0 < packing.core_seconds <= packing.makespan + 1e-9


def test_in_a_batch_only_the_present_job_is_responsible_for_a_dead_worker(
    store: RunStore,
) -> None:
    def behaviour(number: int, tasks: Sequence[Task], tell: Callable[[Any], None]) -> Any:
        if number > 1:
            return in_turn(tasks, tell)
        tell(JobStart(tasks[0].job.id, 1, 1))
        return WorkerDiedError(1, "killed", "died")

    engine, _ = run(store, behaviour)
    guilty, innocent = engine.placed[0].jobs
    outcomes: dict[str, list[str | None]] = {}
    for attempt in store.reader.attempts():
        outcomes.setdefault(attempt.job_id, []).append(attempt.outcome)
    assert outcomes[guilty] == ["died", "ok"]
    assert outcomes[innocent] == ["interrupted", "ok"]
    packing = packing_of(store.reader)
    assert packing is not None
    assert packing.core_seconds <= packing.makespan + 1e-9
    assert {result.status for result in store.reader.results().values()} == {"done"}


class Loud(nn.Module):
    """Says a word, and kills its worker once in the run, where some jobs are through."""

    def __init__(self, mark: Path, root: Path) -> None:
        super().__init__()
        self.tiny, self.mark, self.root, self.said = Tiny(), mark, root, False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.said:
            self.said = True
            print("a word of its own")
        elif len([*self.root.rglob("checkpoint-*")]) > 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.tiny(inputs)


@pytest.mark.nightly
def test_batches_of_real_jobs_survive_a_kill_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "acted"

    def sweep(name: str) -> Any:
        kfold = AsyncKFold(
            8, samples(), tmp_path / name, nn.CrossEntropyLoss(), 8, n_jobs=2, verbose=0, fuse=False
        )
        return kfold(
            {f"loud-{number}": lambda: Loud(mark, tmp_path / name) for number in range(4)},
            ["constant"],
            adam,
            {"epochs": 1},
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynckfold.scheduling.backlog.JOB_BATCH_SECONDS", 0.0)
        mark.touch()
        one_by_one = sweep("singly")
        mark.unlink()
    monkeypatch.setattr("asynckfold.scheduling.backlog.JOB_BATCH_SECONDS", 1.0)
    rows = sweep("rows")
    assert mark.exists()
    assert rows.fingerprint == one_by_one.fingerprint
    with RunStore.read(tmp_path / "rows") as store:
        outcomes = [attempt.outcome for attempt in store.attempts()]

    assert outcomes.count("died") == 1
    # The jobs of its row that it had not come to.
    assert outcomes.count("interrupted") >= 1
    assert outcomes.count("ok") == 32
    logs = [*(tmp_path / "rows").rglob("log.txt")]
    assert len(logs) == 32
    assert all(log.read_text().count("a word of its own") >= 1 for log in logs)


def test_status_names_the_present_job_of_a_batch(store: RunStore) -> None:
    for name in NAMES[:3]:
        store.start_attempt(name, (0,), 1, "cpu", 0.1)
    store.start_attempt(NAMES[3], (1,), 1, "cpu", 0.1)
    store.started(NAMES[1], 1, 7)
    shown = [item["job"] for item in state_of(store.reader)["running_jobs"]]
    # That of the other core has no process yet that is known.
    assert shown == [NAMES[1], NAMES[3]]
