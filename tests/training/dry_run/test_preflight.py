"""The dry run: what breaks our rules refuses the sweep, what raises by itself only its own jobs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn, optim
from torch.nn import functional

from asynckfold import TrainerParams
from asynckfold.models import DBN, Pretraining
from asynckfold.training.dry_run import preflight
from tests.training.sweeps import ONE_FOLD, problems, results_of, sweep
from tests.training.tiny import CLASSES, FEATURES, Noisy, Plain, Seen, Tiny, samples, watched


class Head(nn.Sequential):
    def __init__(self, outputs: int) -> None:
        super().__init__(nn.Linear(FEATURES, outputs))


class Through(Plain):
    """Passes its outputs through a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.function(super().forward(inputs))


def one(make: Callable[[], Any]) -> dict[str, Any]:
    return {"models": {"m": make}}


def through(function: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return one(lambda: Through(function))


def frozen() -> nn.Module:
    return Plain().requires_grad_(False)


LOSS = "the criterion of model m must give one number with a gradient as loss"
FLOATS = samples()[0], samples()[1].astype(np.float32)
TAKES = "the criterion must take the outputs of model m and the targets"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"opt_fn": lambda model: None}, "opt_fn must return a torch.optim.Optimizer", "None"),
    (one(lambda: len), "model m must be a torch.nn.Module", "builtin_function_or_method"),
    (
        one(lambda: Head(2)),
        "model m must return (samples, classes) scores for the 3 classes",
        "shape (10, 2)",
    ),
    (
        through(lambda outputs: outputs[1:]),
        "model m must return one row for each sample",
        "shape (9, 3) for 10 samples",
    ),
    (through(lambda outputs: (outputs, outputs)), TAKES, "must be Tensor, not tuple"),
    (through(lambda outputs: outputs.detach()), LOSS, "a tensor of shape (), requires_grad=False"),
    (
        {**one(Plain), "criterion": nn.CrossEntropyLoss(reduction="none")},
        LOSS,
        "a tensor of shape (10,), requires_grad=True",
    ),
    (one(frozen), LOSS, "a tensor of shape (), requires_grad=False"),
    (
        {"schedules": {"s": lambda optimizer: object}},
        "LR schedule s must have step() and state_dict()",
        "<class 'object'>",
    ),
    (
        {**one(lambda: Head(1)), "criterion": nn.MSELoss(), "data": FLOATS, "task": "regression"},
        TAKES,
        "UserWarning for outputs float32 (10, 1) and targets float32 (10,): Using a target size",
    ),
    (
        {**one(Plain), "criterion": nn.CrossEntropyLoss(torch.ones(4))},
        TAKES,
        "weight tensor should be defined either for all",
    ),
]


def test_a_broken_rule_refuses_the_sweep(tmp_path: Path) -> None:
    for number, (parts, rule, received) in enumerate(REFUSED):
        ((broken, what, remedy),) = problems(tmp_path / str(number), **parts)
        assert broken == rule
        assert received in what
        assert remedy.endswith(".") or "def opt_fn" in remedy


class Staged(Plain):
    """Has a stage of pretraining that differentiates, as any may."""

    def pretrain(self, inputs: torch.Tensor, generator: torch.Generator, report: Any) -> None:
        self(inputs).sum().backward()


class StagedDBN(DBN):
    def pretrain(self, *given: Any, inputs: Any = 0, generator: Any = 0, report: Any = 0) -> Any:
        return super().pretrain(*given)


def test_pretraining_that_may_differentiate_is_refused_with_a_gpu_process(tmp_path: Path) -> None:
    def dbn(kind: type[DBN]) -> Callable[[], nn.Module]:
        return lambda: kind(FEATURES, (4,), CLASSES, pretraining=Pretraining(epochs=1))

    models = {"staged": Staged, "heir": dbn(StagedDBN), "dbn": dbn(DBN), "plain": Plain}
    for size, refused in (({"cpu": 10, "gpu": 20}, ["staged", "heir"]), (10, [])):
        words = {"trainer": "averaging", "processes": 2, "epochs": 1, "partition_size": size}
        params = TrainerParams.from_mapping(words)
        tiny = Tiny(tmp_path / str(len(refused)), models, params=params)
        facts = preflight.check(tiny.bundle, tiny.batches)
        assert (facts.failures, set(facts.step_seconds)) == ({}, {*models})
        assert [received.split()[1] for _, received, _ in facts.problems] == [
            f"{name}," for name in refused
        ]
        for rule, _, remedy in facts.problems:
            assert rule.startswith("a process of the kind 'gpu' needs a model without pretrain()")
            assert remedy.startswith("Leave the kind 'gpu' out")


def raising(*arguments: Any) -> Any:
    raise LookupError("the user's own")


@pytest.mark.filterwarnings("ignore:.*jobs failed")
def test_user_code_that_raises_fails_only_its_own_jobs(tmp_path: Path) -> None:
    models = {
        "constructor": raising,
        "forward": lambda: Through(raising),
        "exit": lambda: sys.exit(1),
        "good": Plain,
    }
    results = results_of(tmp_path / "run", models, cv=ONE_FOLD)
    failed = [name for name, result in results.items() if result.status == "failed"]
    names = ("constructor", "exit", "forward")
    assert sorted(failed) == [f"{name}/constant/fold-0" for name in names]
    assert results["good/constant/fold-0"].status == "done"


class Reshaping(Plain):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).view(-1, 7)


MISFITS: dict[str, tuple[Any, str, str]] = {
    "dense": (
        lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(784, 3))),
        "RuntimeError in its layer 1.0, Linear(in_features=784, out_features=3, bias=True), which "
        f"gets float32 (10, {FEATURES}): ",
        "cannot be multiplied",
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()),
        "RuntimeError in its layer 0, Conv2d(1, 3, kernel_size=(3, 3), stride=(1, 1)), which gets ",
        "(unbatched)",
    ),
    "type": (lambda: nn.Embedding(3, 3), "RuntimeError in its forward(), which gets ", "indices"),
    "view": (
        Reshaping,
        "RuntimeError in its forward(), which gets float32",
        "is invalid for input",
    ),
}


def test_a_model_that_cannot_take_the_samples_is_refused_by_layer_and_shape(tmp_path: Path) -> None:
    models = {**{name: parts[0] for name, parts in MISFITS.items()}, "good": Plain}
    refused = problems(tmp_path / "run", models, ["constant", "cosine"])
    for (rule, received, remedy), (name, (_, where, why)) in zip(
        refused, MISFITS.items(), strict=True
    ):
        assert rule == f"model {name} must take the samples, in batches of float32 (10, {FEATURES})"
        assert received.startswith(where)
        assert why in received
        assert "keep_going=True" in remedy


def test_what_a_gpu_may_have_or_time_may_mend_is_no_refusal(tmp_path: Path) -> None:
    torchs: dict[str, Any] = {"__name__": "torch.nn.functional"}
    source = "def lacks(text): raise RuntimeError(text)"
    exec(compile(source, functional.__file__, "exec"), torchs)
    lacks = torchs["lacks"]
    for number, (text, count) in enumerate(
        {
            "CUDA error: no kernel": 0,
            "can't allocate memory": 0,
            '"addmm" not implemented for Half': 0,
            "shapes differ": 1,
        }.items()
    ):
        model = functools.partial(Through, lambda _, text=text: lacks(text))
        tiny = Tiny(tmp_path / str(number), {"bad": model})
        assert len(preflight.check(tiny.bundle, tiny.batches).problems) == count


@pytest.mark.parametrize(
    ("part", "rule", "received"),
    [
        (
            {"models": {"m": lambda: nn.Linear(FEATURES)}},
            "the factory of model m must return a torch.nn.Module",
            "TypeError: Linear.__init__() missing 1 required positional argument: 'out_features'",
        ),
        (
            {"opt_fn": lambda model: optim.Adam(model.parameters(), rate=1e-3)},
            "opt_fn must make an optimizer for model plain",
            "TypeError: Adam.__init__() got an unexpected keyword argument 'rate'",
        ),
        (
            {"schedules": {"s": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, size=3)}},
            "LR schedule s must be made for the optimizer of model plain",
            "TypeError: StepLR.__init__() got an unexpected keyword argument 'size'",
        ),
    ],
    ids=["model", "optimizer", "schedule"],
)
def test_what_cannot_be_made_is_refused_and_names_the_line(
    tmp_path: Path, part: dict[str, Any], rule: str, received: str
) -> None:
    ((broken, what, remedy),) = problems(tmp_path / "run", **part)
    assert broken == rule
    assert what.startswith(received)
    assert re.search(r" \(test_preflight\.py, line \d+\)$", what)
    assert "keep_going=True" in remedy


class Filling(Plain):
    def forward(self, inputs: torch.Tensor) -> Any:
        return super().forward(inputs.nan_to_num(0.0, 0.0, 0.0))


def test_samples_without_a_number_are_refused_where_the_model_does_not_fill_them(
    tmp_path: Path,
) -> None:
    inputs, targets = samples()
    inputs[:, 1], inputs[:, 2] = math.nan, math.inf
    models = {"m": Plain, "filling": Filling}
    ((rule, received, remedy),) = problems(tmp_path / "run", models, data=(inputs, targets))
    assert rule == "samples must be finite where model m or its loss does not take others"
    assert received == "NaN or infinity in the inputs of sample 0"
    assert "SimpleImputer" in remedy


def test_all_problems_come_at_once_and_each_once(tmp_path: Path) -> None:
    models = {"narrow": lambda: Head(2), "rows": lambda: Through(lambda outputs: outputs[1:])}
    schedules = {"cosine": "cosine", "warm": "warm", "bad": lambda optimizer: None}
    assert [
        rule.split(" must ")[0] for rule, *_ in problems(tmp_path / "r", models, schedules)
    ] == ["model narrow", "LR schedule bad", "model rows"]


class Keeping(nn.CrossEntropyLoss):
    """A criterion that keeps what no file can hold; as a model's part, it is the model's."""

    def get_extra_state(self) -> Any:
        return {"started": object()}


class KeepingHead(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Keeping()


class KeepingSGD(optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": object()}


class KeepingStep(optim.lr_scheduler.StepLR):
    def state_dict(self) -> dict[str, Any]:
        return {"rule": len}


def test_state_that_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    for number, (parts, place) in enumerate(
        [
            (one(KeepingHead), "['model m']['kept._extra_state']['started']"),
            (
                {"opt_fn": lambda model: KeepingSGD(model.parameters(), 0.1)},
                "['optimizer']['note']",
            ),
            ({"criterion": Keeping()}, "['criterion']['_extra_state']['started']"),
            ({"schedules": {"s": lambda own: KeepingStep(own, 1)}}, "['LR schedule s']['rule']"),
        ]
    ):
        ((rule, received, remedy),) = problems(tmp_path / str(number), **parts)
        assert rule == "checkpoints must be able to hold the whole state of a job"
        assert place in received
        assert "state_dict()" in remedy


# What the plan records


def recorded(root: Path, **parts: Any) -> str:
    """Return what the plan says of the live objects."""
    return json.dumps(
        sweep(root, cv=ONE_FOLD, **{**one(Plain), **parts}).plan.recipe, sort_keys=True
    )


def step_lr(size: int) -> dict[str, Any]:
    return {"schedules": {"s": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, size)}}


def _small_counts() -> nn.Module:
    model = Noisy()
    model.layers[1].num_batches_tracked = model.layers[1].num_batches_tracked.int()
    return model


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "architecture": ({}, one(lambda: nn.Sequential(nn.ReLU(), Head(3)))),
    "dtype of a buffer": (one(Noisy), one(_small_counts)),
    "optimizer": ({}, {"opt_fn": lambda model: optim.Adam(model.parameters(), 0.1)}),
    "step size": (step_lr(1), step_lr(2)),
    "label smoothing": ({}, {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    "preprocessing": ({}, {"preprocess": StandardScaler()}),
    "its code": (
        {"preprocess": FunctionTransformer(lambda rows: rows + 1)},
        {"preprocess": FunctionTransformer(lambda rows: rows + 2)},
    ),
}


def test_another_sweep_has_another_plan_and_the_same_one_the_same(tmp_path: Path) -> None:
    plain = recorded(tmp_path / "plain")
    assert recorded(tmp_path / "again") == plain
    for name, (first, second) in OTHERS.items():
        before = recorded(tmp_path / f"{name} 1", **first) if first else plain
        assert recorded(tmp_path / f"{name} 2", **second) != before


class Addressed:
    """Its text holds its address in memory."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()


class Talkative(Plain):
    def extra_repr(self) -> str:
        return f"{Addressed()}"


def test_no_address_is_in_the_plan(tmp_path: Path) -> None:
    words = {**one(Talkative), "criterion": Addressed()}
    text = recorded(tmp_path / "run", **words, preprocess=FunctionTransformer(np.negative))
    assert "Addressed" in text
    assert " at 0x" not in text


# Fusion


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)[0]
        return found


FUSIBLE: dict[str, tuple[dict[str, Any], Any, str]] = {
    "linear": ({}, True, ""),
    "not asked": ({}, False, "fuse is False"),
    "recurrent": ({"models": {"m": Recurrent}}, True, "layer (LSTM) cannot be traced"),
    "noisy": ({"models": {"m": Noisy}}, True, "draws random numbers from Python"),
    "optimizer": ({"opt_fn": lambda model: optim.LBFGS(model.parameters())}, True, "LBFGS"),
    "one fold": ({"cv": [(np.arange(40), np.arange(40, 60))]}, True, "there is one job"),
}


def test_a_model_for_a_gpu_is_tried_on_few_samples_and_counted_whole(tmp_path: Path) -> None:
    each = []
    for kinds, most in ((("cpu",), 40), (("cpu", "cuda"), 8)):
        models = {"m": watched(Plain, seen := Seen())}
        tiny = Tiny(tmp_path / kinds[-1], models, batch_size=40, data=samples(150))
        bundle = dataclasses.replace(tiny.bundle, kinds=kinds)
        facts = preflight.check(bundle, tiny.batches)
        each.append((facts.flops, facts.products, facts.memory))
        assert max(map(len, seen.of(training=True))) == most
    assert each[0] == each[1]


def test_a_fused_kernel_asks_for_no_further_step(tmp_path: Path) -> None:
    """The optimizer notes on itself that it has checked its parameters: no state of a job."""
    tried = []
    for kernel in ("foreach", "fused"):
        models = {"m": watched(Plain, seen := Seen())}
        sgd = functools.partial(optim.SGD, lr=0.1, **{kernel: True})
        tiny = Tiny(
            tmp_path / kernel, models, opt_fn=lambda model, sgd=sgd: sgd(model.parameters())
        )
        preflight.check(tiny.bundle, tiny.batches)
        tried.append(len(seen.batches))
    assert tried[0] == tried[1]


def test_facts_say_why_a_model_is_not_fused(tmp_path: Path) -> None:
    for name, (parts, fuse, part) in FUSIBLE.items():
        tiny = Tiny(tmp_path / name, **parts)
        facts = preflight.check(dataclasses.replace(tiny.bundle, fuse=fuse), tiny.batches)
        (reason,), compared = facts.fusible.values(), "".join(facts.fused.values())
        assert bool(reason) == bool(part) != bool(compared)
        assert part in reason
        assert not facts.failures
        # Asked for by more than "auto", it is no reason to train otherwise but an error.
        refused = name in ("recurrent", "noisy", "optimizer")
        (model,) = tiny.bundle.recipe.models
        received = [received for _, received, _ in facts.problems]
        assert received == [f"model {model}: {reason}"] * refused
