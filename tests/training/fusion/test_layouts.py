"""The ways between the layouts, and that they cost no copy where none is needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asynckfold.training.fusion import fuse, layouts

SIZES = st.integers(1, 4)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, st.lists(SIZES, max_size=3))
def test_fold_and_unfold_are_inverse(
    width: int, batch: int, channels: int, rest: list[int]
) -> None:
    stacked = torch.randn(width, batch, channels, *rest)
    folded = layouts.fold(stacked)
    assert folded.shape == (batch, width * channels, *rest)
    again = layouts.unfold(folded, width)
    assert torch.equal(again, stacked)
    assert again.data_ptr() == folded.data_ptr()
    assert layouts.fold(again).data_ptr() == folded.data_ptr()


@pytest.mark.parametrize("channels", [1, 3])
def test_folded_images_have_their_channels_last(channels: int) -> None:
    """Of one channel, too: else the whole net would run in the slow format."""
    folded = layouts.fold(torch.randn(5, 4, channels, 6, 6))
    assert folded.is_contiguous(memory_format=torch.channels_last)


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 3))
def test_aligned_values_broadcast_as_the_plain_ones(rank: int, more: int) -> None:
    rows = torch.randn(2, *(2, 3, 4)[3 - rank :])
    other = torch.randn(2, *(1,) * more, *(2, 3, 4)[3 - rank :])
    aligned = layouts.align(rows, rank + more) + other
    for replica in range(2):
        assert torch.equal(aligned[replica], rows[replica] + other[replica])


def test_gradients_need_no_copy_for_their_weights() -> None:
    """The gradient of a weight comes in the order in which the stack keeps the weight."""
    models = [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
        for _ in range(3)
    ]
    fused = fuse(models, [torch.randn(2, 3, 6, 6)])
    shapes = {name: tuple(p.shape) for name, p in fused.parameters().items()}
    assert shapes["0.weight"] == (3, 4, 3, 3, 3)
    assert shapes["3.weight"] == (3, 64, 2)
    fused(torch.randn(3, 2, 3, 6, 6)).sum().backward()
    for parameter in fused.parameters().values():
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()


def test_replicas_must_be_alike() -> None:
    def why(*models: nn.Module) -> str:
        with pytest.raises(layouts.NotFusible) as error:
            fuse(models, [torch.zeros(2, 4)])
        return str(error.value)

    linear = nn.Linear(4, 2)
    assert why() == "there is no model"
    assert "names, shapes, types or ties" in why(linear, nn.Linear(4, 3))
    assert "share a parameter" in why(linear, linear)
    frozen = nn.Linear(4, 2).requires_grad_(False)
    assert "names, shapes, types or ties" in why(linear, frozen)
    two = [nn.Sequential(nn.Linear(4, 2), layer) for layer in (nn.ReLU(), nn.Tanh())]
    assert why(*two) == "the replicas differ: layer 1 (ReLU) is a Tanh"
    two = [nn.Sequential(nn.Linear(4, 2), nn.Dropout(p)) for p in (0.1, 0.2)]
    assert why(*two) == "the replicas differ: layer 1 (Dropout) has p 0.1 and 0.2"


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
    assert not fused.why_vmap
    torch.testing.assert_close(fused(x), expected)
    torch.testing.assert_close(fused.part(range(1, 3))(x[1:]), expected[1:])


def test_functions_that_differ_between_replicas_are_refused_or_seen() -> None:
    shared = torch.ones(2)
    models = [Scaled(shared, function) for function in (torch.tanh, lambda x: x + 1)]
    with pytest.raises(layouts.NotFusible, match="compute different things"):
        fuse(models, [torch.zeros(5, 4)])
