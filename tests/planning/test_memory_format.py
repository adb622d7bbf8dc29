"""Which models train channels last: the rule, what a plan keeps of it, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError, Job, Plan, TrainerParams
from asynckfold.models import VGG, LeNet5, MobileNet
from asynckfold.planning.memory_format import Convolution, chosen, why_not_paying
from asynckfold.training.flops import FlopCounter
from tests.training.tiny import Tiny, checkpoints

WIDE = Convolution((32, 64, 32, 32), (64, 16, 3, 3))
NARROW = Convolution((32, 6, 28, 28), (6, 1, 5, 5))


def plan_of(*models: str, **changes: Any) -> Plan:
    jobs = tuple(Job(model, "step", 0, 0, 0) for model in models)
    plan = Plan(jobs, TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
    return replace(plan, **changes)


@pytest.mark.parametrize(
    ("model", "shape", "wanted"),
    [
        (lambda: VGG(width=0.25), (3, 32, 32), True),
        (MobileNet, (3, 32, 32), True),
        (LeNet5, (1, 32, 32), False),
    ],
)
def test_the_rule_takes_what_was_faster_and_leaves_what_was_slower(
    model: Callable[[], nn.Module], shape: tuple[int, ...], wanted: bool
) -> None:
    with FlopCounter() as counter, torch.no_grad():
        model()(torch.zeros(2, *shape))
    assert (why_not_paying(plan_of(), counter.convolutions) == "") is wanted


@pytest.mark.parametrize(
    ("changes", "convolutions", "reason"),
    [
        ({}, [], "no 2-D convolution"),
        ({"device": "cuda"}, [WIDE], "do not use the matrix units"),
        ({"device": "cuda", "params": TrainerParams(precision="tf32")}, [NARROW], "fewer than 16"),
        *(
            ({"device": "cuda", "params": TrainerParams(precision=precision)}, [WIDE], "")
            for precision in ("tf32", "bf16", "fp16")
        ),
        ({"params": TrainerParams(trainer="hogwild")}, [WIDE], "the trainer 'hogwild'"),
        ({"params": TrainerParams(memory_format="contiguous")}, [WIDE], "is 'contiguous'"),
        ({"params": TrainerParams(memory_format="channels_last")}, [], "no 2-D convolution"),
        ({"params": TrainerParams(memory_format="channels_last")}, [NARROW], ""),
        ({}, [WIDE, Convolution((32, 512, 32, 32), (512, 512, 3, 3))], "products per output"),
    ],
)
def test_why_not(changes: dict[str, Any], convolutions: list[Convolution], reason: str) -> None:
    why = why_not_paying(plan_of(**changes), convolutions)
    assert reason in why
    assert bool(reason) == bool(why)


def test_a_run_keeps_what_its_plan_says_and_decides_for_what_is_added() -> None:
    plan, paying = plan_of("A", "B", "C"), {"A": "", "B": "", "C": "it is small"}
    assert chosen(plan, paying, None) == ("A", "B")
    assert chosen(plan, paying, plan_of("A")) == ("B",)
    assert chosen(plan, {}, plan_of("A", channels_last=("A",))) == ("A",)
    asked = replace(plan, params=TrainerParams(memory_format="contiguous"))
    assert chosen(asked, {}, plan_of("A", channels_last=("A",))) == ()


class Images(nn.Module):
    """Wide enough for the rule; says how its convolution's outputs lie in memory."""

    seen: set[bool]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 2)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.layers(inputs.view(-1, 2, 6, 6))
        self.seen.add(found.is_contiguous(memory_format=torch.channels_last))
        flat: torch.Tensor = self.flat(found)
        return self.head(flat)

    def flat(self, found: torch.Tensor) -> torch.Tensor:
        return found.mean((2, 3))


class Peeking(Images):
    """Reads what lies first in memory."""

    def flat(self, found: torch.Tensor) -> torch.Tensor:
        return found.as_strided((len(found), 16), (found.stride(0), 1))


def images(count: int = 60) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 72)).astype(np.float32), np.arange(count) % 3


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


class Last(Tiny):
    """A sweep whose plan says channels last."""

    @property
    def bundle(self) -> Any:
        found = Tiny.bundle.func(self)  # type: ignore[attr-defined]
        return replace(found, plan=replace(found.plan, channels_last=tuple(self.models)))


def sweep(kind: type[Tiny], root: Path, model: type[Images] = Images, **changes: Any) -> Tiny:
    made = type(model.__name__, (model,), {"seen": set()})
    return kind(root, {"images": made}, opt_fn=adam, data=images(), **changes)


def test_the_same_bits_where_it_is_continued(tmp_path: Path) -> None:
    """What Adam's fused kernel keeps lies as parameters do, also after a checkpoint."""
    whole, tiny = sweep(Last, tmp_path / "whole").train(), sweep(Last, tmp_path / "parts")
    left = iter(range(5))
    _, news = tiny.attempt(stop=lambda: next(left, None) is None)
    found, _ = tiny.attempt(None, 2, checkpoints(news))
    assert found is not None
    assert found.digest == whole.digest


def run(root: Path, model: type[Images] = Images, **params: Any) -> tuple[Any, set[bool]]:
    """Train three jobs in this process; return the results, and how their images lay."""
    made = type("Images", (model,), {"seen": set()})
    settings = {"verbose": 0, "baseline": None, "parallelize": False}
    kfold = AsyncKFold(3, images(), root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold({"images": made}, ["step"], adam, {"epochs": 1, **params}), made.seen


def test_a_model_that_does_not_compute_the_same_so_is_left_as_it_is(tmp_path: Path) -> None:
    results, seen = run(tmp_path / "auto", Peeking)
    assert results.plan.channels_last == ()
    assert False in seen
    refusal = "memory_format='channels_last'.*images: its outputs differ"
    with pytest.raises(InputError, match=refusal):
        run(tmp_path / "requested", Peeking, memory_format="channels_last")


def test_a_run_says_it_and_keeps_it(tmp_path: Path) -> None:
    (auto, last), (requested, _) = (
        run(tmp_path / "auto"),
        run(tmp_path / "requested", memory_format="channels_last"),
    )
    other, plain = run(tmp_path / "other", memory_format="contiguous")
    assert True in last
    assert plain == {False}
    assert auto.plan.channels_last == requested.plan.channels_last == ("images",)
    assert other.plan.channels_last == ()
    for name, result in auto.results.items():
        contiguous = other.results[name]
        assert result.weights == requested.results[name].weights != contiguous.weights
        # Adam makes full steps out of the rounding of a bias that the normalisation takes out.
        np.testing.assert_allclose(result.outputs, contiguous.outputs, atol=2e-2)
    again, _ = run(tmp_path / "auto")
    assert again.fingerprint == auto.fingerprint
