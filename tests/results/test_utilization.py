"""What came of a run's packing, counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import Plan, Result, RunStore, TrainerParams
from asynckfold.jobs.cost import Cost
from asynckfold.jobs.folds import make_folds
from asynckfold.jobs.placement import Wait
from asynckfold.jobs.plan import folds_fingerprint, make_jobs
from asynckfold.jobs.result import DONE
from asynckfold.planning.workload import Choice, TimeEstimate
from asynckfold.results.report.sentences import packing as told
from asynckfold.results.report.summary import summarize
from asynckfold.results.utilization import ModelAccount, packing_of
from tests.synthetic import FakeClockStore

COST = Cost({1: 0.1}, {1: 0.1}, memory=7)
CHOICE = Choice(
    {"A": 2, "B": 1},
    {"A": "2 threads: as asked", "B": "1 thread: as asked"},
    {"A": COST, "B": COST},
    2,
    TimeEstimate(11.0, 9.0, 6.0),
)
TARGETS = np.arange(12) % 2
FOLDS = make_folds(12, TARGETS, 2)
PLAN = Plan(
    make_jobs(["A", "B"], ["cosine"], FOLDS, 0),
    TrainerParams(epochs=1),
    4,
    1,
    0,
    "cpu",
    ("accuracy",),
    "data",
    folds_fingerprint(FOLDS),
    ("0", "1"),
).with_threads({"A": 2, "B": 1})
A0, B0, B1 = "A/cosine/fold-0", "B/cosine/fold-0", "B/cosine/fold-1"


def record(store: RunStore, job: str, attempt: int) -> None:
    assert store.record(Result(job, attempt, DONE, {"accuracy": 1.0}, peak_memory=50))


def write(root: Path, about: Mapping[str, Any]) -> None:
    """Two sessions: the first is killed at 8 s with two attempts open."""
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.begin(PLAN, FOLDS, TARGETS, about)
        store.clock = 1.0
        store.start_attempt(A0, (0, 1), 2, "cpu", 2.5)
        store.clock = 4.0
        record(store, A0, 1)
        waits = (Wait(3.0, "cores", "cores: 2 of 2 busy"),)
        store.start_attempt(B0, (0,), 1, "cpu", 5.0, 7, waits)
        store.start_attempt(B1, (1,), 1, "cpu", 5.0)
        store.started(B1, 1, 7)
        store.clock = 5.0
        store.end_attempt(B0, 1, "died")
        store.clock = 6.0
        store.start_attempt(B0, (0,), 1, "cpu", 5.0)
        store.started(B0, 2, 7)
        store.clock = 8.0
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.clock = 8.0
        store.begin(PLAN, FOLDS, TARGETS)
        store.clock = 10.0
        store.start_attempt(B0, (0,), 1, "cpu", 5.0)
        store.start_attempt(B1, (), 1, "cpu", 5.0)
        store.clock = 12.0
        record(store, B0, 3)
        store.clock = 13.0
        record(store, B1, 2)


def test_an_attempt_in_a_batch_holds_its_core_from_its_turn_on(root: Path) -> None:
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.begin(PLAN, FOLDS, TARGETS)
        store.clock = 1.0
        for job in (A0, B0, B1):
            store.start_attempt(job, (0,), 1, "cpu", 0.1)
        store.started(A0, 1, 7)
        store.clock = 2.0
        record(store, A0, 1)
        store.started(B0, 1, 7, at=2.0)
        store.clock = 5.0
    with RunStore.read(root) as store:
        found = packing_of(store)
    # B1 was never begun.
    assert found is not None
    assert found.core_seconds == pytest.approx(1 + 3)


def test_all_attempts_count_in_seconds_and_core_seconds(root: Path) -> None:
    write(root, {"decision": CHOICE})
    with RunStore.read(root) as store:
        found = packing_of(store)
    assert found is not None
    assert found.predicted == CHOICE.prediction
    assert found.makespan == pytest.approx((8 - 1) + (13 - 10))
    assert found.core_seconds == pytest.approx(2 * 3 + (1 + 2 + 2) + (4 + 3))
    assert found.longest == pytest.approx(4 + 3)
    assert found.lower_bound == pytest.approx(18 / 2)
    assert found.held == pytest.approx(18 / (2 * 10))
    assert found.models == (
        ModelAccount("A", 2, "2 threads: as asked", 1, 2.5, 3.0, 7, 50),
        ModelAccount("B", 1, "1 thread: as asked", 2, 5.0, 6.0, 7, 50),
    )
    assert told(found) == (
        "the jobs took 10.0 s from first start to last end, 11.0 s predicted and at least 9.0 s "
        "needed in any order; they held 90.0 % of 2 cores, the tail included"
    )


def test_seconds_of_a_fusion_group_count_once(root: Path) -> None:
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        plan = replace(PLAN, groups=((B0, B1),))
        store.begin(plan, FOLDS, TARGETS, {"decision": CHOICE})
        store.clock = 1.0
        store.start_attempt(B0, (0,), 1, "cpu", 10.0)
        store.clock = 1.5
        store.start_attempt(B1, (0,), 1, "cpu", 10.0)
        store.clock = 4.0
        record(store, B1, 1)
        store.clock = 5.0
        store.end_attempt(B0, 1, "died")
        store.clock = 6.0
        store.start_attempt(B0, (0,), 1, "cpu", 10.0)
        store.clock = 9.0
        record(store, B0, 2)
        found = packing_of(store.reader)
    assert found is not None
    assert found.core_seconds == pytest.approx((5 - 1) + (9 - 6))
    assert found.longest == pytest.approx(4 + 3)
    assert found.held == pytest.approx(7 / (2 * 8))
    assert found.models[1] == ModelAccount("B", 1, "1 thread: as asked", 2, 5.0, 3.5, 14, 50)


def test_without_a_recorded_decision_core_use_is_unknown(root: Path) -> None:
    write(root, {})
    with RunStore.read(root) as store:
        found = packing_of(store)
    assert found is not None
    assert (found.cores, found.predicted, found.held, found.lower_bound) == (None,) * 4
    assert found.makespan == pytest.approx(10.0)
    assert "predicted" not in told(found)


def test_a_run_without_attempts_has_no_packing(root: Path) -> None:
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)
        assert packing_of(store.reader) is None


def test_the_report_shows_waits_and_memory_of_each_attempt(root: Path) -> None:
    write(root, {"decision": CHOICE})
    with RunStore.read(root) as store:
        summary, found = summarize(store), packing_of(store)
    assert summary.packing == found
    bars = {(bar.job, bar.attempt): bar for bar in summary.bars}
    assert [str(wait) for wait in bars[B0, 1].waits] == ["3.0 s for cores: 2 of 2 busy"]
    assert [bars[B0, number].memory for number in (1, 2, 3)] == [7, None, None]
    assert [bars[B0, number].peak_memory for number in (1, 2, 3)] == [None, None, 50]
    assert bars[A0, 1].expected == 2.5
