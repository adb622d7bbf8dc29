"""A race in the loop: load, order and kills change no decision."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn, optim

from asynckfold import AsyncKFold, CVResults, InputError, Plan, Result, RunStore, load_results
from asynckfold.cli.status import lines, state_of
from asynckfold.jobs.folds import make_folds
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Request
from asynckfold.sweep.loop import Sweep
from asynckfold.sweep.race import Race
from tests.interrupted import interrupted
from tests.sweep.test_loop import FakeEngine, Recording, plan_of
from tests.toy import Tiny, adam, samples

SCORES = {"Best": 0.9, "Close": 0.895, "Hopeless": 0.1, "Broken": 0.5}
TARGETS = np.arange(60) % 2
FOLDS = make_folds(60, TARGETS, 5)


def trained(task: Task) -> Result:
    job = task.job
    if (job.model, job.fold) == ("Broken", 1):
        return Result(job.id, task.attempt, "diverged", error="the loss is not finite")
    score = SCORES[job.model] + 0.01 * np.sin(7 * job.fold + len(job.model))
    return Result(job.id, task.attempt, "done", {"accuracy": float(score)}, weights=job.id)


class Reversed(FakeEngine):
    """Ends the last job first."""

    def end(self, item: Any) -> None:
        self.waiting.append(item)
        super().end(self.waiting.pop(0))


def raced(root: Path, engine: FakeEngine, steps: int | None = None) -> CVResults:
    """Race the models on an engine; with `steps`, leave after so many and begin again."""
    plan = replace(plan_of(list(SCORES), FOLDS), race=0.05)
    requests = {job.id: Request(job.id, 1.0, stage=job.fold) for job in plan.jobs}
    for count in (steps, None):
        engine.waiting, engine.inbox = [], queue.SimpleQueue()
        with RunStore.hold(root) as store:
            store.begin(plan, FOLDS, TARGETS)
            sweep = Sweep(
                store, engine, engine.inbox, requests, lambda result: result, Recording(),
                engine.clock, race=Race(plan, FOLDS),
            )  # fmt: skip
            if count is None:
                sweep.run()
                return load_results(store.reader)
            for _ in range(count):
                sweep.step(0.0)
            sweep.leave()
    raise AssertionError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckfold.sweep.loop.TICK_SECONDS", 0.001)


def test_load_order_and_kills_change_no_decision(tmp_path: Path) -> None:
    one = raced(tmp_path / "one", FakeEngine(trained, queue.SimpleQueue(), (0,)), 0)
    states = {row.name: (row.done, row.status) for row in one.candidates}
    assert states == {
        "Best/cosine": (5, "done"),
        "Close/cosine": (5, "done"),
        "Hopeless/cosine": (2, "cancelled"),
        "Broken/cosine": (1, "diverged"),
    }
    saved = [item.job_id for item in one.results.values() if item.status == "cancelled"]
    assert {item.attempt for item in one.results.values() if item.job_id in saved} == {0}
    assert "Racing saved 6 of 20 jobs" in str(one.verdict)
    assert "at most 0.05" in str(one.verdict)
    ahead = 0
    for kind in (FakeEngine, Reversed):
        for cores, steps in ((3, 4), (7, 3), (20, 2), (20, 30)):
            engine = kind(trained, queue.SimpleQueue(), tuple(range(cores)))
            other = raced(tmp_path / f"{kind.__name__} {cores} {steps}", engine, steps)
            assert other.fingerprint == one.fingerprint
            ahead += sum(other.results[name].attempt > 0 for name in saved)
    assert ahead > 0


def swept(root: Path, **settings: Any) -> CVResults:
    settings.setdefault("engine", "serial")
    settings = {"verbose": 0, "report": False, "race": True, "race_alpha": 0.2, **settings}
    kfold = AsyncKFold(6, samples(120), root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold({"tiny": Tiny}, ["constant"], sgd, {"epochs": 3}, params={"lr": [0.1, 0.05, -0.1]})


def sgd(model: nn.Module, lr: float) -> Any:
    return optim.SGD(model.parameters(), abs(lr), maximize=lr < 0)


def test_a_hopeless_candidate_is_left_out_also_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = swept(tmp_path / "whole")
    folds = [row.done for row in whole.candidates]
    assert folds[:2] == [6, 6]
    assert folds[2] < 6
    assert whole.cv_results_["rank_test_accuracy"][2] == 3
    assert np.isnan(whole.cv_results_["mean_test_accuracy"][2])
    with RunStore.read(tmp_path / "whole") as store:
        text = "\n".join(lines(state_of(store)))
    assert f"({folds[2]} of 6 folds, left out by racing)\n" in text
    with interrupted(monkeypatch, "training.training_run.Training", "score", 8):
        swept(tmp_path / "cut")
    assert swept(tmp_path / "cut").fingerprint == whole.fingerprint
    with pytest.raises(InputError, match="race"):
        swept(tmp_path / "whole", race_alpha=0.1)
    with pytest.raises(InputError, match="race"):
        swept(tmp_path / "whole", race=False, race_alpha=0.05)
    fused = swept(tmp_path / "fused", fuse=True, threads_per_job=1)
    assert {len({name[-6:] for name in group}) for group in fused.plan.groups} == {1}


@pytest.mark.nightly
def test_workers_decide_the_same(tmp_path: Path) -> None:
    whole = swept(tmp_path / "here", fuse=False)
    assert swept(tmp_path / "workers", fuse=False, engine="process").fingerprint == (
        whole.fingerprint
    )


def test_a_race_that_can_save_nothing_is_refused(tmp_path: Path) -> None:
    for rule, changes in {
        "a race needs two candidates": {"n": 1},
        "a race needs 3 folds": {"kfolds": 2},
        "refit must not name": {"refit": "1/constant"},
        "race_alpha is the bound": {"race": False, "race_alpha": 0.1},
        "fusion groups of one fold": {"plan_from": "other"},
    }.items():
        settings = {"kfolds": 5, "race": True, "engine": "serial", "verbose": 0, **changes}
        models = {str(place): Tiny for place in range(settings.pop("n", 2))}
        more = {"root_dir": tmp_path, "criterion": nn.CrossEntropyLoss(), "batch_size": 10}
        with pytest.raises(InputError, match=rule):
            AsyncKFold(dataset=samples(), **more, **settings)(models, ["constant"], adam)


def test_plans_without_a_race_keep_their_text() -> None:
    plan = plan_of(["A"], FOLDS)
    raced = replace(plan, race=0.05)
    assert "race" not in plan.to_json()
    assert Plan.from_json(raced.to_json()) == raced != plan
