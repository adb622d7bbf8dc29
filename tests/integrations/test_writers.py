"""A run in other trackers: all its numbers, once, however often they are written."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, RunStore, load_results
from asynckfold.integrations import clearml as in_clearml
from asynckfold.integrations import mlflow as in_mlflow
from asynckfold.integrations import tensorboard as in_tensorboard
from asynckfold.integrations import wandb as in_wandb
from asynckfold.jobs.result import Epoch
from asynckfold.store.layout import job_folder
from tests.toy import samples


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def swept(root: Path, schedules: list[str], **settings: Any) -> CVResults:
    words: dict[str, Any] = {"engine": "serial", "verbose": 0, "report": False, **settings}
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, **words)
    models = {"linear": lambda: nn.Linear(8, 3)}
    return kfold(models, schedules, sgd, {"epochs": 2}, params={"lr": [0.1]})


@pytest.mark.nightly
@pytest.mark.skipif(not has("tensorboard"), reason="needs the extra tensorboard")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_curves_of_each_job_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results, logs = swept(tmp_path / "run", ["constant"]), tmp_path / "logs"
    assert in_tensorboard.write(results, logs) == 2
    results = swept(tmp_path / "run", ["constant", "cosine"])
    assert in_tensorboard.write(results, logs) == 4
    for job in results.plan.jobs:
        result = results.results[job.id]
        found = EventAccumulator(str(job_folder(logs, job))).Reload()
        losses = found.Scalars("valid_loss")
        assert [item.step for item in losses] == [1, 2]
        assert [item.value for item in losses] == pytest.approx(
            [epoch.valid_loss for epoch in result.epochs]
        )
        (score,) = found.Scalars("score/accuracy")
        assert (score.step, score.value) == (2, pytest.approx(result.scores["accuracy"]))
        assert losses[-1].wall_time == pytest.approx(result.ended, abs=0.01)


@pytest.mark.nightly
@pytest.mark.skipif(not has("mlflow"), reason="needs the extra mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_a_run_for_each_candidate_and_job_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = f"file:{tmp_path / 'mlruns'}"
    results = swept(tmp_path / "run", ["constant"])
    assert in_mlflow.write(results, place) == 3
    assert in_mlflow.write(results, place) == 0
    results = swept(tmp_path / "run", ["constant", "cosine"])
    assert in_mlflow.write(results, place) == 3
    client = MlflowClient(place)
    runs = client.search_runs([client.get_experiment_by_name("run").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    assert len(runs) == len(by_name) == 6
    for row in results.candidates:
        run = by_name[row.name]
        assert run.data.metrics["mean/accuracy"] == pytest.approx(row.scores["accuracy"].mean())
        schedule = row.name.split("/")[1]
        assert run.data.params == {"model": "linear", "lr_schedule": schedule, "lr": "0.1"}
        assert run.info.status == "FINISHED"
    for job in results.plan.jobs:
        run, result = by_name[job.id], results.results[job.id]
        assert run.data.tags["mlflow.parentRunId"] == by_name[job.candidate].info.run_id
        assert run.data.metrics["score/accuracy"] == pytest.approx(result.scores["accuracy"])
        losses = client.get_metric_history(run.info.run_id, "train_loss")
        assert {item.step: item.value for item in losses} == pytest.approx(
            {epoch.number: epoch.train_loss for epoch in result.epochs}
        )


def half_done(root: Path) -> CVResults:
    """A run of two jobs: one has ended, the other has ended an epoch."""
    other = swept(root, ["constant"], part=(1, 2)).plan.jobs[1]
    with RunStore.hold(root) as store:
        store.epoch(other.id, 1, Epoch(1, 0.75, 0.5, None, 0.1, 1.0))
        store.flush()
    with RunStore.read(root) as reader:
        return load_results(reader)


class Tracked(SimpleNamespace):
    """A run of Weights & Biases, and a task of ClearML."""

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step
        self.rows[step], self.step = values, step + 1

    def connect(self, params: dict[str, Any], name: str) -> None:
        self.given |= params

    def get_logger(self) -> Any:
        return self

    def report_scalar(self, title: str, series: str, value: float, iteration: int) -> None:
        self.rows[title, series, iteration] = value

    def report_single_value(self, name: str, value: float) -> None:
        self.summary[name] = value


def test_wandb_has_a_run_for_each_job_in_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, Tracked] = {}

    def init(**given: Any) -> Tracked:
        run = Tracked(rows={}, summary={}, step=0, given=given, finish=lambda exit_code: None)
        return runs.setdefault(given["id"], run)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert in_wandb.write(half_done(tmp_path / "run"), "digits", tags=["a"]) == 2
    results = swept(tmp_path / "run", ["constant"])
    assert in_wandb.write(results, "digits", tags=["a"]) == 2
    assert [run.rows[1]["train_loss"] == 0.75 for run in runs.values()] == [False, True]
    for job, run in zip(results.plan.jobs, runs.values(), strict=True):
        wanted = {"group": "run", "job_type": job.candidate, "name": job.id, "tags": ["a"]}
        assert wanted.items() <= run.given.items()
        assert {"fold": job.fold, "lr": 0.1}.items() <= run.given["config"].items()
        assert run.rows[2]["valid_loss"] == results.results[job.id].epochs[1].valid_loss
        assert run.summary["score/accuracy"] == results.results[job.id].scores["accuracy"]


def test_clearml_has_a_task_for_each_candidate_with_a_curve_for_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Tracked] = []

    def init(**given: Any) -> Tracked:
        tasks.append(Tracked(rows={}, summary={}, given=given, close=lambda: None))
        return tasks[-1]

    monkeypatch.setitem(sys.modules, "clearml", SimpleNamespace(Task=SimpleNamespace(init=init)))
    assert in_clearml.write(half_done(tmp_path / "run"), "digits") == 1
    assert tasks[0].rows["train_loss", "fold-1", 1] == 0.75
    results = swept(tmp_path / "run", ["constant", "cosine"])
    assert in_clearml.write(results) == 2
    for row, task in zip(results.candidates, tasks[1:], strict=True):
        wanted = {"project_name": "run", "task_name": row.name, "lr": 0.1}
        assert wanted.items() <= task.given.items()
        assert task.summary["mean/accuracy"] == pytest.approx(row.mean("accuracy"))
        assert task.rows["score/accuracy", "fold-1", 2] == row.scores["accuracy"][1]
