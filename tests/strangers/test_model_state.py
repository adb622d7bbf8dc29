"""State of models and optimizers that no checkpoint has, and what an evaluation changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from asynckfold import AsyncKFold, BestWeights, InputError, fit
from asynckfold.training import checkpoint
from asynckfold.training.training_run import Training
from tests.interrupted import interrupted
from tests.toy import samples

X, Y = samples()
WHOLE, CLASSES = torch.from_numpy(X), torch.from_numpy(Y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def swept(
    folder: Path,
    model: Any,
    opt_fn: Callable[..., Any] = adam,
    epochs: int = 2,
    grid: Any = None,
    **settings: Any,
) -> Any:
    """Return the results of a small sweep of a model."""
    criterion = settings.pop("criterion", nn.CrossEntropyLoss())
    params = {"epochs": epochs, **settings.pop("params", {})}
    options = {"engine": "serial", "report": False, "verbose": 0, **settings}
    kfold = AsyncKFold(2, (X, Y), folder, criterion, 10, **options)
    models = model if isinstance(model, dict) else {"m": model}
    return kfold(models, ["constant"], opt_fn, params, params=grid)


def loss_of(model: nn.Module, rows: Any) -> float:
    with torch.no_grad():
        return float(cross_entropy(model.eval()(WHOLE[rows]), CLASSES[rows]))


def check_models(results: Any, candidate: str = "m/constant") -> None:
    """Compare the loss of each fold with that of the model that the results give."""
    for fold in results.folds:
        model = results.model(candidate, fold=fold.index)
        result = results.results[f"{candidate}/fold-{fold.index}"]
        assert loss_of(model, fold.valid) == pytest.approx(result.epochs[-1].valid_loss, rel=1e-5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.seen(inputs))

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


class RunningMean(Layer):
    persistent = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=self.persistent)

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


class KeptMean(RunningMean):
    persistent = True


class PlainMean(Layer):
    mean: Any = 0.0

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        return inputs - self.mean


class Scheduled(Layer):
    """Draws less and less noise, by a plain count of steps."""

    steps = 0

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inputs
        self.steps += 1
        return inputs + torch.randn_like(inputs) / self.steps


class KeptSchedule(Scheduled):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class OwnGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(inputs.shape, generator=self.generator)
        return inputs + noise if self.training else inputs


class Carrying(nn.Module):
    """Begins a batch with the hidden state that the one before left, also of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.linear, self.hidden = nn.GRUCell(8, 4), nn.Linear(4, 3), None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        fits = self.hidden is not None and len(self.hidden) == len(inputs)
        hidden = self.cell(inputs, self.hidden if fits else None)
        self.hidden = hidden.detach()
        return self.linear(hidden)


class Growing(Layer):
    """Has a buffer that gets its shape from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = inputs.std(0)
        return inputs / self.scale


class CountingStep:
    """A step that weighs the loss by a count of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: nn.Module, batch: Any, state: Any) -> torch.Tensor:
        self.count += 1
        loss: torch.Tensor = state.criterion(model(batch[0]), batch[1]) / self.count
        return loss


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        return cross_entropy(outputs, targets) / (1 + self.count)


class KeptCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        return cross_entropy(outputs, targets) / (1 + self.count)


class Slowing(torch.optim.SGD):
    """Takes smaller steps, by a count that is not in its state."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


class KeptSlowing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


def own_loop(context: Any) -> None:
    for inputs, targets in context.train_loader:
        context.optimizer.zero_grad()
        context.criterion(context.model(inputs), targets).backward()
        context.optimizer.step()


def slowing(model: nn.Module) -> torch.optim.Optimizer:
    return Slowing(model.parameters(), 0.1)


LOSING = {
    "buffer": (RunningMean, "mean of the model"),
    "attribute": (PlainMean, "mean of the model"),
    "layer": (
        lambda: nn.Sequential(nn.Linear(8, 8), Scheduled()),
        "steps of layer 1 (Scheduled)",
    ),
    "hidden state": (Carrying, "hidden of the model"),
    "generator": (OwnGenerator, "generator of the model"),
}
LOST: list[tuple[dict[str, Any], str]] = [
    ({"model": RunningMean, "fit_fn": own_loop}, "mean of the model"),
    ({"model": Layer, "training_step": CountingStep()}, "count of the training_step"),
    ({"model": Layer, "criterion": CountingLoss()}, "count of the criterion"),
    ({"model": Layer, "opt_fn": slowing}, "count of the optimizer"),
]


def test_what_training_changes_outside_of_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        swept(tmp_path, {name: model for name, (model, _) in LOSING.items()})
    for name, (_, part) in LOSING.items():
        assert re.search(
            f"changes in model {name}: .* lacks {re.escape(part)}, its", str(caught.value)
        )
    for settings, part in LOST:
        with pytest.raises(InputError, match=f"lacks {re.escape(part)}, its"):
            swept(tmp_path, **settings)


def test_a_buffer_that_gets_its_shape_in_training_is_refused_before_the_start(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match=r"must take the state_dict.*scale.*persistent=False"):
        swept(tmp_path, Growing)


class Harmless(Layer):
    """Keeps what nothing depends on, or what each forward makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen_last = 0, None
        self.register_buffer("cache", None, persistent=False)
        self.drawn = torch.rand(8)
        self.register_buffer("mask", (torch.rand(8) > 0.2).float(), persistent=False)

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.cache is None:
            self.cache = torch.ones(8)
        self.seen_last = inputs * self.mask * self.cache + self.drawn
        return self.seen_last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # With its graph, as an attention map that is kept for a plot.
        self.outputs = super().forward(inputs)
        return self.outputs


SAVED: list[dict[str, Any]] = [
    {"model": {"without effect": Harmless, "buffer": KeptMean, "extra state": KeptSchedule}},
    {"model": Layer, "criterion": KeptCount()},
    {"model": Layer, "opt_fn": lambda model: KeptSlowing(model.parameters(), 0.1)},
]


@pytest.mark.parametrize("settings", SAVED, ids=["models", "criterion", "optimizer"])
def test_state_without_effect_and_state_that_is_saved_train_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    whole = swept(tmp_path / "whole", **settings)
    with interrupted(monkeypatch, Training, "begin_epoch", 2):
        swept(tmp_path / "cut", **settings)
    again = swept(tmp_path / "cut", **settings)
    for candidate in whole.plan.candidate_names:
        if "criterion" not in settings:
            check_models(whole, candidate)
        one, other = (results.state_dict(candidate, fold=0) for results in (whole, again))
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_optimizers_of_torch_have_all_in_their_checkpoints(tmp_path: Path) -> None:
    kinds = [
        *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "Adafactor", "LBFGS"),
    ]

    def opt_fn(model: nn.Module, kind: str) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters())
        return made

    results = swept(tmp_path, Layer, opt_fn, 1, grid={"kind": kinds})
    assert results.counts["done"] == 2 * len(kinds)


# What an evaluation changes


class Counting(Layer):
    """Counts what it evaluates, in place and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("evaluated", torch.zeros(()))
        self.register_buffer("other", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(8)

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.evaluated += len(inputs)
            self.other = self.other + 1
        return self.norm(inputs)


class Extra(Layer):
    evaluated = 0

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        self.evaluated += 0 if self.training else len(inputs)
        return inputs

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.evaluated)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.evaluated = int(state)


def measure(model: nn.Module, batch: Any, state: Any) -> dict[str, Any]:
    return {"mine": model(batch[0]).mean()}


RESTORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "inner": {"inner_valid": 0.2, "callbacks": [BestWeights("inner_loss")]},
    "measured": {"validation_step": measure},
    **{
        trainer: {
            "engine": "process",
            "params": {"trainer": trainer, "processes": 2, "eval_batch_size": 4},
        }
        for trainer in ("allreduce", "hogwild")
    },
}


@pytest.mark.parametrize("case", RESTORED)
def test_an_evaluation_leaves_nothing_of_the_held_out_fold_in_the_model(
    tmp_path: Path, case: str
) -> None:
    results = swept(tmp_path, Counting, **RESTORED[case])
    for fold in range(2):
        found = results.state_dict(fold=fold)
        assert (found["evaluated"], found["other"]) == (0, 0)
        assert found["norm.num_batches_tracked"] > 0


class Observing(Layer):
    """Rounds by the widest range that it has seen, as an observer of quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("widest", torch.zeros(()))

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.widest.copy_(torch.maximum(self.widest, (inputs.abs() * 4 + 1).max()))
        if not self.training:
            self.widest *= 2
        step = self.widest / 16
        return inputs + ((inputs / step).round() * step - inputs).detach()


def test_a_restored_buffer_is_said_and_no_dropout_is_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = swept(tmp_path, {"observing": Observing, "extra": Extra}, verbose=1)
    assert results.state_dict("extra/constant")["_extra_state"] == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "its evaluation changes widest, which each evaluation restores" in shown
    assert "dropout" not in shown


def test_a_model_whose_evaluation_changes_it_is_not_fused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its evaluation changes it, and restores it"):
        swept(tmp_path, Counting, fuse=3)


# Optimizers with modes


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al. 2024): it scores other weights than it trains."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "train_mode": False})

    def train(self) -> None:
        self._switch(lambda beta: 1 - beta, on=True)

    def eval(self) -> None:
        self._switch(lambda beta: 1 - 1 / beta, on=False)

    @torch.no_grad()
    def _switch(self, weight: Callable[[float], float], *, on: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not on:
                for item in group["params"]:
                    if "z" in self.state[item]:
                        item.lerp_(self.state[item]["z"], weight(group["beta"]))
                group["train_mode"] = on

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "a step in evaluation mode"
            group["steps"] += 1
            share, rate = 1 / group["steps"], group["lr"]
            for item in group["params"]:
                state = self.state[item]
                z = state.setdefault("z", item.clone())
                item.lerp_(z, share)
                item.add_(item.grad, alpha=rate * (group["beta"] * (1 - share) - 1))
                z.sub_(item.grad, alpha=rate)


def schedule_free(model: nn.Module) -> ScheduleFree:
    return ScheduleFree(model.parameters(), 0.3)


class Forgetful(ScheduleFree):
    """Keeps its mode outside of its state."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for group in found["param_groups"]:
            del group["train_mode"]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mode = self.param_groups[0]["train_mode"]
        super().load_state_dict(state_dict)
        self.param_groups[0]["train_mode"] = mode


class Peeking:
    """Scores the averaged weights at the end of each epoch, and leaves training mode on."""

    def on_epoch_end(self, state: Any) -> None:
        state.optimizer.eval()
        state.log("averaged", loss_of(state.model, slice(None)))
        state.optimizer.train()


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "callback": {"callbacks": [Peeking()]},
    "inner": {"inner_valid": 0.2, "callbacks": [BestWeights("inner_loss")]},
    "allreduce": {
        "engine": "process",
        "params": {"trainer": "allreduce", "processes": 2, "eval_batch_size": 4},
    },
}


@pytest.mark.parametrize("case", MODES)
def test_an_optimizer_with_modes_is_scored_and_saved_in_evaluation_mode(
    tmp_path: Path, case: str
) -> None:
    results = swept(tmp_path, Layer, schedule_free, 3, **MODES[case])
    check_models(results)
    if case == "plain":
        fold, job = results.folds[0], results.plan.jobs[0]
        assert loss_of(by_hand(job, fold.train), fold.valid) == pytest.approx(
            results.to_frame("epoch").valid_loss[2], rel=1e-5
        )


def by_hand(job: Any, rows: Any) -> nn.Module:
    """Train the model of a job with the order of its batches, and leave the averaged weights."""
    from asynckfold.training.batches import epoch_samples

    torch.manual_seed(job.seed)
    model = Layer()
    optimizer = schedule_free(model)
    for epoch in range(3):
        optimizer.train()
        order = epoch_samples(None, None, rows, job.seed, epoch)
        for low in range(0, len(rows), 10):
            part = order[low : low + 10]
            optimizer.zero_grad()
            cross_entropy(model(WHOLE[part]), CLASSES[part]).backward()
            optimizer.step()
        optimizer.eval()
    return model


@pytest.mark.parametrize("kind", [ScheduleFree, Forgetful])
def test_an_optimizer_with_modes_continues_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def run(folder: str) -> Any:
        return swept(tmp_path / folder, Layer, lambda model: kind(model.parameters(), 0.3), 3)

    one = run("whole").state_dict()
    monkeypatch.setattr(checkpoint, "MIDDLE_SECONDS", 0.0)
    for method, number in (("begin_epoch", 2), ("step", 7)):
        with interrupted(monkeypatch, Training, method, number):
            run(method)
        other = run(method).state_dict()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_fit_refit_and_the_baseline_have_the_averaged_weights(tmp_path: Path) -> None:
    settings = {"engine": "serial", "report": False, "verbose": 0}
    fitted = fit(
        Layer,
        (X, Y),
        schedule_free,
        nn.CrossEntropyLoss(),
        tmp_path / "fit",
        valid=range(40, 60),
        epochs=3,
        **settings,
    )
    last = fitted.epochs[-1]
    assert loss_of(fitted.model, slice(40, 60)) == pytest.approx(last.valid_loss, rel=1e-5)
    results = swept(
        tmp_path / "k", Layer, schedule_free, 3, refit=True, baseline="measure", scoring="accuracy"
    )
    scores = results.to_frame("fold")
    assert list(scores.accuracy) == list(scores.serial_accuracy)
    seen = results.refitted.to_frame("epoch").valid_loss.iloc[-1]
    assert loss_of(results.best_estimator_, slice(None)) == pytest.approx(seen, rel=1e-5)


def test_processes_with_optimizers_of_their_own_refuse_one_with_modes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trainer='allreduce', where one optimizer steps for all"):
        swept(
            tmp_path,
            Layer,
            schedule_free,
            engine="process",
            params={"trainer": "hogwild", "processes": 2},
        )


# Models given as instances, and buffers that no checkpoint can hold


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "model",
    [old_weight_norm, lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))],
    ids=["weight_norm", "lazy"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_an_instance_that_cannot_be_copied_is_refused_and_its_function_works(
    tmp_path: Path, model: Callable[[], nn.Module]
) -> None:
    refusal = "a function that makes the model|uninitialized parameter"
    with pytest.raises(ValueError, match=refusal):
        swept(tmp_path / "instance", model())
    with pytest.raises(ValueError, match=refusal):
        fit(model(), (X, Y), adam, nn.CrossEntropyLoss(), tmp_path / "fit", valid=range(9))
    check_models(swept(tmp_path / "function", model))


class Neighbours(Layer):
    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacent", torch.eye(8).to_sparse(), persistent=self.persistent)

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.adjacent, inputs.T).T


class Remedied(Neighbours):
    persistent = False


def test_a_sparse_buffer_is_refused_before_the_start_and_its_remedy_works(tmp_path: Path) -> None:
    for number, model in enumerate((Neighbours, Neighbours())):
        with pytest.raises(InputError, match=r"\['adjacent'\].*persistent=False"):
            swept(tmp_path / str(number), model)
    check_models(swept(tmp_path / "remedied", Remedied))
