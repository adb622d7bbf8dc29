"""A run in TensorBoard and in MLflow: all its numbers, once, however often they are written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults
from asynckfold.integrations import mlflow as in_mlflow
from asynckfold.integrations import tensorboard as in_tensorboard
from asynckfold.store.layout import job_folder
from tests.toy import samples


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def swept(root: Path, schedules: list[str]) -> CVResults:
    words: dict[str, Any] = {"engine": "serial", "verbose": 0, "report": False}
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
