"""How far a sweep is: counts, steps, speeds, the time left, and the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.api.progress import RATE_SECONDS, Meter, SweepProgress
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import EpochEnded, Progress
from asynckfold.jobs.placement import Placement, Request
from asynckfold.jobs.plan import Plan, make_jobs
from asynckfold.jobs.result import DIVERGED, DONE, FAILED, Epoch, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.units import duration

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


def ended_epoch(name: str, seconds: float = 2.0, number: int = 1) -> EpochEnded:
    return EpochEnded(name, 1, Epoch(number, 0.5, 0.6, 0.7, 1e-3, seconds))


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
    found = [result(A(0)), result(A(1), status=FAILED)]
    progress = SweepProgress(plan, requests(plan), found)
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


# Steps


def test_steps_follow_batches_epochs_and_ends() -> None:
    progress = make_progress(models=("A",), folds=2)
    assert (progress.steps_done, progress.steps) == (0, 80)
    place(progress, A(0))
    progress.heard(at_batch(A(0), 5))
    assert progress.steps_done == 5
    progress.heard(ended_epoch(A(0), number=2))
    assert (progress.steps_done, progress.percent) == (20, 25)
    progress.ended(result(A(0), status=FAILED))
    assert (progress.steps_done, progress.percent) == (40, 50)
    place(progress, A(1))
    progress.heard(at_batch(A(1), 12, epoch=1, batches=30))  # more than was expected
    assert (progress.steps_done, progress.steps) == (52, 160)
    progress.heard(ended_epoch(A(1), number=4))
    assert progress.percent == 99  # it is not stored yet
    progress.ended(result(A(1)))
    assert (progress.steps_done, progress.steps, progress.percent) == (160, 160, 100)


def test_a_job_that_starts_again_starts_its_steps_again() -> None:
    progress = make_progress()
    for _ in range(2):
        place(progress, A(0))
        assert progress.steps_done == 0
        progress.heard(at_batch(A(0), 7))
        assert progress.steps_done == 7


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["place", "batch", "epoch", "end"])),
        max_size=30,
    )
)
def test_steps_stay_within_their_bounds(acts: list[tuple[int, str]]) -> None:
    progress = make_progress()
    names = [job.id for job in progress.plan.jobs]
    for index, act in acts:
        if act == "place":
            place(progress, names[index])
        elif act == "batch":
            progress.heard(at_batch(names[index], 3, epoch=2))
        elif act == "epoch":
            progress.heard(ended_epoch(names[index], number=3))
        else:
            progress.ended(result(names[index]))
        assert 0 <= progress.steps_done <= progress.steps == 240
        assert 0 <= progress.percent <= 100


def test_a_speed_is_that_of_the_last_seconds() -> None:
    meter = Meter()
    assert not meter.per_second(0) > 0
    meter.look(0, 0)
    meter.look(1, 100)
    assert meter.per_second(1) == meter.per_second(2) == 100
    for second in range(2, 30):
        meter.look(second, 100 + second)
    assert meter.per_second(30) == pytest.approx(1)
    assert meter.per_second(30 + 3 * RATE_SECONDS) < 0.5  # nothing moves any more


def test_what_a_checkpoint_holds_was_not_trained_just_now() -> None:
    watch = Clock()
    progress = make_progress(watch, batches=1000)
    place(progress, A(0))
    progress.heard(at_batch(A(0), 500, epoch=4, batches=1000))
    watch.now += 1
    progress.heard(at_batch(A(0), 520, epoch=4, batches=1000))
    progress.ended(result(A(0)))
    assert "20 steps/s" in progress.times()


# Time


def test_no_time_is_promised_before_anything_was_measured() -> None:
    progress = make_progress()
    place(progress, A(0))
    assert progress.seconds_left() is None
    assert progress.times() == "0.0 s elapsed"


def test_the_time_left_comes_from_measured_epochs() -> None:
    watch = Clock()
    progress = make_progress(watch, models=("A",), folds=4)
    for index in (0, 1):
        place(progress, A(index), core=index)
    progress.heard(ended_epoch(A(0)))
    progress.heard(ended_epoch(A(1)))
    # Four jobs of 4 epochs of 2 s, two at a time; each of the first has trained an epoch.
    assert progress.seconds_left() == pytest.approx(14.0)
    watch.now += 4
    assert progress.seconds_left() == pytest.approx(10.0)
    for index in (0, 1):
        progress.ended(result(A(index)))
    for index in (2, 3):
        place(progress, A(index), core=index)
    assert progress.seconds_left() == pytest.approx(8.0)
    for index in (2, 3):
        progress.ended(result(A(index)))
    assert progress.seconds_left() == 0.0


def test_within_the_first_epoch_the_speed_of_its_steps_tells() -> None:
    watch = Clock()
    progress = make_progress(watch, models=("A",), folds=2, epochs=1, batches=100)
    place(progress, A(0))
    progress.heard(at_batch(A(0), 10, batches=100))
    watch.now += 1
    progress.heard(at_batch(A(0), 20, batches=100))
    assert progress.seconds_left() == pytest.approx(8 + 10)


def test_a_model_without_an_epoch_counts_with_what_was_expected() -> None:
    progress = make_progress(folds=1)
    place(progress, A(0))
    progress.heard(ended_epoch(A(0), 1.0))
    assert progress.seconds_left() == pytest.approx(3.0 + 10.0)


def test_a_fusion_group_takes_the_time_of_one_job() -> None:
    names = tuple(A(index) for index in range(4))
    plan = replace(make_plan(models=("A",), folds=8), groups=(names, tuple(map(A, range(4, 8)))))
    progress = of_plan(plan)
    place(progress, *names, trainer="fused")
    for name in names:
        # A job is told its share of the group's two seconds.
        progress.heard(ended_epoch(name, 2.0 / 4))
    assert progress.seconds_left() == pytest.approx(3 * 2.0 + 4 * 2.0)


def test_a_job_that_takes_longer_than_thought_is_not_owed_time() -> None:
    watch = Clock()
    progress = make_progress(watch, models=("A",), folds=1)
    place(progress, A(0))
    progress.heard(ended_epoch(A(0), 1.0))
    watch.now += 1000
    assert progress.seconds_left() == 0.0


# What runs


def test_a_line_says_what_a_fusion_group_does() -> None:
    watch = Clock()
    progress = make_progress(watch, folds=5)
    names = [A(index) for index in range(5)]
    progress.placed(Placement(tuple(names), (0, 1), trainer="fused"))
    assert progress.lines() == ["A/step · starting · 5 folds fused · cores 0,1"]
    for batch in (2, 5, 8):
        for name in names:
            progress.heard(at_batch(name, batch))
        watch.now += 0.1
    assert progress.lines() == [
        "A/step · epoch 1/4 · 5 folds fused · 30 it/s · batch 8/10 · loss 0.5 · cores 0,1"
    ]
    assert progress.times().endswith("150 steps/s")
    for name in names:
        progress.heard(ended_epoch(name, number=2))
    assert "epoch 2/4" in progress.lines()[0]
    assert "valid 0.700 · cores" in progress.lines()[0]


def test_jobs_in_turn_are_one_line_and_the_next_one_ends_the_one_before() -> None:
    """As the jobs of the serial baseline, of which no result is told."""
    plan = make_plan(models=("A",), epochs=1)
    progress = SweepProgress(
        plan, requests(plan), [], {job.id: 10 for job in plan.jobs}, "serial baseline", Clock()
    )
    place(progress, *(job.id for job in plan.jobs))
    progress.heard(at_batch(A(0), 4))
    assert progress.summary() == "serial baseline: job 1 of 3"
    progress.heard(at_batch(A(2), 4))
    assert progress.summary() == "serial baseline: job 3 of 3"
    assert progress.steps_done == 24
    assert progress.lines()[0].startswith("A/step/fold-2 · epoch 1/1 · batch")


def test_the_speed_of_jobs_in_turn_goes_on_from_job_to_job() -> None:
    watch = Clock()
    progress = make_progress(watch, models=("A",), folds=5, epochs=1)
    place(progress, *map(A, range(5)))
    for index in range(4):
        for batch in (5, 10):
            progress.heard(at_batch(A(index), batch))
            watch.now += 1
        assert f"then {4 - index} more" in progress.lines()[0]
        progress.ended(result(A(index)))
    progress.heard(at_batch(A(4), 5))
    assert progress.lines() == [
        "A/step/fold-4 · epoch 1/1 · 5.0 it/s · batch 5/10 · loss 0.5 · core 0"
    ]
    assert progress.times() == "8.0 s elapsed, 1.0 s left, 5.0 steps/s"


def test_a_gpu_stands_in_place_of_a_core() -> None:
    progress = make_progress()
    progress.placed(Placement((A(0),), (0,), gpu=3))
    assert progress.lines() == ["A/step/fold-0 · starting · GPU 3"]


def test_best_so_far_compares_candidates_with_equally_many_folds() -> None:
    progress = make_progress()
    assert progress.best() == ""
    progress.ended(result(B(0), 0.99))
    # One alone is not the best of any.
    assert progress.best() == "so far B/step accuracy 0.9900 (1 fold)"
    progress.ended(result(A(0), 0.5))
    assert progress.best() == "best so far B/step accuracy 0.9900 (1 fold)"
    progress.ended(result(A(1), 0.7))
    assert progress.best() == "so far A/step accuracy 0.6000 (2 folds)"
    progress.ended(result(B(1), status=FAILED))
    assert progress.best() == "so far A/step accuracy 0.6000 (2 folds)"


def test_infinite_scores_end_nothing() -> None:
    progress = make_progress()
    for name, score in ((A(0), math.inf), (A(1), -math.inf), (B(0), 0.5), (B(1), 0.5)):
        progress.ended(result(name, score))
    assert progress.best() == "so far B/step accuracy 0.5000 (2 folds)"


def test_best_is_never_said_of_a_tie() -> None:
    progress = make_progress()
    for name in (A(0), B(0)):
        progress.ended(result(name, 0.5))
    assert progress.best() == "so far A/step is tied with 1 more at accuracy 0.5000 (1 fold)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
