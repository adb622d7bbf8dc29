"""Short jobs that one worker does one after another: rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import RunStore
from asynckfold.cli.status import state_of
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import JobEnd, JobStart, Task
from asynckfold.jobs.placement import Load, Request
from asynckfold.results.utilization import packing_of
from asynckfold.scheduling.backlog import JOB_BATCH_SECONDS, JOB_BATCHES_PER_CORE, Backlog
from asynckfold.scheduling.place import place
from tests.sweep.test_loop import Prompt, Recording, Tell, done, driven, open_store

FOLDS = 8
NAMES = tuple(f"A/cosine/fold-{fold}" for fold in range(FOLDS))

requests = st.builds(
    Request,
    job_id=st.text("abc", min_size=1, max_size=4),
    seconds=st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.3, 1.0]),
    threads=st.integers(1, 2),
    memory=st.integers(0, 3),
    alone=st.sampled_from([False, False, False, True]),
    gpu_share=st.sampled_from([0.45, 0.9]),
    trainer=st.sampled_from(["plain", "plain", "plain", "hogwild"]),
)


@given(st.lists(requests, max_size=40, unique_by=lambda request: request.job_id), st.integers(1, 4))
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


@pytest.fixture
def store(root: Path) -> Iterator[RunStore]:
    yield from open_store(root, FOLDS, ["A"], samples=32)


def run(store: RunStore, behaviour: Any) -> tuple[Prompt, Recording]:
    sweep, watch = driven(store, engine := Prompt(behaviour, (0,)), Request("", 0.01))
    sweep.run()
    return engine, watch


def in_turn(tasks: Sequence[Task], tell: Tell) -> list[Any]:
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


def test_in_a_batch_only_the_present_job_is_responsible_for_a_dead_worker(store: RunStore) -> None:
    def behaviour(number: int, tasks: Sequence[Task], tell: Tell) -> Any:
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


def test_status_names_the_present_job_of_a_batch(store: RunStore) -> None:
    for name in NAMES[:3]:
        store.start_attempt(name, (0,), 1, "cpu", 0.1)
    store.start_attempt(NAMES[3], (1,), 1, "cpu", 0.1)
    store.started(NAMES[1], 1, 7)
    shown = [item["job"] for item in state_of(store.reader)["running_jobs"]]
    # That of the other core has no process yet that is known.
    assert shown == [NAMES[1], NAMES[3]]
