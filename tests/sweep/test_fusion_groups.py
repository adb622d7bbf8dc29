"""Jobs that are trained as one in the loop of a sweep, with an engine that runs nothing."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asynckfold import Result, RunStore
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import JobEnd, JobStart, RetryableFailure, Task
from asynckfold.jobs.placement import WORKER_BYTES, Placement, Request
from asynckfold.jobs.result import DIVERGED, DONE, FAILED
from asynckfold.sweep.loop import Sweep
from tests.sweep.test_loop import Moving, Prompt, Recording, Tell, done, driven, open_store

GROUP = ("A/cosine/fold-0", "A/cosine/fold-1", "A/cosine/fold-2")
ALONE = "A/cosine/fold-3"
ONE = WORKER_BYTES + 10


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckfold.sweep.loop.TICK_SECONDS", 0.001)


@pytest.fixture
def store(root: Path) -> Iterator[RunStore]:
    yield from open_store(root, 4, ["A"], (GROUP,))


def run(
    store: RunStore, behaviour: Callable[[int, Sequence[Task], Tell], Any]
) -> tuple[Prompt, Recording]:
    """Answer what `behaviour` says of the n-th placement of the group."""

    def answer(number: int, tasks: Sequence[Task], tell: Tell) -> Any:
        if len(tasks) == 1 and tasks[0].job.id == ALONE:
            return [done(task) for task in tasks]
        return behaviour(len(of_group(engine)), tasks, tell)

    engine, watch = Prompt(answer, (0, 1)), Recording()
    requests = {
        job.id: Request(job.id, 1.0 + job.fold, memory=ONE) for job in store.reader.plan.jobs
    }
    Sweep(store, engine, engine.inbox, requests, lambda found: found, watch, engine.clock).run()
    return engine, watch


def of_group(engine: Prompt) -> list[Placement]:
    return [placement for placement in engine.placed if placement.trainer == "fused"]


def died() -> WorkerDiedError:
    return WorkerDiedError(1, "killed", "died")


def test_a_group_is_one_placement_and_each_job_has_its_result(store: RunStore) -> None:
    engine, watch = run(store, lambda number, tasks, tell: [done(task) for task in tasks])
    (group,) = of_group(engine)
    assert group.jobs == GROUP
    assert group.memory == WORKER_BYTES + 30
    # The longest first: the group has the seconds of all its jobs.
    assert [placement.jobs for placement in engine.placed] == [GROUP, (ALONE,)]
    assert engine.placed[1].trainer == "plain"
    assert sorted(result.job_id for result in watch.results) == [*GROUP, ALONE]
    assert {result.status for result in store.reader.results().values()} == {DONE}


def test_a_group_whose_worker_dies_is_tried_again_without_what_ended(store: RunStore) -> None:
    def behaviour(number: int, tasks: Sequence[Task], tell: Tell) -> Any:
        if number > 1:
            return [done(task) for task in tasks]
        tell(JobEnd(Result(GROUP[1], 1, DIVERGED, error="nan", pid=7)))
        return died()

    engine, _ = run(store, behaviour)
    assert [placement.jobs for placement in of_group(engine)] == [GROUP, (GROUP[0], GROUP[2])]
    # What diverged goes along, in memory and in time.
    assert {placement.memory for placement in of_group(engine)} == {WORKER_BYTES + 30}
    again = [item for item in store.reader.attempts() if item.attempt == 2]
    assert [(item.job_id, item.expected) for item in again] == [(GROUP[0], 6.0), (GROUP[2], 6.0)]
    waits = [item.waits for item in again]
    assert waits[0] == waits[1]
    assert any(wait.kind == "pause" for wait in waits[0])
    results = store.reader.results()
    assert results[GROUP[1]].status == DIVERGED
    assert results[GROUP[1]].pid == 7
    assert [results[name].attempt for name in GROUP] == [2, 1, 2]
    assert {results[name].status for name in (GROUP[0], GROUP[2], ALONE)} == {DONE}


def short_of_memory(task: Task) -> RetryableFailure:
    return RetryableFailure("oom", Result(task.job.id, task.attempt, FAILED))


@pytest.mark.parametrize("first", [short_of_memory, lambda task: None], ids=["memory", "stopped"])
def test_a_group_that_did_not_end_goes_on_alone_where_memory_was_short(
    store: RunStore, first: Callable[[Task], Any]
) -> None:
    engine, _ = run(
        store, lambda number, tasks, tell: list(map(done if number > 1 else first, tasks))
    )
    assert [placement.jobs for placement in of_group(engine)] == [GROUP, GROUP]
    is_alone = first is short_of_memory
    assert [placement.alone for placement in of_group(engine)] == [False, is_alone]
    assert {result.status for result in store.reader.results().values()} == {DONE}


def test_a_group_that_always_dies_fails_whole_and_once(store: RunStore) -> None:
    engine, watch = run(store, lambda number, tasks, tell: died())
    assert [placement.jobs for placement in of_group(engine)] == [GROUP] * 3
    failed = [result.job_id for result in watch.results if result.status == FAILED]
    assert sorted(failed) == list(GROUP)


def test_a_fusion_group_is_paused_as_a_whole(store: RunStore) -> None:
    engine = Moving(done, queue.SimpleQueue())
    engine.idle = (0, 1)
    sweep, _ = driven(store, engine, yields=True)
    sweep.step(0.001)
    for name in (*GROUP, ALONE):
        engine.inbox.put(JobStart(name, 1, 7))
    engine.inbox.put(JobEnd(Result(GROUP[1], 1, DIVERGED, error="nan", pid=7)))
    sweep.step(0.001)
    engine.idle = (1, 2)
    sweep.step(0.001)
    assert engine.shifts == [(GROUP[0], (2,))]
    engine.idle, engine.shifts = (1,), []
    sweep.step(0.001)
    assert engine.shifts == [(GROUP[0], ())]
    engine.idle, engine.shifts = (0, 1), []
    sweep.step(0.001)
    assert engine.shifts == [(GROUP[0], (0,))]
    sweep.leave()
    assert store.reader.results()[GROUP[1]].status == DIVERGED
