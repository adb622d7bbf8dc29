"""A `fit_fn` of the user's own: the bits of the built-in loop, interrupted or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckfold import TrainerParams
from asynckfold.jobs.messages import CheckpointRef, EpochEnd
from asynckfold.jobs.result import DIVERGED, DONE, FAILED
from asynckfold.training.user_loop import StopSignal
from asynckfold.training.user_steps import StepError
from tests.training.tiny import Noisy, Tiny, always, checkpoints


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
        found = [(context.model(inputs), targets) for inputs, targets in context.valid_loader]
    outputs, targets = (torch.cat(parts) for parts in zip(*found, strict=True))
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
        except StopSignal:
            keep = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            context.save({**keep, "total": total})
            raise
        context.report(total=total)


def noisy(root: Path, fit_fn: Callable[[Any], Any] | None, **parts: Any) -> Tiny:
    given = {"params": TrainerParams(epochs=3), **parts}
    return Tiny(root, {"noisy": Noisy}, {"cosine": "cosine"}, fit_fn=fit_fn, **given)


def test_a_loop_that_does_the_same_has_the_same_bits(tmp_path: Path) -> None:
    own, built_in = (
        noisy(tmp_path / "own", as_built_in).train(),
        noisy(tmp_path / "b", None).train(),
    )
    assert own.status == DONE
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


def continued(tiny: Tiny, stops: Callable[[], Callable[[], bool]]) -> tuple[Any, int]:
    """Train with stops; return the result and the number of attempts."""
    refs: list[CheckpointRef] = []
    for attempt in range(1, 50):
        result, events = tiny.attempt(None, attempt, refs, stops())
        if result is not None:
            return result, attempt
        refs = checkpoints(events) or refs
    raise AssertionError("the training makes no progress")


def after(calls: int) -> Callable[[], bool]:
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_a_loop_that_saves_each_epoch_continues_with_the_same_bits(tmp_path: Path) -> None:
    # 4 batches an epoch: it leaves at the second batch of the next epoch.
    parts, attempts = continued(noisy(tmp_path / "parts", as_built_in), lambda: after(5))
    whole = noisy(tmp_path / "whole", as_built_in).train()
    assert attempts == 3
    assert parts.digest == whole.digest
    assert len(parts.epochs) == 3


def test_a_loop_that_saves_in_the_middle_of_an_epoch_continues_there(tmp_path: Path) -> None:
    parts, attempts = continued(noisy(tmp_path / "parts", saving_on_the_way), lambda: always)
    whole = noisy(tmp_path / "whole", saving_on_the_way).train()
    assert attempts == 12
    assert parts.digest == whole.digest
    assert [set(item.logged) for item in parts.epochs] == [{"total"}] * 3


def test_a_finished_job_whose_result_was_lost_is_not_trained_again(tmp_path: Path) -> None:
    calls = []

    def counted(context: Any) -> None:
        calls.append(1)
        as_built_in(context)

    class Stateful:
        """Is not copied for each job."""

        def __call__(self, context: Any) -> None:
            counted(context)

        def __deepcopy__(self, memo: Any) -> Stateful:
            return self

    tiny = noisy(tmp_path, Stateful())
    first, events = tiny.attempt()
    again, _ = tiny.attempt(None, 2, checkpoints(events))
    assert first is not None
    assert again is not None
    assert len(calls) == 1
    assert (again.digest, again.scores) == (first.digest, first.scores)


def test_a_loop_that_reports_nothing_is_scored_at_its_end(tmp_path: Path) -> None:
    def silent(context: Any) -> None:
        for _ in range(2):
            for batch in context.train_loader:
                one_step(context, *batch)

    tiny = noisy(tmp_path / "own", silent, params=TrainerParams(epochs=2))
    result, events = tiny.attempt()
    built_in = Tiny(tmp_path / "b", {"noisy": Noisy}).train()
    assert result is not None
    assert result.weights == built_in.weights
    (epoch,) = result.epochs
    last = built_in.epochs[-1]
    assert (epoch.valid_loss, epoch.accuracy) == (last.valid_loss, last.accuracy)
    assert math.isnan(epoch.train_loss)
    assert [item.epoch for item in events if isinstance(item, EpochEnd)] == [epoch]
    assert result.scores == {}


def test_a_broken_off_pass_is_an_epoch(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def breaking(context: Any) -> None:
        for _ in range(2):
            for inputs, _ in context.train_loader:
                seen.append(inputs[:, 0].int().tolist())
                break
        seen.append([len(context.train_loader), len(context.valid_loader)])
        for inputs, _ in context.valid_loader:
            seen.append(inputs[:, 0].int().tolist())

    class Stateful:
        def __call__(self, context: Any) -> None:
            breaking(context)

        def __deepcopy__(self, memo: Any) -> Stateful:
            return self

    tiny = noisy(tmp_path, Stateful())
    tiny.train()
    first, second, lengths, held_out = seen
    assert first != second
    assert lengths == [4, 1]
    fold = tiny.bundle.fold_of(tiny.jobs[0])
    assert held_out == fold.valid.tolist()
    assert not set(first + second) & set(held_out)


def test_a_loop_that_saves_and_does_not_load_is_told(tmp_path: Path) -> None:
    def forgetful(context: Any) -> None:
        for _ in range(context.epochs):
            for batch in context.train_loader:
                one_step(context, *batch)
            context.save({"model": context.model.state_dict()})

    tiny = noisy(tmp_path, forgetful)
    result, events = tiny.attempt(stop=after(5))
    assert result is None
    with pytest.raises(StepError, match=r"a fit_fn that saves must load.*Call context.load\(\)"):
        tiny.attempt(None, 2, checkpoints(events))


def test_a_job_that_exceeds_its_time_fails_and_can_be_continued(tmp_path: Path) -> None:
    late = noisy(tmp_path, saving_on_the_way, job_timeout_s=1e-9)
    result, events = late.attempt()
    assert result is not None
    assert (result.status, result.error[:9]) == (FAILED, "timed out")
    assert checkpoints(events)


@pytest.mark.parametrize(
    ("metrics", "received"),
    [
        ({}, "none"),
        ({"lr": 1.0}, "'lr'"),
        ({"loss": "a"}, "loss='a'"),
        ({"loss": torch.ones(2)}, r"loss=tensor\("),
    ],
)
def test_a_wrong_report_raises(tmp_path: Path, metrics: dict[str, Any], received: str) -> None:
    def reporting(context: Any) -> None:
        context.report(**metrics)

    with pytest.raises(StepError, match=f"received {received}"):
        noisy(tmp_path, reporting).train()


def test_a_reported_nan_diverges(tmp_path: Path) -> None:
    def reporting(context: Any) -> None:
        context.report(train_loss=1.0)
        context.report(train_loss=float("nan"))

    result = noisy(tmp_path, reporting).train()
    assert result.status == DIVERGED
    assert result.error == "the reported train_loss became nan in epoch 2"
