"""How far a sweep is: steps, the time left, what runs, and the best so far."""

from __future__ import annotations

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


def test_the_time_left_is_that_of_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = make_progress(("A",), folds=4)
    place(progress, A(0))
    now[0] += 5
    # Nothing is promised before something was measured.
    assert (progress.seconds_left(), progress.times()) == (None, "5.0 s elapsed")
    progress.heard(at_batch(A(0), 10))
    assert progress.times() == "5.0 s elapsed, 1 min 15 s left"
    now[0] += 15
    progress.ended(result(A(0)))
    assert progress.seconds_left() == 60
    # What a checkpoint holds was not trained in this session.
    place(progress, A(1))
    progress.heard(at_batch(A(1), 0, epoch=4))
    assert progress.seconds_left() == pytest.approx(45)
