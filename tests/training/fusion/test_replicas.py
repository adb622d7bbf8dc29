"""What counts as replicas of one model, and what may differ between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import fuse
from asynckfold.training.fusion.rules import convolution


def test_replicas_must_be_alike() -> None:
    def why(*models: nn.Module) -> str:
        with pytest.raises(NotFusible) as error:
            fuse(models, [torch.zeros(2, 4)])
        return str(error.value)

    linear = nn.Linear(4, 2)
    assert why() == "there is no model"
    assert "names, shapes, types or ties" in why(linear, nn.Linear(4, 3))
    assert "share a parameter" in why(linear, linear)
    frozen = nn.Linear(4, 2).requires_grad_(False)
    assert "names, shapes, types or ties" in why(linear, frozen)
    two = [nn.Sequential(nn.Linear(4, 2), layer) for layer in (nn.ReLU(), nn.Tanh())]
    assert why(*two) == "the replicas compute different things"
    two = [nn.Sequential(nn.Linear(4, 2), nn.Dropout(p)) for p in (0.1, 0.2)]
    assert why(*two) == "the replicas compute different things"


class Scaled(nn.Module):
    """Holds a tensor that is neither parameter nor buffer, and a function."""

    def __init__(self, scale: torch.Tensor, function: object) -> None:
        super().__init__()
        self.linear, self.scale, self.function = nn.Linear(4, 2), scale, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)) * self.scale  # type: ignore[operator]


def test_tensors_that_differ_between_replicas_stay_their_own() -> None:
    models = [Scaled(torch.rand(2), torch.tanh) for _ in range(3)]
    x = torch.randn(3, 5, 4)
    expected = torch.stack([model(x[replica]) for replica, model in enumerate(models)])
    fused = fuse(models, [x[0]])
    torch.testing.assert_close(fused(x), expected)
    torch.testing.assert_close(fused.part(range(1, 3))(x[1:]), expected[1:])


@pytest.mark.parametrize("avx512", [True, False])
@pytest.mark.parametrize("channels", [2, 3])
@pytest.mark.parametrize("settings", [(1, 0, 1), (2, 1, 1), ((1, 2), (2, 0), (1, 2))])
def test_gradients_of_images_are_those_of_torch(
    channels: int, settings: tuple, avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "AVX512", avx512)
    random = torch.Generator().manual_seed(0)
    shapes = ((4, 2 * channels, 9, 9), (10, channels, 3, 3), (10,))
    tensors = [
        torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    outputs = []
    for function in (F.conv2d, convolution.convolve_images):
        out = function(*tensors, *settings, 2)
        outputs.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for mine, theirs in zip(*outputs, strict=True):
        assert mine.shape == theirs.shape
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
