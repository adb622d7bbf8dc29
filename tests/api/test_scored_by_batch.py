"""Outputs too large to keep are scored batch by batch: the same scores, in a batch's memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import (
    AllJobsFailedError,
    AsyncKFold,
    BestWeights,
    CVResults,
    InputError,
    JobsFailedWarning,
    RunStore,
)
from tests.interrupted import interrupted
from tests.training.tiny import two_epochs

torchmetrics = pytest.importorskip("torchmetrics")

COUNT, SIDE = 48, 6
RANDOM = np.random.default_rng(8)
PICTURES = RANDOM.normal(size=(COUNT, 1, SIDE, SIDE)).astype(np.float32)
CLASSES = (PICTURES[:, 0] > 0.3).astype(np.int64) + (PICTURES[:, 0] > 1)
EDGED = CLASSES.copy()
EDGED[:, 0], EDGED[:4] = -100, -100  # some pictures are ignored as a whole
BITS = (PICTURES > 0.3).astype(np.float32)
ROWS = PICTURES.reshape(COUNT, -1)
NUMBERS = ROWS @ RANDOM.normal(size=(SIDE * SIDE, 2)).astype(np.float32)
KINDS = CLASSES[:, 2, 2]
WEIGHTED = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0]))


class Net(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, outputs, 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


class Mask(Net):
    def __init__(self) -> None:
        super().__init__(1)


class Line(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIDE * SIDE, 2)


class Kinds(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIDE * SIDE, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.02)


def metrics() -> Any:
    return torchmetrics.classification


TASKS: dict[str, tuple[Any, Any, Any, Any]] = {
    "segmentation": (Net, (PICTURES, CLASSES), nn.CrossEntropyLoss(), None),
    "ignored": (Net, (PICTURES, EDGED), WEIGHTED, ["dice", "f1_macro", "pixel_accuracy"]),
    "masks": (Mask, (PICTURES, BITS), nn.BCEWithLogitsLoss(), ["iou", "dice"]),
    "numbers": (
        Line,
        (ROWS, NUMBERS),
        nn.MSELoss(),
        [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()],
    ),
    "classes": (
        Kinds,
        (ROWS, KINDS),
        WEIGHTED,
        {
            "accuracy": metrics().MulticlassAccuracy(3, average="micro"),
            "auroc": metrics().MulticlassAUROC(3),
        },
    ),
}


def swept(root: Path, most: float, task: str = "segmentation", **settings: Any) -> CVResults:
    model, data, criterion, scoring = TASKS[task]
    words: dict[str, Any] = {"engine": "serial", "verbose": 0, "report": False, "fuse": False}
    words |= {"scoring": scoring} | settings
    trainer = {"epochs": 2, "eval_batch_size": 4} | words.pop("params", {})
    kfold = AsyncKFold(3, data, root, criterion, 4, keep_outputs_gib=most, **words)
    return kfold([model], ["cosine"], sgd, trainer)


def plan_of(root: Path) -> Any:
    with RunStore.read(root) as store:
        return store.plan


def assert_same_scores(whole: CVResults, by_batch: CVResults) -> None:
    for name, result in whole.results.items():
        other = by_batch.results[name]
        assert (result.status, other.status) == ("done", "done"), other.traceback
        assert result.outputs is not None
        assert other.outputs is None
        assert other.weights == result.weights
        assert list(other.scores) == list(result.scores)
        assert other.scores == pytest.approx(result.scores, rel=1e-5)
        for mine, theirs in zip(result.epochs, other.epochs, strict=True):
            assert np.array_equal(theirs.train_loss, mine.train_loss, equal_nan=True)
            assert theirs.valid_loss == pytest.approx(mine.valid_loss, rel=1e-5)
            if mine.accuracy is None:
                assert theirs.accuracy is None
            else:
                assert theirs.accuracy == pytest.approx(mine.accuracy, rel=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_scores_losses_and_weights_are_those_of_all_outputs_at_once(
    task: str, tmp_path: Path
) -> None:
    # Batches of one: also such as have nothing but ignored pixels.
    params = {"eval_batch_size": 1 if task == "ignored" else 4}
    whole = swept(tmp_path / "whole", 1, task, params=params)
    by_batch = swept(tmp_path / "by-batch", 0, task, params=params)
    assert plan_of(tmp_path / "by-batch").by_batch
    assert not plan_of(tmp_path / "whole").by_batch
    assert_same_scores(whole, by_batch)


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "process", "fuse": True},
        {"engine": "process", "params": {"trainer": "allreduce", "processes": 2}},
        {"callbacks": [BestWeights("inner_loss")], "inner_valid": 0.2},
        {"params": {"precision": "bf16"}},
    ],
    ids=["fused", "allreduce", "callbacks", "bf16"],
)
def test_every_way_of_training_scores_by_batch(settings: dict[str, Any], tmp_path: Path) -> None:
    task = "numbers" if settings.get("fuse") else "segmentation"
    whole = swept(tmp_path / "whole", 1, task, **settings)
    by_batch = swept(tmp_path / "by-batch", 0, task, **settings)
    assert plan_of(tmp_path / "by-batch").by_batch
    assert bool(plan_of(tmp_path / "by-batch").groups) == bool(settings.get("fuse"))
    assert_same_scores(whole, by_batch)


def test_processes_give_the_bits_of_the_serial_engine(tmp_path: Path) -> None:
    serial = swept(tmp_path / "serial", 0)
    assert swept(tmp_path / "process", 0, engine="process").fingerprint == serial.fingerprint


def measure(model: nn.Module, batch: Any, state: Any) -> dict[str, torch.Tensor]:
    inputs, targets = batch
    return {"hits": (model(inputs).argmax(1) == targets).double().mean()}


def measure_at_first(model: nn.Module, batch: Any, state: Any) -> Any:
    return measure(model, batch, state) if state.epoch == 0 else None


def test_a_measure_that_the_last_epoch_lacks_fails_its_job_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AllJobsFailedError):
        swept(tmp_path, 0, scoring=["dice", "hits"], validation_step=measure_at_first)
    assert plan_of(tmp_path).by_batch
    told = "fold-2 failed: scoring raised ValueError: hits not measured in the last epoch"
    assert any(told in text for text in caplog.messages)


def test_own_loops_and_steps_are_scored_by_batch(tmp_path: Path) -> None:
    by_batch = swept(tmp_path / "loop", 0, scoring="mean_iou", fit_fn=two_epochs)
    assert plan_of(tmp_path / "loop").by_batch
    assert_same_scores(
        swept(tmp_path / "whole", 1, scoring="mean_iou", fit_fn=two_epochs), by_batch
    )

    scoring = ["hits", "dice"]
    found = swept(tmp_path / "step", 0, scoring=scoring, validation_step=measure)
    assert plan_of(tmp_path / "step").by_batch
    for result in found.results.values():
        assert list(result.scores) == scoring
        assert result.scores["hits"] == pytest.approx(result.epochs[-1].logged["hits"])
        assert result.outputs is None


class Counting(torchmetrics.Metric):  # type: ignore[misc]
    """Counts samples, and refuses more than so many."""

    higher_is_better = True

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.add_state("count", torch.tensor(0))

    def update(self, found: torch.Tensor, targets: torch.Tensor) -> None:
        if self.count >= self.most:
            raise RuntimeError(f"{len(targets)} more than {self.most} samples")
        self.count += len(targets)

    def compute(self) -> torch.Tensor:
        return self.count.float()


@pytest.mark.parametrize("first", [0, 1], ids=["by batch", "whole"])
def test_a_run_goes_on_as_it_was_begun(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scoring = [Counting(100)]
    whole = swept(tmp_path / "whole", first, scoring=scoring)
    # At the end of the first epoch of the second job.
    with interrupted(monkeypatch, "training.training_run.Training", "score", 3):
        swept(tmp_path / "part", first, scoring=scoring)
    with RunStore.read(tmp_path / "part") as store:
        assert 0 < len(store.results()) < 3
    capsys.readouterr()
    continued = swept(tmp_path / "part", 1 - first, scoring=scoring, verbose=1)
    told = capsys.readouterr().err
    assert plan_of(tmp_path / "part").by_batch == (first == 0)
    assert continued.fingerprint == whole.fingerprint or first == 1
    for name, result in whole.results.items():
        assert continued.results[name].weights == result.weights
        assert continued.results[name].scores == result.scores
        for mine, theirs in zip(result.epochs, continued.results[name].epochs, strict=True):
            assert theirs.valid_loss == mine.valid_loss
    begun = "the run was begun without them; each fold is scored batch by batch"
    assert (begun in told) == (first == 0)


def test_a_metric_gets_each_sample_once_and_its_error_is_the_jobs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = swept(tmp_path / "all", 0, scoring=Counting(100))
    assert {result.scores["Counting"] for result in found.results.values()} == {COUNT / 3}

    with pytest.raises(AllJobsFailedError):
        swept(tmp_path / "few", 0, scoring=Counting(8))
    told = "Net/cosine/fold-2 failed: RuntimeError: 4 more than 8 samples (after the last epoch)"
    assert told in caplog.messages


class Nan(Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = super().forward(inputs)
        return found if self.training else found * math.nan


def test_nan_outputs_are_a_divergence(tmp_path: Path) -> None:
    model, data, criterion, _ = TASKS["segmentation"]
    kfold = AsyncKFold(
        3, data, tmp_path, criterion, 4, keep_outputs_gib=0, engine="serial", report=False,
        verbose=0, scoring="dice",
    )  # fmt: skip
    with pytest.warns(JobsFailedWarning, match="an output on the held-out fold became nan"):
        found = kfold({"nan": Nan, "net": model}, ["constant"], sgd, {"epochs": 1})
    for name, result in found.results.items():
        wanted = "diverged" if name.startswith("nan") else "done"
        assert result.status == wanted


class Wide(nn.Module):
    """A mebibyte of outputs for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)
        return found


def count(targets: Any, outputs: Any) -> float:
    """A function: it needs all outputs at once."""
    return len(outputs)


@pytest.mark.nightly
def test_a_job_holds_no_more_than_a_batch_of_outputs(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).random((52, 1, 256, 256), np.float32)
    masks = (pictures[:, 0] > 0.5).astype(np.int64)
    masks[:, 0, :4] = range(4)
    peaks = []
    for scoring in ({"count": count}, "pixel_accuracy"):
        kfold = AsyncKFold(
            [(range(4), range(4, 52))], (pictures, masks), tmp_path / f"{len(peaks)}",
            nn.CrossEntropyLoss(), 4, stratify=False,
            keep_outputs_gib=0, report=False, verbose=0, scoring=scoring, fuse=False, n_jobs=1,
        )  # fmt: skip
        found = kfold([Wide], ["constant"], sgd, {"epochs": 1, "eval_batch_size": 4})
        peaks.append(min(result.peak_memory for result in found.results.values()))
    whole, by_batch = peaks
    # 48 held-out samples: 48 MiB of outputs, held twice.
    assert by_batch < whole - (48 << 20)


def test_outputs_that_do_not_fit_in_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 16 held-out samples, 3 outputs for each of their pixels, held twice.
    held = 16 * 3 * SIDE * SIDE * 4 * 2
    monkeypatch.setattr("asynckfold.api.score_checks.total_memory", lambda: held - 1)
    with pytest.raises(InputError, match="outputs of a held-out fold must fit in memory") as caught:
        swept(tmp_path / "whole", 0, scoring={"count": count})
    assert "count needs them all at once: score by metrics of torchmetrics" in str(caught.value)
    assert not (tmp_path / "whole").exists()
    assert swept(tmp_path / "by-batch", 0).counts["done"] == 3

    monkeypatch.setattr("asynckfold.api.score_checks.total_memory", lambda: held // 4 - 1)
    with pytest.raises(InputError, match="outputs of a batch must fit in memory"):
        swept(tmp_path / "none", 0)
