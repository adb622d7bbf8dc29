"""A `fit_fn` of the user's own: the bits of the built-in loop, interrupted or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.sweeps import in_pieces, problems, train
from tests.training.test_own_step import Gan, two
from tests.training.tiny import Noisy


def as_built_in(context: Any) -> None:
    """Train as the built-in loop does, and keep what is needed to continue after each epoch."""
    model, optimizer, schedule = context.model, context.optimizer, context.lr_schedule
    if (kept := context.load()) is not None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["lr_schedule"])
    for epoch in range(context.epoch_start, context.epochs):
        model.train()
        losses = [one_step(context, *batch) for batch in context.train_loader]
        schedule.step()
        context.report(train_loss=sum(losses) / len(losses), **judged(context))
        context.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_schedule": schedule.state_dict(),
                "epoch": epoch,
            }
        )


def one_step(context: Any, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    context.optimizer.zero_grad()
    loss = context.criterion(context.model(inputs), targets)
    loss.backward()
    context.optimizer.step()
    return loss.item()


def judged(context: Any) -> dict[str, float]:
    context.model.eval()
    with torch.no_grad():
        parts = [(context.model(inputs), targets) for inputs, targets in context.valid_loader]
    outputs, targets = map(torch.cat, zip(*parts, strict=True))
    hits = (outputs.argmax(1) == targets).double().mean()
    return {"valid_loss": context.criterion(outputs, targets).item(), "accuracy": float(hits)}


def saving_on_the_way(context: Any) -> None:
    """Keep the state also when the job has to leave in the middle of an epoch."""
    model, optimizer = context.model, context.optimizer
    kept = context.load() or {"total": 0.0}
    total = kept["total"]
    if "model" in kept:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    for _ in range(context.epoch_start, context.epochs):
        try:
            for batch in context.train_loader:
                total += one_step(context, *batch)
        except BaseException:
            keep = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            context.save({**keep, "total": total})
            raise
        context.report(total=total)


def noisy(fit_fn: Any, **more: Any) -> dict[str, Any]:
    words: dict[str, Any] = {"models": {"noisy": Noisy}, "schedules": ["cosine"]}
    return {**words, "params": {"epochs": 3}, "fit_fn": fit_fn, **more}


def test_a_loop_that_does_the_same_has_the_same_bits(tmp_path: Path) -> None:
    own = train(tmp_path / "own", **noisy(as_built_in))
    built_in = train(tmp_path / "b", **noisy(None))
    assert own.status == "done"
    assert own.weights == built_in.weights
    assert own.outputs is not None
    assert built_in.outputs is not None
    assert own.outputs.tobytes() == built_in.outputs.tobytes()
    for one, other in zip(own.epochs, built_in.epochs, strict=True):
        assert (one.number, one.lr, one.accuracy) == (other.number, other.lr, other.accuracy)
        assert one.train_loss == pytest.approx(other.train_loss)
        assert one.valid_loss == pytest.approx(other.valid_loss)
    # What the held-out fold was scored with came from dropout-free outputs of the last epoch.
    assert own.scores["accuracy"] == built_in.epochs[-1].accuracy


def test_a_loop_that_saves_in_the_middle_of_an_epoch_continues_there(tmp_path: Path) -> None:
    words = noisy(saving_on_the_way, params={"epochs": 2}, batch_size=15)
    pieces, attempts = in_pieces(tmp_path / "pieces", **words)
    whole = train(tmp_path / "whole", **words)
    assert attempts == 6
    assert pieces.digest == whole.digest
    assert [set(item.logged) for item in pieces.epochs] == [{"total"}] * 2


def test_a_loop_that_reports_nothing_is_scored_at_its_end(tmp_path: Path) -> None:
    def silent(context: Any) -> None:
        for _ in range(2):
            for batch in context.train_loader:
                one_step(context, *batch)

    result = train(tmp_path / "own", **noisy(silent, params={"epochs": 2}))
    built_in = train(tmp_path / "b", **noisy(None, schedules=["constant"]))
    (epoch,), last = result.epochs, built_in.epochs[1]
    assert (epoch.valid_loss, epoch.accuracy) == (last.valid_loss, last.accuracy)
    assert math.isnan(epoch.train_loss)


class Shared:
    """A loop that is not copied for each job, so that the test sees what it notes."""

    def __init__(self) -> None:
        self.passes: list[Any] = []

    def __deepcopy__(self, memo: Any) -> Shared:
        return self

    def __call__(self, context: Any) -> None:
        for _ in range(2):
            for inputs, _ in context.train_loader:
                self.passes.append(inputs[:, 0].int().tolist())
                break
        self.passes.append([len(context.train_loader), len(context.valid_loader)])
        for inputs, _ in context.valid_loader:
            self.passes.append(inputs[:, 0].int().tolist())


def test_a_broken_off_pass_is_an_epoch(tmp_path: Path) -> None:
    loop = Shared()
    train(tmp_path / "run", **noisy(loop))
    first, second, lengths, held_out = loop.passes[-4:]
    assert first != second
    assert lengths == [4, 1]
    assert held_out == [*range(20)]
    assert not set(first + second) & set(held_out)


def test_a_loop_that_saves_and_does_not_load_is_told(tmp_path: Path) -> None:
    def forgetful(context: Any) -> None:
        for _ in range(context.epochs):
            try:
                for batch in context.train_loader:
                    one_step(context, *batch)
            except BaseException:
                context.save({"model": context.model.state_dict()})
                raise

    assert train(tmp_path, **noisy(forgetful, job_timeout_s=1e-9)).error[:9] == "timed out"
    result = train(tmp_path, **noisy(forgetful))
    assert result.status == "failed"
    assert "a fit_fn that saves must load" in result.error
    assert "Call context.load() first" in result.error


def test_a_reported_nan_diverges(tmp_path: Path) -> None:
    def reporting(context: Any) -> None:
        for _ in context.train_loader:
            pass
        context.report(train_loss=1.0)
        context.report(train_loss=float("nan"))

    result = train(tmp_path, **noisy(reporting))
    assert result.status == "diverged"
    assert result.error == "the reported train_loss became nan in epoch 2"


# Rules


def reporting(**metrics: Any) -> Any:
    return lambda context: context.report(**metrics)


COLUMN = "a reported metric must not have the name of another column of the epochs"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (noisy(lambda context: None), "fit_fn must train on the batches", "a function that takes none"),
    (noisy(reporting()), "report() needs a metric", "none"),
    (noisy(reporting(lr=1.0)), COLUMN, "'lr'"),
    (noisy(reporting(loss="a")), "what is logged must be numbers", "loss='a'"),
    (
        noisy(as_built_in, schedules=["reduce"]),
        "LR schedules that react to a loss need a criterion and no fit_fn",
        "LR schedule reduce",
    ),
    (
        noisy(as_built_in, models={"m": lambda: nn.Linear(8, 2)}),
        "model m must return (samples, classes) scores for the 3 classes",
        "shape (10, 2)",
    ),
]


def test_a_broken_rule_is_refused(tmp_path: Path) -> None:
    for number, (parts, rule, received) in enumerate(REFUSED):
        ((broken, what, remedy),) = problems(tmp_path / str(number), **parts)
        assert broken.startswith(rule)
        assert received in what
        assert remedy.endswith(".")


def test_a_loop_of_several_optimizers_passes(tmp_path: Path) -> None:
    def both(context: Any) -> None:
        for inputs, targets in context.train_loader:
            context.criterion(context.model(inputs), targets).backward()
            for optimizer, schedule in zip(context.optimizer, context.lr_schedule, strict=True):
                optimizer.step()
                schedule.step()

    words = noisy(both, models={"m": Gan}, opt_fn=two, params={"epochs": 1})
    assert train(tmp_path, **words).status == "done"
