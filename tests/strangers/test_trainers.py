"""Steps of several batches or gradients, divided batches, and what epochs record of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, fit
from tests.toy import samples

FOLDS = [(np.arange(48), np.arange(48, 60))]
Model = Callable[[], nn.Module]


def linear() -> nn.Module:
    return nn.Linear(8, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def run(
    root: Path,
    opt_fn: Callable[[nn.Module], Any] = sgd,
    params: dict[str, Any] | None = None,
    criterion: Any = None,
    batch_size: int = 6,
    model: Model = linear,
    **settings: Any,
) -> CVResults:
    settings = {"engine": "serial", "fuse": False, **settings}
    kfold = AsyncKFold(
        settings.pop("folds", FOLDS),
        samples(),
        root,
        criterion or nn.CrossEntropyLoss(),
        batch_size,
        n_jobs=1,
        verbose=0,
        report=False,
        **settings,
    )
    return kfold({"m": model}, ["constant"], opt_fn, {"epochs": 3, **(params or {})})


def weights(results: CVResults) -> list[torch.Tensor]:
    return list(results.state_dict(fold=0).values())


# Gradient accumulation


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(torch.tensor([0.1, 1.0, 5.0])),
    ],
    ids=["mean", "sum", "weights of classes"],
)
def test_a_step_of_several_batches_is_the_step_of_one_large_batch(
    tmp_path: Path, criterion: nn.Module
) -> None:
    large = run(tmp_path / "large", batch_size=24, criterion=criterion)
    small = run(tmp_path / "small", batch_size=6, params={"accumulate": 4}, criterion=criterion)
    for one, other in zip(weights(large), weights(small), strict=True):
        torch.testing.assert_close(one, other)
    assert large.to_frame("epoch").train_loss.tolist() == pytest.approx(
        small.to_frame("epoch").train_loss.tolist()
    )


def test_the_rest_of_an_epoch_is_a_step_of_fewer_batches(tmp_path: Path) -> None:
    # Of 24 + 24 samples, or 30 + 18: the second step of an epoch has what the first one leaves.
    steps = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    for accumulate, count in ((4, 2), (5, 2), (7, 2), (8, 1), (9, 1), (1, 8)):
        before = len(steps)
        run(
            tmp_path / f"{accumulate}",
            lambda model: Counted(model.parameters(), 0.1),
            {"accumulate": accumulate},
        )
        # The dry run takes some steps, too, as many each time.
        assert len(steps) - before - 3 * count == 2


def test_the_baseline_accumulates_as_the_jobs_do(tmp_path: Path) -> None:
    results = run(tmp_path, params={"accumulate": 4}, baseline="measure", engine="process")
    table = results.to_frame()
    assert table.packed_accuracy.tolist() == table.serial_accuracy.tolist()


def test_a_training_step_does_not_accumulate(tmp_path: Path) -> None:
    def step(model: Any, batch: Any, state: Any) -> torch.Tensor:
        return state.criterion(model(batch[0]), batch[1])

    with pytest.raises(InputError, match=r"built-in step accumulates.*accumulate=2"):
        run(tmp_path, training_step=step, params={"accumulate": 2})


def test_fit_says_where_accumulate_belongs(tmp_path: Path) -> None:
    model = linear()
    with pytest.raises(TypeError, match=r"key of trainer_params: \{'accumulate'"):
        fit(model, samples(), sgd, nn.CrossEntropyLoss(), tmp_path, accumulate=2)


# Optimizers that evaluate the loss again


class SharpnessAware(torch.optim.Optimizer):
    """Foret et al. (2021): the gradient at a point uphill steps from here."""

    def __init__(self, parameters: Any, lr: float = 0.1, radius: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "needs a closure"
        (group,) = self.param_groups
        kept = [item.clone() for item in group["params"]]
        norm = torch.stack([item.grad.norm() for item in group["params"]]).norm()
        for item in group["params"]:
            item.add_(item.grad * group["radius"] / norm)
        with torch.enable_grad():
            closure()
        for item, before in zip(group["params"], kept, strict=True):
            item.copy_(before - group["lr"] * item.grad)


def sharpness_aware(model: nn.Module) -> torch.optim.Optimizer:
    return SharpnessAware(model.parameters())


def test_an_optimizer_that_needs_a_closure_gets_one(tmp_path: Path) -> None:
    inputs, targets = map(torch.from_numpy, samples())
    # One batch: the order of its samples changes rounding only.
    start = {}

    def remembered() -> nn.Module:
        module = linear()
        start.update({name: value.clone() for name, value in module.state_dict().items()})
        return module

    results = run(tmp_path, sharpness_aware, batch_size=48, model=remembered)
    model = linear()
    model.load_state_dict(start)
    optimizer = sharpness_aware(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[:48]), targets[:48])
        loss.backward()
        return loss

    for _ in range(3):
        closure()
        optimizer.step(closure)
    torch.testing.assert_close(model.weight, weights(results)[0])


def test_a_real_error_of_a_step_is_told_as_it_is(tmp_path: Path) -> None:
    class Broken(SharpnessAware):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("no such kernel")

    with pytest.raises(Exception, match="no such kernel"):
        run(tmp_path, lambda model: Broken(model.parameters()))


def test_a_closure_does_not_fit_several_processes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"one gradient a step.*SharpnessAware, which takes"):
        run(tmp_path, sharpness_aware, engine="process", trainer="allreduce", processes=2)


# Batches that processes divide

WEIGHT = torch.tensor([0.02, 1.0, 5.0])


def own_weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, weight=WEIGHT)


def test_allreduce_refuses_a_criterion_that_is_no_mean_over_samples(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mean or the sum over samples.*nn.CrossEntropyLoss\(wei"):
        run(
            tmp_path,
            criterion=own_weighted,
            batch_size=8,
            engine="process",
            trainer="allreduce",
            processes=2,
        )


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(WEIGHT),
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum"),
    ],
    ids=["known weights", "own mean", "own sum"],
)
def test_allreduce_takes_means_and_sums(tmp_path: Path, criterion: Any) -> None:
    divided = run(
        tmp_path / "divided",
        criterion=criterion,
        batch_size=8,
        engine="process",
        trainer="allreduce",
        processes=2,
        params={"epochs": 1},
    )
    whole = run(tmp_path / "whole", criterion=criterion, batch_size=8, params={"epochs": 1})
    for one, other in zip(weights(whole), weights(divided), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# What an epoch records


def test_what_a_step_logs_is_a_mean_over_samples(tmp_path: Path) -> None:
    def step(model: Any, batch: Any, state: Any) -> torch.Tensor:
        inputs, targets = batch
        state.log(size=float(len(targets)))
        return state.criterion(model(inputs), targets)

    # 48 samples in batches of 20, 20 and 8.
    results = run(tmp_path, training_step=step, batch_size=20)
    expected = (20 * 20 + 20 * 20 + 8 * 8) / 48
    assert results.to_frame("epoch")["size"].tolist() == pytest.approx([expected] * 3)


def test_an_epoch_of_a_fused_job_takes_its_share_of_the_seconds(tmp_path: Path) -> None:
    results = run(tmp_path, folds=5, fuse=True, params={"epochs": 8})
    epochs, folds = results.to_frame("epoch"), results.to_frame("fold")
    spent = epochs.groupby("fold").seconds.sum()
    assert (spent.to_numpy() <= folds.fit_seconds.to_numpy() * 1.05 + 0.01).all()
