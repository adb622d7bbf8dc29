"""The dry run: what breaks our rules refuses the sweep, what raises by itself only its own jobs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
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
from asynckfold.jobs.messages import Facts
from asynckfold.models import DBN, Pretraining
from asynckfold.training.dry_run import preflight
from asynckfold.training.fusion.rules import linear
from tests.training.tiny import CLASSES, FEATURES, Noisy, Plain, Tiny, samples


def check(tmp_path: Path, **parts: Any) -> Facts:
    tiny = Tiny(tmp_path, **parts)
    return preflight.check(tiny.bundle, tiny.batches)


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


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def through(function: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return {"models": {"m": lambda: Through(function)}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no optimizer": (
        {"opt_fn": lambda model: None},
        "opt_fn must return a torch.optim.Optimizer",
        "None",
    ),
    "no module": (
        {"models": {"m": lambda: len}},
        "model m must be a torch.nn.Module",
        "builtin_function_or_method",
    ),
    "too narrow": (
        {"models": {"m": lambda: Head(2)}},
        "model m must return (samples, classes) scores for the 3 classes",
        "shape (10, 2)",
    ),
    "rows": (
        through(lambda outputs: outputs[1:]),
        "model m must return one row for each sample",
        "shape (9, 3) for 10 samples",
    ),
    "tuple": (
        through(lambda outputs: (outputs, 1)),
        "model m must return one tensor for CrossEntropyLoss",
        "[0] float32 (10, 3), [1] int",
    ),
    "detached": (
        through(lambda outputs: outputs.detach()),
        "the criterion must give model m one number with a gradient",
        "a tensor of shape (), requires_grad=False",
    ),
    "loss for each sample": (
        {"models": {"m": Plain}, "criterion": nn.CrossEntropyLoss(reduction="none")},
        "the criterion must give model m one number with a gradient",
        "a tensor of shape (10,), requires_grad=True",
    ),
    "schedule without step": (
        {"lr_schedules": {"s": lambda optimizer: object}},
        "LR schedule s must have step() and state_dict()",
        "<class 'object'>",
    ),
    "frozen": (
        {"models": {"m": Frozen}},
        "the criterion must give model m one number with a gradient",
        "a tensor of shape (), requires_grad=False",
    ),
    "broadcast": (
        {
            "models": {"m": lambda: Head(1)},
            "criterion": nn.MSELoss(),
            "data": (samples()[0], samples()[1].astype(np.float32)),
            "task": "regression",
        },
        "model m must return outputs of the shape of the targets",
        "outputs (10, 1), targets (10,)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_rule_refuses_the_sweep(tmp_path: Path, name: str) -> None:
    parts, rule, received = REFUSED[name]
    (problem,) = check(tmp_path, **parts).problems
    assert problem[:2] == (rule, received)
    assert problem[2].endswith(".") or "def opt_fn" in problem[2]


class Staged(Plain):
    """Has a stage of pretraining that differentiates, as any may."""

    def pretrain(self, inputs: torch.Tensor, generator: torch.Generator, report: Any) -> None:
        self(inputs).sum().backward()


class StagedDBN(DBN):
    def pretrain(self, *given: Any, inputs: Any = 0, generator: Any = 0, report: Any = 0) -> Any:
        return super().pretrain(*given)


def dbn(kind: type[DBN] = DBN) -> nn.Module:
    return kind(FEATURES, (4,), CLASSES, pretraining=Pretraining(epochs=1))


@pytest.mark.parametrize(
    ("model", "by_kind", "refused"),
    [
        (Staged, True, True),
        (functools.partial(dbn, StagedDBN), True, True),
        (Staged, False, False),
        (dbn, True, False),
        (Plain, True, False),
    ],
    ids=["stage", "stage of a DBN's heir", "no kinds", "DBN", "no stage"],
)
def test_pretraining_that_may_differentiate_is_refused_with_a_gpu_process(
    tmp_path: Path, model: Callable[[], nn.Module], by_kind: bool, refused: bool
) -> None:
    size = {"cpu": 10, "gpu": 20} if by_kind else 10
    words = {"trainer": "averaging", "processes": 2, "epochs": 1, "partition_size": size}
    params = TrainerParams.from_mapping(words)
    facts = check(tmp_path, models={"m": model, "plain": Plain}, params=params)
    assert (facts.failures, set(facts.step_seconds)) == ({}, {"m", "plain"})
    if refused:
        ((rule, received, remedy),) = facts.problems
        assert rule.startswith("a process of the kind 'gpu' needs a model without pretrain()")
        assert received.startswith("model m, a Staged")
        assert remedy.startswith("Leave the kind 'gpu' out")
    else:
        assert facts.problems == ()


def raising(*arguments: Any) -> Any:
    raise LookupError("the user's own")


@pytest.mark.parametrize(
    "parts",
    [
        {"models": {"bad": raising, "good": Plain}},
        {"models": {"bad": lambda: Through(raising), "good": Plain}},
        {"models": {"bad": lambda: sys.exit(1), "good": Plain}},
    ],
    ids=["constructor", "forward", "exit"],
)
def test_user_code_that_raises_fails_only_its_own_jobs(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    facts = check(tmp_path, **parts)
    assert facts.problems == ()
    assert list(facts.failures) == ["bad/constant"]
    assert "Traceback" in facts.failures["bad/constant"]
    assert set(facts.step_seconds) == {"good"}


class Reshaping(Plain):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).view(-1, 7)


SCHEDULES = {"constant": "constant", "cosine": "cosine"}
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


@pytest.mark.parametrize("name", MISFITS)
def test_a_model_that_cannot_take_the_samples_is_refused_by_layer_and_shape(
    tmp_path: Path, name: str
) -> None:
    model, where, why = MISFITS[name]
    facts = check(tmp_path, models={"bad": model, "good": Plain}, lr_schedules=SCHEDULES)
    ((rule, received, remedy),) = facts.problems
    assert rule == f"model bad must take the samples, in batches of float32 (10, {FEATURES})"
    assert received.startswith(where)
    assert why in received
    assert "keep_going=True" in remedy
    told = f"{rule}: received {received}"
    assert facts.refused == {"bad/constant": told, "bad/cosine": told}
    assert (facts.failures, set(facts.step_seconds)) == ({}, {"good"})


@pytest.mark.parametrize(
    "text", ["CUDA error: no kernel", "can't allocate memory", '"addmm" not implemented for Half']
)
def test_what_a_gpu_may_have_or_time_may_mend_is_no_refusal(tmp_path: Path, text: str) -> None:
    torchs: dict[str, Any] = {"__name__": "torch.nn.functional"}
    source = "def lacks(text): raise RuntimeError(text)"
    exec(compile(source, functional.__file__, "exec"), torchs)
    lacks = torchs["lacks"]
    for said, count in ((text, 0), ("shapes differ", 1)):
        model = functools.partial(Through, lambda _, said=said: lacks(said))
        assert len(check(tmp_path, models={"bad": model}).problems) == count


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
            {"lr_schedules": {"s": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, size=3)}},
            "LR schedule s must be made for the optimizer of model plain",
            "TypeError: StepLR.__init__() got an unexpected keyword argument 'size'",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_and_names_the_line(
    tmp_path: Path, part: dict[str, Any], rule: str, received: str
) -> None:
    (problem,) = check(tmp_path, **part).problems
    assert problem[0] == rule
    assert problem[1].startswith(received)
    assert re.search(r" \(test_preflight\.py, line \d+\)$", problem[1])
    assert "keep_going=True" in problem[2]


class Filling(Plain):
    def forward(self, inputs: torch.Tensor) -> Any:
        return super().forward(inputs.nan_to_num(0.0, 0.0, 0.0))


def test_samples_without_a_number_are_refused_where_the_model_does_not_fill_them(
    tmp_path: Path,
) -> None:
    inputs, targets = samples()
    inputs[:, 1], inputs[:, 2] = math.nan, math.inf
    facts = check(tmp_path, data=(inputs, targets), models={"m": Plain, "filling": Filling})
    (problem,) = facts.problems
    rule = "samples must be finite where model m or its loss does not take others"
    assert problem[:2] == (rule, "NaN and infinity in its inputs of sample 0")
    assert "SimpleImputer" in problem[2]
    assert (list(facts.refused), list(facts.step_seconds)) == (["m/constant"], ["filling"])


def test_all_problems_come_at_once_and_each_once(tmp_path: Path) -> None:
    facts = check(
        tmp_path,
        models={"narrow": lambda: Head(2), "tuple": lambda: Through(lambda outputs: (outputs,))},
        lr_schedules={"cosine": "cosine", "warm": "warm", "bad": lambda optimizer: None},
    )
    assert [problem[0].split(" must ")[0] for problem in facts.problems] == [
        "model narrow",
        "LR schedule bad",
        "model tuple",
    ]


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


@pytest.mark.parametrize(
    ("parts", "place"),
    [
        ({"models": {"m": KeepingHead}}, "['model m']['kept._extra_state']['started']"),
        ({"opt_fn": lambda model: KeepingSGD(model.parameters(), 0.1)}, "['optimizer']['note']"),
        ({"criterion": Keeping()}, "['criterion']['_extra_state']['started']"),
        (
            {"lr_schedules": {"cosine": "cosine", "s": lambda own: KeepingStep(own, 1)}},
            "['LR schedule s']['rule']",
        ),
    ],
    ids=["model", "optimizer", "criterion", "LR schedule"],
)
def test_state_that_no_checkpoint_can_hold_is_refused(
    tmp_path: Path, parts: dict[str, Any], place: str
) -> None:
    ((rule, received, remedy),) = check(tmp_path, **parts).problems
    assert rule == "checkpoints must be able to hold the whole state of a job"
    assert place in received
    assert "state_dict()" in remedy


@pytest.mark.parametrize("threshold", [0, 1000])
def test_models_with_odd_state_and_optimizers_are_accepted(tmp_path: Path, threshold: int) -> None:
    class Extra(Plain):
        def get_extra_state(self) -> Any:
            return {"threshold": threshold}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"threshold": threshold}

    facts = check(
        tmp_path,
        models={"extra": Extra},
        opt_fn=lambda model: optim.LBFGS(model.parameters(), 0.1),
        lr_schedules={"reduce": "reduce"},
    )
    assert (facts.problems, facts.failures) == ((), {})


def test_a_dry_run_leaves_no_trace_in_the_jobs(tmp_path: Path) -> None:
    def make(name: str) -> Tiny:
        return Tiny(tmp_path / name, {"noisy": Noisy}, criterion=nn.CrossEntropyLoss())

    alone, after = make("alone"), make("after")
    preflight.check(after.bundle, after.batches)
    assert after.train().digest == alone.train().digest


# ---- facts ----


def facts_of(tmp_path: Path, **parts: Any) -> dict[str, Any]:
    return check(tmp_path, **{"models": {"m": Plain}, **parts}).recipe


def test_facts_are_the_same_each_time(tmp_path: Path) -> None:
    assert facts_of(tmp_path) == facts_of(tmp_path)


def slow(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "architecture": ({}, {"models": {"m": lambda: nn.Sequential(nn.ReLU(), Head(3))}}),
    "dtype of a buffer": (
        {"models": {"m": lambda: Noisy()}},
        {"models": {"m": lambda: _half_statistics()}},
    ),
    "optimizer": ({}, {"opt_fn": lambda model: optim.Adam(model.parameters(), 0.1)}),
    "step size": (
        {"lr_schedules": {"s": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 1)}},
        {"lr_schedules": {"s": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 2)}},
    ),
    "label smoothing": ({}, {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    "class weights": ({}, {"criterion": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))}),
    "criterion's code": (
        {"criterion": lambda outputs, targets: functional.cross_entropy(outputs, targets)},
        {"criterion": lambda outputs, targets: 2 * functional.cross_entropy(outputs, targets)},
    ),
    "preprocessing": ({}, {"preprocess": StandardScaler()}),
    "its code": (
        {"preprocess": FunctionTransformer(lambda rows: rows + 1)},
        {"preprocess": FunctionTransformer(lambda rows: rows + 2)},
    ),
}


def _half_statistics() -> nn.Module:
    model = Noisy()
    model.layers[1].running_mean = model.layers[1].running_mean.half()
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_another_sweep_has_other_facts(tmp_path: Path, name: str) -> None:
    one, other = (facts_of(tmp_path, **parts) for parts in OTHERS[name])
    assert one != other
    assert facts_of(tmp_path, **OTHERS[name][0]) == one


class Addressed:
    """Its text holds its address in memory."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()


class Talkative(Plain):
    def extra_repr(self) -> str:
        return f"{Addressed()}"


def halved(rows: Any) -> Any:
    return rows / 2


def addressed_facts(folder: Path) -> str:
    facts = facts_of(
        folder,
        models={"m": Talkative},
        criterion=Addressed(),
        preprocess=FunctionTransformer(halved),
        lr_schedules={
            "own": lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
        },
    )
    return json.dumps(facts, sort_keys=True)


@pytest.mark.nightly
def test_facts_are_the_same_in_another_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from tests.training.dry_run import test_preflight as here; "
        "print(here.addressed_facts(Path(sys.argv[1])))"
    )
    there = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there.strip() == addressed_facts(tmp_path)
    assert "Addressed" in there


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
    "recurrent": ({"models": {"m": Recurrent}}, True, "recurrent"),
    "noisy": ({"models": {"m": Noisy}}, True, "draws random numbers from Python"),
    "optimizer": ({"opt_fn": lambda model: optim.LBFGS(model.parameters())}, True, "LBFGS"),
    "on views": ({"opt_fn": lambda model: optim.Adafactor(model.parameters())}, True, ""),
    "one fold": ({"cv": [(np.arange(40), np.arange(40, 60))]}, True, "there is one job"),
}


@pytest.mark.parametrize("name", FUSIBLE)
def test_facts_say_why_a_model_is_not_fused(tmp_path: Path, name: str) -> None:
    parts, fuse, part = FUSIBLE[name]
    tiny = Tiny(tmp_path, **parts)
    facts = preflight.check(dataclasses.replace(tiny.bundle, fuse=fuse), tiny.batches)
    (reason,) = facts.fusible.values()
    assert bool(reason) == bool(part)
    assert part in reason
    assert not facts.failures
    # Asked for by more than "auto", it is no reason to train otherwise but an error.
    refused = name in ("recurrent", "noisy", "optimizer")
    told = "".join(facts.fused.values())
    assert bool(told) == (not part)
    own = "each job steps its own optimizer: Adafactor is not known"
    assert (own in told) == (name == "on views")
    (model,) = tiny.bundle.recipe.models
    received = [received for _, received, _ in facts.problems]
    assert received == [f"model {model}: {reason}"] * refused


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_replicas_that_influence_each_other_are_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    affine = linear.affine

    def exchanged(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Those of another replica: right where there is but one."""
        if what == "inputs":
            return affine(x.roll(1, 0), weight, bias)
        return affine(x, weight, bias).roll(1, 0)

    monkeypatch.setattr(linear, "affine", exchanged)
    tiny = Tiny(tmp_path)
    facts = preflight.check(dataclasses.replace(tiny.bundle, fuse=True), tiny.batches)
    (reason,) = facts.fusible.values()
    assert "the fused losses differ from the plain ones" in reason
