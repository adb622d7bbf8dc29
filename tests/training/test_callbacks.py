"""Callbacks: the bits of a plain loop, after any interruption, and rules that they must keep."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import (
    BestWeights,
    EarlyStopping,
    FitState,
    GradientNorm,
    Result,
    TrainerParams,
    WeightAverage,
)
from asynckfold.jobs.result import FAILED
from asynckfold.training import seeding
from asynckfold.training.batches import bounds, epoch_order
from asynckfold.training.checkpoint import weights_digest
from asynckfold.training.dry_run import preflight
from asynckfold.training.optimizers import with_fused_kernel
from tests.training.tiny import Noisy, Plain, Tiny, always, samples

EPOCHS = 6


def wild(model: nn.Module) -> torch.optim.Optimizer:
    """Steps so large that some epochs are worse than the one before."""
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def tiny(root: Path, *callbacks: Any, model: type[nn.Module] = Noisy, **parts: Any) -> Tiny:
    given = {"params": TrainerParams(epochs=EPOCHS), "inner_valid": 0.25, "opt_fn": wild, **parts}
    return Tiny(root, {"m": model}, callbacks=callbacks, **given)


def plain_loop(sweep: Tiny) -> list[tuple[dict[str, torch.Tensor], float]]:
    """Train the first job by torch alone; weights and inner loss after each epoch."""
    inputs, targets = map(torch.from_numpy, samples())
    job, fold = sweep.jobs[0], sweep.bundle.folds[0]
    seeding.seed_all(job.seed)
    model = Noisy()
    optimizer, criterion, found = with_fused_kernel(wild, model), nn.CrossEntropyLoss(), []
    train = fold.train[~torch.isin(*map(torch.from_numpy, (fold.train, fold.inner_valid))).numpy()]
    for epoch in range(EPOCHS):
        seeding.seed_all(seeding.epoch_seed(job.seed, epoch))
        model.train()
        order = torch.from_numpy(epoch_order(train, job.seed, epoch))
        for low, high in bounds(len(train), 10, model):
            rows = order[low:high]
            optimizer.zero_grad()
            criterion(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            inner = torch.from_numpy(fold.inner_valid)
            loss = float(criterion(model(inputs[inner]), targets[inner]))
        found.append((copy.deepcopy(model.state_dict()), loss))
    return found


def inner_losses(result: Result) -> list[float]:
    return [item.logged["inner_loss"] for item in result.epochs]


def test_what_is_set_aside_is_not_trained_on_and_is_measured_as_by_torch(tmp_path: Path) -> None:
    sweep = tiny(tmp_path)
    weights, losses = zip(*plain_loop(sweep), strict=True)
    result = sweep.train()
    assert result.weights == weights_digest(weights[-1])
    assert inner_losses(result) == pytest.approx(losses, rel=1e-6)


def test_the_best_weights_are_those_of_a_plain_loop_and_are_scored(tmp_path: Path) -> None:
    sweep = tiny(tmp_path, BestWeights())
    found = plain_loop(sweep)
    result = sweep.train()
    best = min(range(EPOCHS), key=lambda number: found[number][1])
    assert best < EPOCHS - 1, "the last epoch is the best: this shows nothing"
    assert result.weights == weights_digest(found[best][0])
    assert result.epochs[-1].logged["best_epoch"] == best + 1
    model = Noisy()
    model.load_state_dict(found[best][0])
    inputs = torch.from_numpy(samples()[0][sweep.bundle.folds[0].valid])
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(result.outputs), model.eval()(inputs))


@pytest.mark.parametrize("patience", [1, 2])
def test_a_job_stops_after_its_patience(tmp_path: Path, patience: int) -> None:
    sweep = tiny(tmp_path, EarlyStopping(patience=patience, min_delta=0.05))
    losses, best, last = [loss for _, loss in plain_loop(sweep)], 0, EPOCHS - 1
    for epoch, loss in enumerate(losses):
        if not epoch or losses[best] - loss > 0.05:
            best = epoch
        elif epoch - best >= patience:
            last = epoch
            break
    result = sweep.train()
    assert [item.number for item in result.epochs] == [*range(1, last + 2)]
    assert last < EPOCHS - 1, "no job stops: this shows nothing"


def test_an_average_is_that_of_the_weights_after_each_epoch(tmp_path: Path) -> None:
    sweep = tiny(tmp_path, WeightAverage(decay=None, start=0.5))
    counted = [weights for weights, _ in plain_loop(sweep)[3:]]
    result = sweep.train()
    model = Noisy()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            mean = counted[0][name].clone()
            for number, weights in enumerate(counted[1:], 1):
                mean += (weights[name] - mean) / (number + 1)
            value.copy_(mean)
    inputs = torch.from_numpy(samples()[0][sweep.bundle.folds[0].valid])
    with torch.no_grad():
        found = model.eval()(inputs)
    assert torch.allclose(torch.from_numpy(result.outputs), found, rtol=1e-5, atol=1e-6)


ALL = (EarlyStopping(patience=4), BestWeights("inner_accuracy"), WeightAverage(0.9), GradientNorm())


@pytest.mark.parametrize(
    "callbacks", [ALL[:2], ALL[2:], (EarlyStopping("train_loss", 1, 0.3), ALL[3])]
)
def test_a_job_continues_with_the_same_bits_after_every_batch(
    tmp_path: Path, callbacks: Sequence[Any]
) -> None:
    whole = tiny(tmp_path / "whole", *callbacks).train()
    parts, attempts = tiny(tmp_path / "parts", *callbacks).train_with_stops()
    assert parts.digest == whole.digest
    assert attempts > len(whole.epochs)


def test_jobs_share_no_callback(tmp_path: Path) -> None:
    sweep = tiny(tmp_path, BestWeights())
    (first, second), (again,) = sweep.execute(*sweep.jobs[:2]), sweep.execute(sweep.jobs[1])
    assert second.digest == again.digest != first.digest
    assert sweep.callbacks[0].best is None


def test_the_norm_is_that_of_the_gradients(tmp_path: Path) -> None:
    state = FitState("m/s/fold-0", nn.Linear(2, 1), None, None, torch.device("cpu"), 1)
    for item, value in zip(state.model.parameters(), (3.0, 4.0), strict=True):
        item.grad = torch.full_like(item, value)
    GradientNorm().on_batch_end(state)
    assert state.logged == {"gradient_norm": [pytest.approx((2 * 9 + 16) ** 0.5)]}


class Counting:
    """Changes, and keeps it only where it is told to."""

    def __init__(self) -> None:
        self.count = 0

    def on_batch_end(self, state: FitState) -> None:
        self.count += 1


class Stateful(Counting):
    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, tree: dict[str, int]) -> None:
        self.count = tree["count"]

    def on_epoch_end(self, state: FitState) -> None:
        state.log("count", self.count)


class Raising:
    def on_epoch_end(self, state: FitState) -> None:
        if state.epoch == 2:
            raise ValueError("of the user's own")


def test_a_callback_of_ones_own_counts_on_after_interruptions(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", Stateful(), model=Plain).train()
    parts, _ = tiny(tmp_path / "parts", Stateful(), model=Plain).train_with_stops()
    batches = [item.logged["count"] for item in whole.epochs]
    assert batches == [3.0 * number for number in range(1, EPOCHS + 1)]
    assert [item.logged["count"] for item in parts.epochs] == batches


@pytest.mark.parametrize(
    ("callback", "rule"),
    [
        (Counting(), "a callback that changes must keep what changes in the checkpoints"),
        (EarlyStopping("hits"), "EarlyStopping must watch a number of the epochs"),
    ],
)
def test_the_dry_run_refuses_what_no_job_could_use(
    tmp_path: Path, callback: Any, rule: str
) -> None:
    sweep = tiny(tmp_path, callback, model=Plain)
    (problem,) = preflight.check(sweep.bundle, sweep.batches).problems
    assert problem[0] == rule


@pytest.mark.parametrize("callback", [*ALL, Stateful()])
def test_the_dry_run_accepts_callbacks_and_fuses_none(tmp_path: Path, callback: Any) -> None:
    sweep = tiny(tmp_path, callback, model=Plain)
    facts = preflight.check(sweep.bundle, sweep.batches)
    assert (facts.problems, facts.failures) == ((), {})
    assert facts.fusible == {"m": "it has callbacks"}


def test_what_a_callback_raises_fails_its_job_and_says_where(tmp_path: Path) -> None:
    sweep = tiny(tmp_path, Raising(), model=Plain)
    (result,) = sweep.execute(sweep.jobs[0])
    assert (result.status, result.error) == (
        FAILED,
        "ValueError: of the user's own (epoch 2, end of the epoch)",
    )
    assert "test_callbacks.py" in result.traceback


def test_a_name_of_another_column_is_refused(tmp_path: Path) -> None:
    class Logging:
        def on_epoch_end(self, state: FitState) -> None:
            state.log("valid_loss", 1.0)

    sweep = tiny(tmp_path, Logging(), model=Plain)
    (problem,) = preflight.check(sweep.bundle, sweep.batches).problems
    assert problem[1] == "'valid_loss'"


def test_no_callback_sees_the_fold_that_scores(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    class Looking:
        def __deepcopy__(self, memo: Any) -> Looking:
            return self

        def on_epoch_end(self, state: FitState) -> None:
            seen.append({*state.metrics})

    def validation_step(model: nn.Module, batch: Any, state: Any) -> dict[str, float]:
        return {"of_the_held_out_fold": 1.0}

    parts = {"model": Plain, "validation_step": validation_step}
    tiny(tmp_path, Looking(), **parts).attempt(stop=always)
    sweep = tiny(tmp_path / "again", Looking(), **parts)
    sweep.train()
    assert seen == [{"train_loss", "lr", "inner_loss", "inner_accuracy"}] * EPOCHS


def test_a_stop_in_the_middle_ends_the_job_with_the_epoch(tmp_path: Path) -> None:
    class Stopping:
        def on_batch_end(self, state: FitState) -> None:
            if (state.epoch, state.batch) == (1, 2):
                state.stop()

    whole = tiny(tmp_path / "whole", Stopping(), model=Plain).train()
    parts, _ = tiny(tmp_path / "parts", Stopping(), model=Plain).train_with_stops()
    assert [item.number for item in whole.epochs] == [1, 2]
    assert parts.digest == whole.digest
