"""Callbacks: the bits of a plain loop, after any interruption, and rules that they must keep."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import BestWeights, CVResults, EarlyStopping, FitState, GradientNorm, WeightAverage
from tests.training.sweeps import (
    ONE_FOLD,
    epoch_batches,
    in_pieces,
    problems,
    seed_all,
    sweep,
    train,
)
from tests.training.tiny import Noisy, Plain, samples

EPOCHS = 6


def wild(model: nn.Module) -> torch.optim.Optimizer:
    """Steps so large that some epochs are worse than the one before."""
    return torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9, foreach=False)


def parts(*callbacks: Any, model: type[nn.Module] = Noisy, **more: Any) -> dict[str, Any]:
    given = {"models": {"m": model}, "opt_fn": wild, "params": {"epochs": EPOCHS}}
    return {**given, "callbacks": callbacks, "inner_valid": 0.25, "cv": ONE_FOLD, **more}


def plain_loop(results: CVResults) -> list[tuple[dict[str, torch.Tensor], float]]:
    """Train the job by torch alone; weights and inner loss after each epoch."""
    inputs, targets = map(torch.from_numpy, samples())
    (job,), (fold,) = results.plan.jobs, results.folds
    seed_all(job.seed)
    model, criterion, epochs = Noisy(), nn.CrossEntropyLoss(), []
    optimizer, inner = wild(model), torch.from_numpy(fold.inner_valid)
    train = fold.train[~np.isin(fold.train, fold.inner_valid)]
    for epoch in range(EPOCHS):
        model.train()
        for rows in epoch_batches(train, job.seed, epoch):
            optimizer.zero_grad()
            criterion(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = float(criterion(model(inputs[inner]), targets[inner]))
        epochs.append((copy.deepcopy(model.state_dict()), loss))
    return epochs


def outputs_by(results: CVResults, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the outputs of a model with these weights on the held-out samples."""
    model = Noisy().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        outputs: torch.Tensor = model(torch.from_numpy(samples()[0][results.folds[0].valid]))
    return outputs


def test_best_weights_and_inner_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    results = sweep(tmp_path / "best", **parts(BestWeights()))
    (result,), epochs = results.results.values(), plain_loop(results)
    losses = [loss for _, loss in epochs]
    assert [item.logged["inner_loss"] for item in result.epochs] == pytest.approx(losses, rel=1e-6)
    best = min(range(EPOCHS), key=lambda number: losses[number])
    assert best < EPOCHS - 1, "the last epoch is the best: this shows nothing"
    assert result.epochs[-1].logged["best_epoch"] == best + 1
    trained = results.state_dict("m/constant", fold=0)
    assert all(torch.equal(value, trained[name]) for name, value in epochs[best][0].items())
    assert np.array_equal(result.outputs, outputs_by(results, epochs[best][0]))
    plain = sweep(tmp_path / "plain", **parts())
    trained = plain.state_dict("m/constant", fold=0)
    assert all(torch.equal(value, trained[name]) for name, value in epochs[-1][0].items())


@pytest.mark.parametrize("patience", [1, 2])
def test_a_job_stops_after_its_patience(tmp_path: Path, patience: int) -> None:
    results = sweep(tmp_path / "run", **parts(EarlyStopping(patience=patience, min_delta=0.05)))
    losses, best, last = [loss for _, loss in plain_loop(results)], 0, EPOCHS - 1
    for epoch, loss in enumerate(losses):
        if not epoch or losses[best] - loss > 0.05:
            best = epoch
        elif epoch - best >= patience:
            last = epoch
            break
    (result,) = results.results.values()
    assert [item.number for item in result.epochs] == [*range(1, last + 2)]
    assert last < EPOCHS - 1, "no job stops: this shows nothing"


def test_an_average_is_that_of_the_weights_after_each_epoch(tmp_path: Path) -> None:
    results = sweep(tmp_path / "run", **parts(WeightAverage(decay=None, start=0.5)))
    counted = [weights for weights, _ in plain_loop(results)[3:]]
    mean = {name: torch.stack([item[name] for item in counted]).double() for name in counted[0]}
    averaged = {
        name: value.mean(0).to(counted[0][name].dtype)
        if counted[0][name].is_floating_point()
        else counted[-1][name]
        for name, value in mean.items()
    }
    (result,) = results.results.values()
    expected = outputs_by(results, averaged).numpy()
    np.testing.assert_allclose(result.outputs, expected, rtol=1e-5, atol=1e-6)


class Stateful:
    """Counts batches, and keeps the count in checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def on_batch_end(self, state: FitState) -> None:
        self.count += 1

    def on_epoch_end(self, state: FitState) -> None:
        state.log("count", self.count)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, tree: dict[str, int]) -> None:
        self.count = tree["count"]


class Stopping:
    """Stops in the middle of the second epoch."""

    def on_batch_end(self, state: FitState) -> None:
        if (state.epoch, state.batch) == (1, 2):
            state.stop()


SHIPPED = (EarlyStopping(patience=2), BestWeights("inner_accuracy"), WeightAverage(0.9))


def test_a_job_continues_with_the_same_bits_after_every_batch(tmp_path: Path) -> None:
    callbacks = *SHIPPED, GradientNorm(), Stateful()
    given = parts(*callbacks, params={"epochs": 3}, batch_size=15)
    whole = train(tmp_path / "whole", **given)
    pieces, attempts = in_pieces(tmp_path / "pieces", **given)
    assert pieces.digest == whole.digest
    assert attempts >= 4
    counts = [item.logged["count"] for item in whole.epochs]
    assert counts == [2.0 * number for number in range(1, len(counts) + 1)]
    assert all(callback.best is None for callback in SHIPPED[:2]), "jobs share no callback"


def test_a_stop_in_the_middle_ends_the_job_with_the_epoch(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **parts(Stopping(), model=Plain))
    pieces, _ = in_pieces(tmp_path / "pieces", **parts(Stopping(), model=Plain))
    assert [item.number for item in whole.epochs] == [1, 2]
    assert pieces.digest == whole.digest


def test_the_norm_is_that_of_the_gradients() -> None:
    state = FitState("m/s/fold-0", nn.Linear(2, 1), None, None, torch.device("cpu"), 1)
    for item, value in zip(state.model.parameters(), (3.0, 4.0), strict=True):
        item.grad = torch.full_like(item, value)
    GradientNorm().on_batch_end(state)
    assert state.logged == {"gradient_norm": [pytest.approx((2 * 9 + 16) ** 0.5)]}


class Forgetful:
    """Changes, and keeps nothing of it."""

    count = 0

    def on_batch_end(self, state: FitState) -> None:
        self.count += 1


class Logging:
    def on_epoch_end(self, state: FitState) -> None:
        state.log("valid_loss", 1.0)


@pytest.mark.parametrize(
    ("callback", "rule", "received"),
    [
        (
            Forgetful(),
            "a callback that changes must keep what changes in the checkpoints",
            "Forgetful without state_dict",
        ),
        (
            EarlyStopping("hits"),
            "EarlyStopping must watch a number of the epochs",
            "monitor='hits'",
        ),
        (
            Logging(),
            "what a callback logs must not have the name of another column of the epochs",
            "'valid_loss'",
        ),
    ],
)
def test_the_dry_run_refuses_what_no_job_could_use(
    tmp_path: Path, callback: Any, rule: str, received: str
) -> None:
    (problem,) = problems(tmp_path / "run", **parts(callback, model=Plain))
    assert problem[:2] == (rule, received)


def test_what_a_callback_raises_fails_its_job_and_says_where(tmp_path: Path) -> None:
    class Raising:
        def on_epoch_end(self, state: FitState) -> None:
            if state.epoch == 2:
                raise ValueError("of the user's own")

    result = train(tmp_path / "run", **parts(Raising(), model=Plain))
    expected = "failed", "ValueError: of the user's own (epoch 2, end of the epoch)"
    assert (result.status, result.error) == expected
    assert "test_callbacks.py" in result.traceback


def test_no_callback_sees_the_fold_that_scores(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    class Looking:
        def __deepcopy__(self, memo: Any) -> Looking:
            return self

        def on_epoch_end(self, state: FitState) -> None:
            seen.append({*state.metrics})

    def validation_step(model: nn.Module, batch: Any, state: Any) -> dict[str, float]:
        return {"of_the_held_out_fold": 1.0}

    train(tmp_path / "run", **parts(Looking(), model=Plain, validation_step=validation_step))
    assert {frozenset(names) for names in seen} == {
        frozenset({"train_loss", "lr", "inner_loss", "inner_accuracy"})
    }
