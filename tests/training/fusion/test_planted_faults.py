"""Faults planted into the rules of fusion are refused; rounding that flips units is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asynckfold.training.fusion import equivalence as comparison
from asynckfold.training.fusion.backward import backward
from asynckfold.training.fusion.equivalence import Equivalence, check_equivalence
from asynckfold.training.fusion.lowering import Lowering
from asynckfold.training.fusion.module import FusedModule
from asynckfold.training.fusion.rules import convolution, linear, normalisation, random

REPLICAS, SAMPLES = 3, 6


class Net(nn.Module):
    """A small LeNet with batch normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)),
        )

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


def compared(seed: int = 0) -> Equivalence:
    torch.manual_seed(seed)
    models = [Net() for _ in range(REPLICAS)]
    batches = [(torch.randn(SAMPLES, 1, 14, 14), torch.randint(3, (SAMPLES,))) for _ in models]
    return check_equivalence(models, nn.CrossEntropyLoss(), batches)


affine, convolve = linear.affine, convolution.convolve_images
normalise, mask_of = normalisation.normalise_batch, random.mask_of
gradients_of = FusedModule.gradients_of
MEAN, VAR, USE, MOMENTUM = 1, 2, 5, 6


def outputs(right: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change the outputs of a rule."""
    return lambda *args: change(right(*args))


def with_other(right: Callable[..., Any], place: int, value: Any) -> Callable[..., Any]:
    """Call a rule with another argument."""
    return lambda *args: right(*args[:place], value, *args[place + 1 :])


def shared_statistics(*args: Any) -> torch.Tensor:
    found = normalise(*args)
    if args[USE]:
        for average in args[MEAN : VAR + 1]:
            average.data.copy_(average.mean(0, keepdim=True).expand_as(average))
    return found


def normalised_together(x: torch.Tensor, *args: Any) -> torch.Tensor:
    count, width = args[0].shape if args[0] is not None else (REPLICAS, x.shape[1] // REPLICAS)
    if not args[USE - 1]:
        return normalise(x, *args)
    normalise(x, *args)
    rows = x.unflatten(1, (count, width)).movedim(1, 0).flatten(0, 1)
    found = F.batch_norm(rows, None, None, training=True)
    return found.unflatten(0, (count, -1)).movedim(0, 1).flatten(1, 2)


def not_written(self: Lowering, node: Any, layout: Any, result: Any) -> None:
    self.cells[node] = self.cells[node.args[0]]


def one_loss(fused: Any, criterion: Any, part: Any, precision: str) -> torch.Tensor:
    losses = criterion(comparison.outputs_of(fused, part.inputs, precision), part.targets)
    losses.mean().backward()
    return losses.detach()


def exchanged_gradients(self: FusedModule, replica: int) -> dict[str, torch.Tensor]:
    return gradients_of(self, (replica + 1) % REPLICAS)


LINEAR, CONVOLUTION = (linear, "affine"), (convolution, "convolve_images")
NORMALISATION, DROPOUT = (normalisation, "normalise_batch"), (random, "mask_of")

PLANTED: dict[str, tuple[tuple[Any, str], Callable[..., Any]]] = {
    "replicas exchanged": (LINEAR, outputs(affine, lambda found: found.roll(1, 0))),
    "a layer scaled": (LINEAR, outputs(affine, lambda found: 1.001 * found)),
    "a bias before a normalisation left out": (CONVOLUTION, with_other(convolve, 2, None)),
    "running statistics shared": (NORMALISATION, shared_statistics),
    "statistics of all replicas": (NORMALISATION, normalised_together),
    "statistics not kept": (
        NORMALISATION,
        lambda x, *args: normalise(x, args[0].clone(), args[1].clone(), *args[2:]),
    ),
    "another momentum": (NORMALISATION, with_other(normalise, MOMENTUM, 0.2)),
    "batches not counted": ((Lowering, "_overwrite"), not_written),
    "batch statistics in evaluation": (NORMALISATION, with_other(normalise, USE, True)),
    "dropout shared": (
        DROPOUT,
        lambda x, p, generators, order: mask_of(x, p, generators[:1] * len(generators), order),
    ),
    "no dropout": (DROPOUT, lambda x, p, *_: torch.full_like(x, 1 - p)),
    "the mean of the losses": ((backward.__globals__, "_backward"), one_loss),
    "gradients exchanged": ((FusedModule, "gradients_of"), exchanged_gradients),
    "bfloat16": (CONVOLUTION, outputs(convolve, lambda found: found.bfloat16().to(found.dtype))),
    "outputs in float64": (
        (FusedModule, "__call__"),
        outputs(FusedModule.__call__, torch.Tensor.double),
    ),
}


@pytest.mark.parametrize("seed", range(2))
def test_what_is_right_passes_whatever_rounding_flips(one_thread: None, seed: int) -> None:
    found = compared(seed)
    assert found.refusal is None
    assert found.largest["float64"] < 1e-9
    assert "in float64 and" in str(found)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_refused(
    one_thread: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (place, attribute), wrong = PLANTED[name]
    if isinstance(place, dict):
        monkeypatch.setitem(place, attribute, wrong)
    else:
        monkeypatch.setattr(place, attribute, wrong)
    found = compared()
    assert found.refusal is not None
    assert "was raised" not in found.refusal
    assert found.fused is None
