"""How far a sweep is: steps, the time left, what runs, and the best so far."""

from __future__ import annotations

import numpy as np
import pytest

from asynckfold import Fold, Plan, Result, TrainerParams
from asynckfold.api.progress import SweepProgress
from asynckfold.jobs.messages import EpochEnd, Progress
from asynckfold.jobs.placement import Placement, Request
from asynckfold.jobs.result import Epoch
from tests.toy import make_jobs

A = "A/step/fold-{}".format


def make_progress() -> SweepProgress:
    one = np.array([0]), np.array([1])
    jobs = make_jobs(["A"], ["step"], [Fold(0, index, *one) for index in range(4)], 0)
    plan = Plan(jobs, TrainerParams(epochs=4), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
    requests = {job.id: Request(job.id, 10.0) for job in plan.jobs}
    return SweepProgress(plan, requests, [], {job.id: 10 for job in plan.jobs})


def at_batch(name: str, batch: int, epoch: int = 1) -> Progress:
    return Progress(name, 1, epoch, 4, batch, 10, 0.5)


def test_the_time_left_is_that_of_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = make_progress()
    progress.placed(Placement((A(0),), (0,)))
    now[0] += 5
    # Nothing is promised before something was measured.
    assert (progress.seconds_left(), progress.times()) == (None, "5.0 s elapsed")
    progress.heard(at_batch(A(0), 10))
    assert progress.times() == "5.0 s elapsed, 1 min 15 s left"
    now[0] += 15
    progress.ended(Result(A(0), 1, "done", {"accuracy": 0.5}, fit_seconds=2.0))
    assert progress.seconds_left() == 60
    # What a checkpoint holds was not trained in this session.
    progress.placed(Placement((A(1),), (0,)))
    progress.heard(at_batch(A(1), 0, epoch=4))
    assert progress.seconds_left() == pytest.approx(45)


def test_who_leads_is_told_before_any_fold_has_ended() -> None:
    def ended(number: int, loss: float, accuracy: float | None) -> Epoch:
        return Epoch(number, 1.0, loss, accuracy, 0.1, 1.0, {})

    progress = make_progress()
    progress.placed(Placement((A(0), A(1)), (0,)))
    assert progress.best() == ""
    progress.heard(EpochEnd(A(0), 1, ended(1, 0.5, 0.7)))
    progress.heard(EpochEnd(A(1), 1, ended(1, 0.6, 0.8)))
    assert progress.best() == f"so far {A(1)} valid accuracy 0.8000 (epoch 1 of 4)"
    progress.heard(EpochEnd(A(0), 1, ended(2, -0.5, None)))
    assert progress.best() == f"so far {A(0)} valid loss -0.5000 (epoch 2 of 4)"
    progress.ended(Result(A(0), 1, "done", {"accuracy": 0.5}))
    assert progress.best() == "so far A/step accuracy 0.5000 (1 fold)"
