"""How far a sweep is: steps, the time left, what runs, and the best so far."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asynckfold import Epoch, Fold, Plan, Result, TrainerParams
from asynckfold.api.progress import SweepProgress
from asynckfold.jobs.messages import EpochEnd, Progress
from asynckfold.jobs.placement import Placement, Request
from asynckfold.jobs.plan import make_jobs

A, B = "A/step/fold-{}".format, "B/step/fold-{}".format


def make_progress(models: tuple[str, ...] = ("A", "B"), folds: int = 3) -> SweepProgress:
    one = np.array([0]), np.array([1])
    jobs = make_jobs(models, ["step"], [Fold(0, index, *one) for index in range(folds)], 0)
    plan = Plan(jobs, TrainerParams(epochs=4), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
    requests = {job.id: Request(job.id, 10.0) for job in plan.jobs}
    return SweepProgress(plan, requests, [], {job.id: 10 for job in plan.jobs})


def result(name: str, score: float = 0.5, status: str = "done") -> Result:
    scores = {"accuracy": score} if status == "done" else {}
    return Result(name, 1, status, scores, fit_seconds=2.0)


def place(progress: SweepProgress, *names: str, **settings: Any) -> None:
    progress.placed(Placement(names, (0,), **settings))


def ended_epoch(name: str, number: int = 1) -> EpochEnd:
    return EpochEnd(name, 1, Epoch(number, 0.5, 0.6, 0.7, 1e-3, 2.0))


def at_batch(name: str, batch: int, epoch: int = 1, batches: int = 10) -> Progress:
    return Progress(name, 1, epoch, 4, batch, batches, 0.5)


def test_steps_follow_batches_epochs_and_ends() -> None:
    progress = make_progress()
    assert (progress.steps_done, progress.steps, progress.percent) == (0, 240, 0)
    place(progress, A(0))
    assert progress.summary() == "0 of 6 jobs finished, 1 running, 5 waiting"
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
    for job in progress.plan.jobs:
        progress.ended(result(job.id))
    assert (progress.percent, progress.seconds_left()) == (100, 0.0)


def test_the_time_left_is_that_of_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = make_progress(("A",), folds=4)
    place(progress, A(0))
    now[0] += 5
    # Nothing is promised before something was measured.
    assert (progress.seconds_left(), progress.times()) == (None, "5.0 s elapsed")
    progress.heard(at_batch(A(0), 10))
    assert progress.times() == "5.0 s elapsed, 1 min 15 s left, 2 steps/s"
    now[0] += 15
    progress.ended(result(A(0)))
    assert progress.seconds_left() == 60
    # What a checkpoint holds was not trained in this session.
    place(progress, A(1))
    progress.heard(at_batch(A(1), 0, epoch=4))
    assert progress.seconds_left() == pytest.approx(45)


def test_a_line_says_what_a_fusion_group_or_a_gpu_does() -> None:
    progress = make_progress(folds=5)
    names = [A(index) for index in range(5)]
    place(progress, *names, trainer="fused")
    place(progress, B(0), gpu=3)
    assert progress.lines() == [
        "A/step · starting · 5 folds fused · core 0",
        "B/step/fold-0 · starting · GPU 3",
    ]
    for name in names:
        progress.heard(at_batch(name, 8))
    where = "5 folds fused · batch 8/10 · loss 0.5 · core 0"
    assert progress.lines()[0] == f"A/step · epoch 1/4 · {where}"
    for name in names:
        progress.heard(ended_epoch(name, number=2))
    assert progress.lines()[0] == "A/step · epoch 2/4 · 5 folds fused · valid 0.700 · core 0"


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ({}, ""),
        # One alone is not the best of any.
        ({B(0): 0.99}, "so far B/step accuracy 0.9900 (1 fold)"),
        ({B(0): 0.99, A(0): 0.5}, "best so far B/step accuracy 0.9900 (1 fold)"),
        ({B(0): 0.99, A(0): 0.5, A(1): 0.7}, "so far A/step accuracy 0.6000 (2 folds)"),
        ({A(0): math.inf, B(0): 0.5}, "so far B/step accuracy 0.5000 (1 fold)"),
    ],
)
def test_best_so_far_compares_candidates_with_equally_many_folds(
    scores: dict[str, float], text: str
) -> None:
    progress = make_progress()
    for name, score in scores.items():
        progress.ended(result(name, score))
    progress.ended(result(B(2), status="failed"))
    assert progress.best() == text
