"""What came of a run's packing, counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import Result, RunStore, TrainerParams
from asynckfold.jobs.placement import Wait
from tests.outcomes import divided, plan_of
from tests.results.report.reports import report_again
from tests.synthetic import FakeClockStore

COST = {"step_seconds": {"1": 0.1}, "eval_seconds": {"1": 0.1}, "memory": 7}
CHOICE = {
    "threads": {"A": 2, "B": 1},
    "why": {"A": "2 threads: as asked", "B": "1 thread: as asked"},
    "costs": {"A": COST, "B": COST},
    "cores": 2,
    "prediction": {"makespan": 11.0, "lower_bound": 9.0, "longest": 6.0},
}
"""What was decided, as a run's folder has it."""
TARGETS = np.arange(12) % 2
FOLDS = divided(12, 2)
PLAN = plan_of(
    [("A", "cosine"), ("B", "cosine")],
    FOLDS,
    params=TrainerParams(epochs=1),
    classes=("0", "1"),
    threads={"A": 2},
)
A0, B0, B1 = "A/cosine/fold-0", "B/cosine/fold-0", "B/cosine/fold-1"


def packing_of(root: Path) -> Any:
    return report_again(root).numbers["packing"]


def record(store: RunStore, job: str, attempt: int) -> None:
    assert store.record(Result(job, attempt, "done", {"accuracy": 1.0}, peak_memory=50))


def write(root: Path, about: Mapping[str, Any], waits: Any = ()) -> None:
    """Two sessions: the first is killed at 8 s with two attempts open."""
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.begin(PLAN, FOLDS, TARGETS, about)
        store.clock = 1.0
        store.start_attempt(A0, (0, 1), 2, "cpu", 2.5)
        store.clock = 4.0
        record(store, A0, 1)
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
    found = packing_of(root)
    # B1 was never begun.
    assert found["core_seconds"] == pytest.approx(1 + 3)


def test_all_attempts_count_in_seconds_and_core_seconds(root: Path) -> None:
    write(root, {"decision": CHOICE})
    found = packing_of(root)
    assert found["predicted"] == CHOICE["prediction"]
    assert found["makespan"] == pytest.approx((8 - 1) + (13 - 10))
    assert found["core_seconds"] == pytest.approx(2 * 3 + (1 + 2 + 2) + (4 + 3))
    assert found["longest"] == pytest.approx(4 + 3)
    assert found["lower_bound"] == pytest.approx(18 / 2)
    assert found["held"] == pytest.approx(18 / (2 * 10))
    assert (
        "The jobs took 10.0 s from first start to last end, 11.0 s predicted and at least 9.0 s "
        "needed in any order; they held 90.0 % of 2 cores, the tail included"
    ) in report_again(root).page


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
    found = packing_of(root)
    assert found["core_seconds"] == pytest.approx((5 - 1) + (9 - 6))
    assert found["longest"] == pytest.approx(4 + 3)
    assert found["held"] == pytest.approx(7 / (2 * 8))


def test_without_a_recorded_decision_core_use_is_unknown(root: Path) -> None:
    write(root, {})
    found = packing_of(root)
    assert [found[name] for name in ("cores", "predicted", "held", "lower_bound")] == [None] * 4
    assert found["makespan"] == pytest.approx(10.0)


def test_a_run_without_attempts_has_no_packing(root: Path) -> None:
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)
    assert packing_of(root) is None


def test_the_report_shows_waits_and_memory_of_each_attempt(root: Path) -> None:
    write(root, {"decision": CHOICE}, (Wait(3.0, "cores", "cores: 2 of 2 busy"),))
    bars = {(bar["job"], bar["attempt"]): bar for bar in report_again(root).numbers["bars"]}
    assert bars[B0, 1]["waits"] == ["3.0 s for cores: 2 of 2 busy"]
    assert [bars[B0, number]["memory"] for number in (1, 2, 3)] == [7, None, None]
    assert [bars[B0, number]["peak_memory"] for number in (1, 2, 3)] == [None, None, 50]
    assert bars[A0, 1]["expected"] == 2.5
