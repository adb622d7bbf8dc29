"""`training_step=`: sent, recorded in the plan, logged in the epochs, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AllJobsFailedError, AsyncKFold, InputError
from tests.toy import Tiny, adam, samples


def step(model: nn.Module, batch: Any, state: Any) -> dict[str, Any]:
    inputs, targets = batch
    outputs = model(inputs)
    loss = state.criterion(outputs, targets)
    return {"loss": loss, "hits": (outputs.argmax(1) == targets).float().mean()}


def smoothed(model: nn.Module, batch: Any, state: Any) -> Any:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, label_smoothing=0.1)


def two(model: Tiny) -> tuple[torch.optim.Optimizer, ...]:
    return (
        torch.optim.Adam(model.layers[0].parameters(), 1e-2),
        torch.optim.SGD(model.layers[4].parameters(), 0.1),
    )


def in_turn(model: nn.Module, batch: Any, state: Any) -> Any:
    for optimizer in state.optimizers:
        loss = state.criterion(model(batch[0]), batch[1])
        state.backward(loss, optimizer)
    return loss


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False, **settings}
    return AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **given)


def called(
    root: Path, opt_fn: Callable[[Any], Any] = adam, params: Any = None, **settings: Any
) -> Any:
    params = {"epochs": 2, **(params or {})}
    return kfold(root, **settings)({"Tiny": Tiny}, ["cosine"], opt_fn, params)


def test_workers_train_by_the_step_and_record_what_it_logs(tmp_path: Path) -> None:
    results = called(tmp_path / "own", training_step=step, engine="process", n_jobs=1)
    expected = called(tmp_path / "built-in", fuse=False)
    job = "Tiny/cosine/fold-0"
    assert results.results[job].weights == expected.results[job].weights
    assert results.best_score_ == expected.best_score_
    rows = results.to_frame("epoch")
    assert list(rows.columns) == [*expected.to_frame("epoch").columns, "hits"]
    assert rows["hits"].between(0.01, 1).all()
    stored = [item.logged["hits"] for item in results.results[job].epochs]
    assert rows["hits"].tolist()[:2] == stored


def test_several_optimizers_train_and_are_refitted(tmp_path: Path) -> None:
    results = called(tmp_path, two, training_step=in_turn, refit=True)
    assert results.best_score_ > 0.4
    assert results.refitted.results["Tiny/cosine/fold-0"].status == "done"


def test_the_step_is_part_of_the_plan(tmp_path: Path) -> None:
    plain, own = tmp_path / "plain", tmp_path / "own"
    called(plain)
    called(own, training_step=step)
    assert called(own, training_step=step).counts["pending"] == 0
    for root, other in ((own, smoothed), (own, None), (plain, step)):
        with pytest.raises(InputError, match="training_step"):
            called(root, training_step=other)


class Locked:
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def __call__(self, model: nn.Module, batch: Any, state: Any) -> Any:
        return step(model, batch, state)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no function": (
        {"training_step": 1},
        r"training_step must be a function .*: received 1\. Pass a function",
    ),
    "not sendable": (
        {"training_step": Locked(), "engine": "process"},
        r"training_step must be sendable .*: received training_step\.guard: ",
    ),
    "another trainer": (
        {"training_step": step, "engine": "process", "trainer": "hogwild", "processes": 2},
        r"the plain trainer .* training_step must go without trainer: received trainer='hogwild'",
    ),
    "a baseline": (
        {"training_step": step, "baseline": "estimate"},
        r"the serial baseline .* training_step must .*: received baseline='estimate'\. Leave one",
    ),
    "a tuple without a step": (
        {"opt_fn": two},
        r"opt_fn must return a torch\.optim\.Optimizer: received a tuple of 2\. .*training_step=",
    ),
    "no loss": (
        {"training_step": lambda model, batch, state: None},
        "training_step must give one number with a gradient as loss: received None",
    ),
    "fused": (
        {"training_step": step, "fuse": True},
        "fuse=True needs models that can be fused: .*training step of the user's own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        called(tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "run.db").exists()


def test_a_nan_in_the_first_batch_diverges(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any, state: Any) -> Any:
        return step(model, batch, state)["loss"] * float("nan")

    with pytest.raises(AllJobsFailedError, match="the loss became nan at epoch 1, batch 1"):
        called(tmp_path, training_step=broken)


def margin(model: nn.Module, batch: Any, state: Any) -> dict[str, Any]:
    best = model(batch[0]).topk(2).values
    return {"margin": (best[:, 0] - best[:, 1]).mean()}


def test_a_validation_step_gives_the_score_of_its_name(tmp_path: Path) -> None:
    results = called(tmp_path, validation_step=margin, scoring=["margin", "accuracy"])
    rows = results.to_frame("epoch")
    last = rows[rows["epoch"] == 2]["margin"]
    assert results.best_score_ == pytest.approx(last.mean())
    assert set(results.results["Tiny/cosine/fold-0"].scores) == {"margin", "accuracy"}
    with pytest.raises(InputError, match="scoring must name scikit-learn scorers: received 'mar"):
        called(tmp_path / "other", scoring="margin")


def test_nearly_the_name_of_what_it_measures_is_refused(tmp_path: Path) -> None:
    message = r"scoring must name what .*: received 'margn'; of model Tiny it measures 'margin'\. "
    with pytest.raises(InputError, match=message + r".* mean 'margin'\?"):
        called(tmp_path / "run", validation_step=margin, scoring=["margn", "accuracy"])
    assert not (tmp_path / "run" / "run.db").exists()
