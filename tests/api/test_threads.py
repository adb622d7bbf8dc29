"""Threads of a job, from the arguments of a call to the results: with real workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, Plan, PlanMismatchError, RunStore
from tests.toy import Tiny, adam, samples

CORES = len(os.sched_getaffinity(0))

two_cores = pytest.mark.skipif(CORES < 2, reason="needs two cores")


def run(root: Path, models: Any = None, epochs: int = 1, **settings: Any) -> CVResults:
    settings = {"verbose": 0, "baseline": None, **settings}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold(models or [Tiny], ["step"], adam, {"epochs": epochs})


def stored(root: Path) -> tuple[Plan, list[tuple[str, str]], dict[str, Any]]:
    with RunStore.read(root) as store:
        events = [(item.kind, item.text) for item in store.events()]
        return store.plan, events, store.about


def test_the_default_decides_and_says_why(root: Path) -> None:
    results = run(root)
    plan, events, about = stored(root)
    assert (plan.threads_per_job, plan.threads) == (1, {})
    assert {result.threads for result in results.results.values()} == {1}
    (why,) = [text for kind, text in events if kind == "decision"]
    assert why.startswith("Tiny: 1 thread")
    assert about["decision"]["prediction"]["makespan"] > 0
    with RunStore.read(root) as store:
        assert all(item.expected > 0 for item in store.attempts())


def test_the_same_command_is_the_same_plan_idle_or_busy(tmp_path: Path) -> None:
    first = run(tmp_path / "idle")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CORES)]
    try:
        second = run(tmp_path / "busy")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    plans = [stored(tmp_path / name)[0] for name in ("idle", "busy")]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert first.fingerprint == second.fingerprint


@two_cores
def test_the_threads_of_another_run_are_taken_over(tmp_path: Path) -> None:
    first = run(tmp_path / "first", threads_per_job=2)
    second = run(tmp_path / "second", plan_from=tmp_path / "first")
    assert second.fingerprint == first.fingerprint
    assert {item.threads for item in second.results.values()} == {2}
    assert {len(item.cores) for item in second.results.values()} == {2}
    assert ("decision", "Tiny: 2 threads: taken over from another run") in stored(
        tmp_path / "second"
    )[1]


@two_cores
def test_a_run_that_grows_keeps_the_threads_it_has(root: Path, tmp_path: Path) -> None:
    run(tmp_path / "other", {"A": Tiny}, threads_per_job=2)
    run(root, {"A": Tiny}, plan_from=tmp_path / "other")
    results = run(root, {"A": Tiny, "B": Tiny})
    assert {name[0]: item.threads for name, item in results.results.items()} == {"A": 2, "B": 1}
    assert run(root, {"A": Tiny, "B": Tiny}).fingerprint == results.fingerprint
    assert stored(root)[0].threads_text == "1; A 2"
    with pytest.raises(PlanMismatchError, match="threads_per_job: 1 there, 2 here"):
        run(root, {"A": Tiny, "B": Tiny}, threads_per_job=2)


class Wide(nn.Sequential):
    """Operations enough that threads help."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 3)
        )


@pytest.mark.nightly
def test_the_last_job_has_the_threads_that_are_left_and_the_same_bits_each_time(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"n_jobs": 2, "fuse": False}
    results = run(tmp_path / "one", [Wide], **settings)
    plan, events, _ = stored(tmp_path / "one")
    if CORES < 2:
        assert plan.last_threads == {}
        return
    last = "Wide/step/fold-2"
    assert (plan.threads_per_job, plan.threads, plan.last_threads) == (1, {}, {last: 2})
    threads = {name: result.threads for name, result in results.results.items()}
    assert threads == {name: 2 if name == last else 1 for name in threads}
    (why,) = [text for kind, text in events if kind == "decision"]
    assert "the last jobs of Wide, 1, have 2" in why
    again = run(tmp_path / "again", [Wide], parallelize=False, **settings)
    assert again.fingerprint == results.fingerprint
    taken = run(tmp_path / "taken", [Wide], plan_from=tmp_path / "one", **settings)
    assert taken.fingerprint == results.fingerprint
    # A run that grows keeps them, too.
    run(tmp_path / "one", [Wide, Tiny], **settings)
    assert stored(tmp_path / "one")[0].last_threads == {last: 2}
    assert run(tmp_path / "one", [Wide, Tiny], **settings).results.keys() > threads.keys()
    with pytest.raises(PlanMismatchError, match="last_threads"):
        run(tmp_path / "again", [Wide], threads_per_job=1, **settings)


def test_one_thread_as_asked_is_the_same_plan_as_one_thread_decided(root: Path) -> None:
    first = run(root)
    assert run(root, threads_per_job=1).fingerprint == first.fingerprint


# Bad input


def test_plan_from_must_be_a_run_and_the_only_word_on_threads(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="plan_from must be the folder of a run"):
        run(root, plan_from=tmp_path, parallelize=False)
    with pytest.raises(InputError, match="both say how many threads a job has"):
        run(root, plan_from=tmp_path, threads_per_job=1)
    assert not root.exists()


@pytest.mark.parametrize("value", ["many", 0, True, 1.5, None])
def test_threads_must_be_a_number_or_auto(root: Path, value: Any) -> None:
    with pytest.raises(InputError, match="threads_per_job must be"):
        run(root, threads_per_job=value)
    assert not root.exists()
