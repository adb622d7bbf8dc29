"""How far a sweep is: counts, steps, the time left, and the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import Epoch, Fold, Plan, Result, TrainerParams
from asynckfold.api.progress import SweepProgress
from asynckfold.jobs.messages import EpochEnd, Progress
from asynckfold.jobs.placement import Placement, Request
from asynckfold.jobs.plan import make_jobs
from asynckfold.jobs.result import DIVERGED, DONE, FAILED

A, B = "A/step/fold-{}".format, "B/step/fold-{}".format


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make_plan(models: tuple[str, ...] = ("A", "B"), folds: int = 3, epochs: int = 4) -> Plan:
    one = np.array([0]), np.array([1])
    jobs = make_jobs(models, ["step"], [Fold(0, index, *one) for index in range(folds)], 0)
    params = TrainerParams(epochs=epochs)
    return Plan(jobs, params, 32, 1, 0, "cpu", ("accuracy",), "d", "f")


def requests(plan: Plan, seconds: float = 10.0) -> dict[str, Request]:
    return {job.id: Request(job.id, seconds) for job in plan.jobs}


def make_progress(
    watch: Callable[[], float] | None = None, batches: int = 10, **changes: Any
) -> SweepProgress:
    return of_plan(make_plan(**changes), watch, batches)


def of_plan(
    plan: Plan, watch: Callable[[], float] | None = None, batches: int = 10
) -> SweepProgress:
    known = {job.id: batches for job in plan.jobs}
    return SweepProgress(plan, requests(plan), [], known, clock=watch or Clock())


def place(progress: SweepProgress, *names: str, core: int = 0, trainer: str = "plain") -> None:
    progress.placed(Placement(names, (core,), trainer=trainer))


def result(name: str, score: float = 0.5, status: str = DONE, error: str = "") -> Result:
    scores = {"accuracy": score} if status == DONE else {}
    return Result(name, 1, status, scores, fit_seconds=2.0, error=error)


def ended_epoch(name: str, seconds: float = 2.0, number: int = 1) -> EpochEnd:
    return EpochEnd(name, 1, Epoch(number, 0.5, 0.6, 0.7, 1e-3, seconds))


def at_batch(name: str, batch: int, epoch: int = 1, batches: int = 10) -> Progress:
    return Progress(name, 1, epoch, 4, batch, batches, 0.5)


# Counts


def test_counts_follow_a_job_from_waiting_to_its_end() -> None:
    progress = make_progress()
    assert progress.summary() == "0 of 6 jobs finished, 6 waiting"
    place(progress, A(0))
    assert progress.summary() == "0 of 6 jobs finished, 1 running, 5 waiting"
    progress.ended(result(A(0)))
    assert progress.summary() == "1 of 6 jobs finished, 5 waiting"
    place(progress, B(2))
    progress.ended(result(B(2), status=DIVERGED))
    assert progress.summary() == "1 of 6 jobs finished, 1 diverged, 4 waiting"


def test_what_earlier_sessions_finished_is_not_waiting() -> None:
    plan = make_plan()
    earlier = [result(A(0)), result(A(1), status=FAILED)]
    progress = SweepProgress(plan, requests(plan), earlier)
    assert progress.summary() == "1 of 6 jobs finished, 1 failed, 4 waiting"
    assert progress.percent == 33


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([DONE, FAILED])), max_size=6))
def test_every_job_is_in_one_place(ends: list[tuple[int, str]]) -> None:
    progress = make_progress()
    names = [job.id for job in progress.plan.jobs]
    for index, status in ends:
        place(progress, names[index])
        if index % 2:
            progress.ended(result(names[index], status=status))
    running, ended = set(progress.running), set(progress.results)
    parts = [set(progress.waiting), running, ended - running]
    assert set.union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)


def test_no_outputs_are_kept() -> None:
    progress = make_progress()
    progress.ended(replace(result(A(0)), outputs=np.zeros((2, 2), np.float32)))
    assert progress.results[A(0)].outputs is None


# Steps and time


def test_steps_follow_batches_epochs_and_ends() -> None:
    progress = make_progress()
    assert (progress.steps_done, progress.steps, progress.percent) == (0, 240, 0)
    place(progress, A(0))
    progress.heard(at_batch(A(0), 4))
    assert progress.steps_done == 4
    progress.heard(ended_epoch(A(0), number=2))
    assert progress.steps_done == 20
    # The job knows better how many batches it has.
    progress.heard(at_batch(A(0), 1, epoch=3, batches=11))
    assert (progress.steps_done, progress.steps) == (23, 244)
    progress.ended(result(A(0)))
    assert progress.steps_done == 44
    # A failed job is tried again from its first step.
    place(progress, A(0))
    assert progress.steps_done == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 10)), max_size=12))
def test_steps_stay_within_their_bounds(events: list[tuple[int, int, int]]) -> None:
    progress = make_progress()
    names = [job.id for job in progress.plan.jobs]
    place(progress, *names, trainer="fused")
    for index, epoch, batch in events:
        progress.heard(at_batch(names[index], batch, epoch))
        assert 0 <= progress.steps_done <= progress.steps
        assert 0 <= progress.percent < 100
    for name in names:
        progress.ended(result(name))
    assert (progress.percent, progress.seconds_left()) == (100, 0.0)


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    watch = Clock()
    progress = make_progress(watch, models=("A",), folds=4)
    place(progress, A(0))
    watch.now += 5
    # Nothing is promised before something was measured.
    assert (progress.seconds_left(), progress.times()) == (None, "5.0 s elapsed")
    progress.heard(at_batch(A(0), 10))
    assert progress.times() == "5.0 s elapsed, 1 min 15 s left, 2 steps/s"
    watch.now += 15
    progress.ended(result(A(0)))
    assert progress.seconds_left() == 60
    # What a checkpoint holds was not trained in this session.
    place(progress, A(1))
    progress.heard(at_batch(A(1), 0, epoch=4))
    assert progress.seconds_left() == pytest.approx(45)


# What runs


def test_a_line_says_what_a_fusion_group_does() -> None:
    progress = make_progress(folds=5)
    names = [A(index) for index in range(5)]
    progress.placed(Placement(tuple(names), (0, 1), trainer="fused"))
    assert progress.lines() == ["A/step · starting · 5 folds fused · cores 0,1"]
    for name in names:
        progress.heard(at_batch(name, 8))
    where = "5 folds fused · batch 8/10 · loss 0.5 · cores 0,1"
    assert progress.lines() == [f"A/step · epoch 1/4 · {where}"]
    for name in names:
        progress.heard(ended_epoch(name, number=2))
    assert progress.lines() == ["A/step · epoch 2/4 · 5 folds fused · valid 0.700 · cores 0,1"]


def test_jobs_in_turn_are_one_line_and_the_next_one_ends_the_one_before() -> None:
    """As the jobs of the serial baseline, whose results nobody reports."""
    plan = make_plan(models=("A",), epochs=1)
    batches = {job.id: 10 for job in plan.jobs}
    progress = SweepProgress(plan, requests(plan), [], batches, "serial baseline", Clock())
    place(progress, *(job.id for job in plan.jobs))
    progress.heard(at_batch(A(0), 4))
    assert progress.summary() == "serial baseline: job 1 of 3"
    progress.heard(at_batch(A(2), 4))
    assert progress.summary() == "serial baseline: job 3 of 3"
    assert progress.steps_done == 24
    assert progress.lines()[0].startswith("A/step/fold-2 · epoch 1/1 · batch")


def test_a_gpu_stands_in_place_of_a_core() -> None:
    progress = make_progress()
    progress.placed(Placement((A(0),), (0,), gpu=3))
    assert progress.lines() == ["A/step/fold-0 · starting · GPU 3"]


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ({}, ""),
        # One alone is not the best of any.
        ({B(0): 0.99}, "so far B/step accuracy 0.9900 (1 fold)"),
        ({B(0): 0.99, A(0): 0.5}, "best so far B/step accuracy 0.9900 (1 fold)"),
        ({B(0): 0.99, A(0): 0.5, A(1): 0.7}, "so far A/step accuracy 0.6000 (2 folds)"),
        (
            {A(0): math.inf, A(1): -math.inf, B(0): 0.5, B(1): 0.5},
            "so far B/step accuracy 0.5000 (2 folds)",
        ),
        ({A(0): 0.5, B(0): 0.5}, "so far A/step is tied with 1 more at accuracy 0.5000 (1 fold)"),
    ],
)
def test_best_so_far_compares_candidates_with_equally_many_folds(
    scores: dict[str, float], text: str
) -> None:
    progress = make_progress()
    for name, score in scores.items():
        progress.ended(result(name, score))
    progress.ended(result(B(2), status=FAILED))
    assert progress.best() == text
