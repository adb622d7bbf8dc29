"""Whose parameters a job trains: its model's and its criterion's, and nothing that jobs share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import KFold
from torch import nn

from asynckfold import AsyncKFold, BestWeights, InputError, fit, load_results
from tests.interrupted import interrupted
from tests.toy import samples

G = np.random.default_rng(0)
X = G.normal(size=(60, 5)).astype(np.float32)
Y = np.stack([X @ G.normal(size=5), 10 * X[:, 0]], 1).astype(np.float32)
FOLDS = list(KFold(3, shuffle=True, random_state=0).split(X))
EPOCHS = 6


class Kendall(nn.Module):
    """Learned weights of two losses (Kendall, Gal and Cipolla 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = ((outputs - targets) ** 2).mean(0)
        return (loss * torch.exp(-self.log_variance) + self.log_variance).sum()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 2)


def of_both(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([*model.parameters(), *criterion.parameters()], 3e-2)


def of_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 3e-2)


def called(root: Path, criterion: Any, opt_fn: Any, model: Any = linear, **settings: Any) -> Any:
    epochs, batch = settings.pop("epochs", EPOCHS), settings.pop("batch", "full")
    params = {"epochs": epochs, **settings.pop("params", {})}
    schedule, grid = settings.pop("schedule", "constant"), settings.pop("grid", None)
    given = {"engine": "serial", "report": False, "verbose": 0, "scoring": "r2", **settings}
    kfold = AsyncKFold(FOLDS, (X, Y), root, criterion, batch, **given)
    models = model if isinstance(model, dict) else {"net": model}
    return kfold(models, [schedule], opt_fn, params, params=grid)


def by_hand(fold: int, make: Callable[..., torch.optim.Optimizer] = of_both) -> Any:
    """Return model, criterion and losses of the held-out fold of a plain loop."""
    train, valid = (torch.from_numpy(part) for part in FOLDS[fold])
    inputs, targets = torch.from_numpy(X), torch.from_numpy(Y)
    model, criterion, losses = linear(), Kendall(), []
    optimizer = make(model, criterion)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        criterion(model(inputs[train]), targets[train]).backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(float(criterion(model(inputs[valid]), targets[valid])))
    return model, criterion, losses


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def listed(make: Callable[..., torch.optim.Optimizer] = of_both) -> tuple[Any, Any]:
    """Return a criterion, and an `opt_fn` that takes the parameters of that very object."""
    criterion = Kendall()
    return criterion, lambda model: make(model, criterion)


@pytest.mark.parametrize("engine", ["serial", "process"])
def test_the_caller_s_parameters_stand_for_those_of_each_job(tmp_path: Path, engine: str) -> None:
    criterion, opt_fn = listed()
    found = called(tmp_path, criterion, opt_fn, engine=engine, n_jobs=1)
    assert criterion.log_variance.tolist() == [0.0, 0.0]
    assert criterion.log_variance.grad is None
    rows = found.to_frame("epoch")
    for fold in range(3):
        model, trained, losses = by_hand(fold)
        assert rows[rows.fold == fold].valid_loss.tolist() == pytest.approx(losses, rel=1e-5)
        for module, of in ((model, "model"), (trained, "criterion")):
            for name, value in found.state_dict(fold=fold, of=of).items():
                assert torch.allclose(value, module.state_dict()[name], rtol=1e-5, atol=1e-6)
    stored = load_results(tmp_path).state_dict(fold=2, of="criterion")
    assert same(stored, found.state_dict(fold=2, of="criterion"))
    with pytest.raises(InputError, match="of must be 'model' or 'criterion': received 'loss'"):
        found.state_dict(of="loss")


def test_a_criterion_has_the_bits_of_parameters_in_the_model(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.loss = linear(), Kendall()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(inputs)
            return found

    def step(model: Any, batch: Any, state: Any) -> Any:
        return model.loss(model(batch[0]), batch[1])

    first = called(tmp_path / "criterion", *listed(), batch=10)
    second = called(tmp_path / "model", nn.MSELoss(), of_model, Both, batch=10, training_step=step)
    for fold in range(3):
        one, other = first.state_dict(fold=fold, of="criterion"), second.state_dict(fold=fold)
        assert torch.equal(one["log_variance"], other["loss.log_variance"])
        assert torch.equal(first.state_dict(fold=fold)["weight"], other["linear.weight"])


def sgd(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), *criterion.parameters()], 1e-3)


def adagrad(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    """Has a state before its first step."""
    groups = [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.1}]
    return torch.optim.Adagrad(groups, 3e-2)


def lbfgs(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    """Keeps a list of parameters of its own."""
    return torch.optim.LBFGS([*model.parameters(), *criterion.parameters()], 0.01)


class Wrapped(torch.optim.Optimizer):
    """Steps another optimizer, whose groups it shares, as SAM does."""

    def __init__(self, model: nn.Module, criterion: nn.Module) -> None:
        self.base = sgd(model, criterion)
        super().__init__([torch.zeros(1)], {})
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


@pytest.mark.parametrize("make", [adagrad, lbfgs, sgd, Wrapped])
def test_both_ways_to_name_them_have_the_same_bits(tmp_path: Path, make: Any) -> None:
    criterion, opt_fn = listed(make)
    first = called(tmp_path / "listed", criterion, opt_fn, epochs=1)
    second = called(tmp_path / "keyword", Kendall(), make, epochs=1)
    for fold in range(3):
        one, other = (found.state_dict(fold=fold, of="criterion") for found in (first, second))
        assert same(one, other)
        assert one["log_variance"].abs().min() > 0
    assert same(first.state_dict(), second.state_dict())


def test_the_keyword_reaches_optimizers_with_a_grid_and_criteria_of_folds(tmp_path: Path) -> None:
    def opt_fn(model: nn.Module, lr: float, criterion: Any = None) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr)

    def make_criterion(train_targets: torch.Tensor) -> nn.Module:
        return Kendall()

    for name, criterion in (("one", Kendall()), ("of each fold", make_criterion)):
        found = called(tmp_path / name, criterion, opt_fn, grid={"lr": [3e-2]})
        assert found.to_frame("epoch").valid_loss.tolist()[EPOCHS - 1] == pytest.approx(
            by_hand(0)[2][-1], rel=1e-5
        )
    plain = functools.partial(opt_fn, lr=3e-2, criterion=nn.Linear(2, 2))
    found = called(tmp_path / "bound", Kendall(), plain)
    assert found.state_dict(of="criterion")["log_variance"].abs().min() > 0


def test_the_serial_baseline_trains_the_criterion(tmp_path: Path) -> None:
    found = called(tmp_path, *listed(), baseline="measure")
    rows = found.to_frame("epoch")
    measured = [loss for job in found.baseline.epochs.values() for _, loss in job]
    assert measured == pytest.approx(rows.train_loss.tolist(), rel=1e-5)


def test_an_interrupted_job_continues_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = called(tmp_path / "whole", *listed(), batch=10)
    with interrupted(monkeypatch, torch.optim.Adam, "step", 25):
        called(tmp_path / "cut", *listed(), batch=10)
    found = called(tmp_path / "cut", *listed(), batch=10)
    assert found.fingerprint == whole.fingerprint
    for fold in range(3):
        for of in ("model", "criterion"):
            one, other = (results.state_dict(fold=fold, of=of) for results in (whole, found))
            assert same(one, other)


def test_refit_trains_a_criterion_on_all_samples(tmp_path: Path) -> None:
    found = called(tmp_path, *listed(), refit=True)
    weights = found.state_dict(fold="all", of="criterion")["log_variance"]
    assert weights.abs().min() > 0
    assert not torch.equal(weights, found.state_dict(of="criterion")["log_variance"])


def test_fit_trains_model_and_criterion_in_place(tmp_path: Path) -> None:
    train, valid = FOLDS[0]
    expected, trained, losses = by_hand(0)
    model, criterion = linear(), Kendall()
    dataset, held_out = (X[train], Y[train]), (X[valid], Y[valid])
    settings = {"epochs": EPOCHS, "engine": "serial", "verbose": 0, "report": False}
    optimizer = of_both(model, criterion)
    found = fit(model, dataset, optimizer, criterion, tmp_path, "full", valid=held_out, **settings)
    assert [epoch.valid_loss for epoch in found.epochs] == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(model.weight, expected.weight, rtol=1e-5)
    assert torch.allclose(criterion.log_variance, trained.log_variance, rtol=1e-5)


def test_best_weights_are_those_of_the_criterion_too(tmp_path: Path) -> None:
    class Noting:
        def on_epoch_end(self, state: Any) -> None:
            state.log("first", state.criterion.log_variance[0])

    # The first epoch has the greatest loss, which counts as best here.
    best = BestWeights("train_loss", mode="max")
    found = called(tmp_path, *listed(), callbacks=[best, Noting()])
    rows = found.to_frame("epoch").query("fold == 0")
    kept = float(found.state_dict(of="criterion")["log_variance"][0])
    assert rows["first"].iloc[0] == kept != rows["first"].iloc[-1]


def test_allreduce_trains_the_criterion(tmp_path: Path) -> None:
    params = {"trainer": "allreduce", "processes": 2}
    found = called(tmp_path, *listed(), params=params, engine="process", n_jobs=2)
    assert found.to_frame("epoch").valid_loss.tolist()[EPOCHS - 1] == pytest.approx(
        by_hand(0)[2][-1], rel=1e-4
    )


def test_a_training_step_and_a_loop_train_the_job_s_copy(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
        loss: torch.Tensor = state.criterion(model(batch[0]), batch[1])
        return loss

    def loop(context: Any) -> None:
        for _ in range(context.epochs):
            for inputs, targets in context.train_loader:
                context.optimizer.zero_grad()
                context.criterion(context.model(inputs), targets).backward()
                context.optimizer.step()

    expected = by_hand(0)[1].state_dict()["log_variance"]
    for name, own in (("step", {"training_step": step}), ("loop", {"fit_fn": loop})):
        found = called(tmp_path / name, Kendall(), of_both, **own)
        weights = found.state_dict(of="criterion")["log_variance"]
        assert torch.allclose(weights, expected, rtol=1e-5)


def refused(root: Path, *given: Any, **settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        called(root, *given, **settings)
    assert not (root / "run.db").exists()
    return str(caught.value)


def test_a_criterion_that_nothing_trains_is_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, Kendall(), of_model)
    assert "opt_fn must optimise the parameters of the criterion, too" in text
    assert "Adam, which holds none of log_variance" in text
    for remedy in ("def opt_fn(model, criterion): return", "requires_grad_(False)"):
        assert remedy in text
    frozen = Kendall().requires_grad_(False)
    assert called(tmp_path, frozen, of_model).counts["done"] == 3
    assert frozen.log_variance.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("trainer", ["averaging", "parameter_server"])
def test_trainers_that_would_leave_it_out_are_refused(tmp_path: Path, trainer: str) -> None:
    params = {"trainer": trainer, "processes": 2}
    text = refused(tmp_path, *listed(), params=params, batch=10, engine="process", n_jobs=2)
    assert "a criterion with parameters is trained by one process" in text
    assert f"trainer='{trainer}', processes=2, and log_variance" in text


def test_a_step_that_trains_the_caller_s_criterion_is_refused(tmp_path: Path) -> None:
    criterion, opt_fn = listed()

    def step(model: nn.Module, batch: Any, state: Any) -> Any:
        return criterion(model(batch[0]), batch[1])

    text = refused(tmp_path, criterion, opt_fn, training_step=step)
    assert "a gradient for criterion.log_variance, which nothing trains" in text
    assert "the job's copy of the criterion: state.criterion" in text
    assert criterion.log_variance.grad is None


def test_a_loss_that_is_no_module_is_refused_by_name(tmp_path: Path) -> None:
    class Loss:
        def __init__(self) -> None:
            self.log_variance = nn.Parameter(torch.zeros(2))

        def __call__(self, outputs: Any, targets: Any) -> Any:
            return Kendall.forward(self, outputs, targets)  # type: ignore[arg-type]

    loss = Loss()

    def opt_fn(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model.parameters(), loss.log_variance])

    text = refused(tmp_path, loss, opt_fn)
    assert "Adam of model net, with criterion.log_variance." in text
    assert "For a loss, pass an nn.Module as criterion" in text
    hidden = Kendall()
    for criterion in (loss, lambda outputs, targets: hidden(outputs, targets)):
        text = refused(tmp_path, criterion, of_model)
        assert "log_variance, which nothing trains" in text


# Modules outside of the model

HEAD = nn.Linear(5, 2)


@functools.cache
def cached() -> nn.Module:
    return nn.Linear(5, 2)


class Scaled(nn.Module):
    """Has one parameter of its own; the rest is outside."""

    shared: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def head(self) -> nn.Module:
        return HEAD

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head()(inputs * self.scale)
        return found


class InList(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(5, 2)]

    def head(self) -> nn.Module:
        return self.parts[0]


class OnClass(Scaled):
    shared = (nn.Linear(5, 2),)

    def head(self) -> nn.Module:
        found: nn.Module = OnClass.shared[0]
        return found


class Cached(Scaled):
    def head(self) -> nn.Module:
        return cached()


def test_an_optimizer_of_modules_outside_is_refused_by_name(tmp_path: Path) -> None:
    def opt_fn(made: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([*made.parameters(), *made.head().parameters()], 3e-3)

    names = {
        Scaled: "HEAD.weight",
        InList: "self.parts[0].weight",
        OnClass: "OnClass.shared[0].weight",
        Cached: "cached()",
    }
    before = copy.deepcopy([HEAD.state_dict(), OnClass.shared[0].state_dict()])
    models = {kind.__name__: kind for kind in names}
    text = refused(tmp_path, nn.MSELoss(), opt_fn, models, engine="process", n_jobs=1)
    assert "opt_fn must optimise parameters of the model and of the criterion only" in text
    for kind, name in names.items():
        assert f"Adam of model {kind.__name__}, with {name}" in text
    assert "nn.ModuleList" in text
    text = refused(tmp_path, nn.MSELoss(), opt_fn, Scaled)
    assert "Adam of model net, with HEAD.weight" in text
    for module, old in zip((HEAD, OnClass.shared[0]), before, strict=True):
        assert same(module.state_dict(), old)


def test_a_step_that_changes_modules_outside_is_refused(tmp_path: Path) -> None:
    backbone = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)).requires_grad_(False)

    class OnBackbone(Scaled):
        def head(self) -> nn.Module:
            return backbone

    before = copy.deepcopy(backbone.state_dict())
    text = refused(tmp_path, nn.MSELoss(), of_model, OnBackbone)
    assert "a step must change nothing but the model, the criterion and the optimizer" in text
    assert "backbone.1.running_mean, backbone.1.running_var" in text
    assert same(backbone.state_dict(), before)
    backbone.eval()
    assert called(tmp_path, nn.MSELoss(), of_model, OnBackbone).counts["done"] == 3
    assert same(backbone.state_dict(), before)


def test_a_loop_that_trains_a_module_outside_is_refused(tmp_path: Path) -> None:
    head = nn.Linear(2, 2)
    stepped = torch.optim.SGD(head.parameters(), 0.1)

    def loop(context: Any) -> None:
        for inputs, targets in context.train_loader:
            stepped.zero_grad()
            context.optimizer.zero_grad()
            context.criterion(head(context.model(inputs)), targets).backward()
            stepped.step()
            context.optimizer.step()

    before = copy.deepcopy(head.state_dict())
    text = refused(tmp_path, nn.MSELoss(), of_model, fit_fn=loop)
    assert "model net, which changes head.weight, head.bias" in text
    assert same(head.state_dict(), before)


def test_layers_in_lists_grids_of_criteria_and_fusion_of_trained_ones_are_refused(
    tmp_path: Path,
) -> None:
    text = refused(tmp_path, nn.MSELoss(), of_model, InList)
    assert "for self.parts[0].weight, self.parts[0].bias, which nothing trains" in text
    text = refused(tmp_path, Kendall(), of_both, grid={"criterion": [1, 2]})
    assert "names in params must differ from what AsyncKFold passes itself" in text
    assert "received 'criterion'" in text
    text = refused(tmp_path, *listed(), fuse=True, engine="process", n_jobs=1)
    assert "its criterion has parameters, which each job trains" in text


def test_frozen_parameters_outside_are_allowed(tmp_path: Path) -> None:
    frozen = nn.Linear(5, 2)

    class OnFrozen(Scaled):
        def head(self) -> nn.Module:
            return frozen

    def opt_fn(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model.parameters(), *frozen.parameters()], 3e-3)

    text = refused(tmp_path, nn.MSELoss(), of_model, OnFrozen)
    assert "a gradient for frozen.weight, frozen.bias, which nothing trains" in text
    assert frozen.weight.grad is None
    frozen.requires_grad_(False)
    assert called(tmp_path, nn.MSELoss(), opt_fn, OnFrozen).counts["done"] == 3


def test_a_criterion_without_parameters_is_passed_to_fused_jobs(tmp_path: Path) -> None:
    def opt_fn(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(criterion, nn.CrossEntropyLoss)
        return torch.optim.Adam(model.parameters(), 1e-2)

    settings: dict[str, Any] = {"fuse": True, "n_jobs": 1, "report": False, "verbose": 0}
    kfold = AsyncKFold(3, samples(), tmp_path, nn.CrossEntropyLoss(), 10, **settings)
    found = kfold({"net": lambda: nn.Linear(8, 3)}, ["constant"], opt_fn, {"epochs": 2})
    assert found.counts["done"] == 3
    assert found.plan.groups
