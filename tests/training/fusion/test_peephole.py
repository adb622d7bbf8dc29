"""Fewer bytes, the same numbers: rectifiers behind poolings and in place, gradients of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from asynckfold.training.fusion.backends import exchange
from asynckfold.training.fusion.rules import convolution

WEIGHT = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0))


def _graph(*functions) -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for function, *arguments in functions:
        node = graph.call_function(function, (node, *arguments))
    graph.output(node)
    return graph


def _targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _run(graph: fx.Graph, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = fx.GraphModule(torch.nn.Module(), graph)(leaf * 1)
    out.backward(torch.linspace(1, 2, out.numel()).view_as(out))
    return out.detach(), leaf.grad


@pytest.mark.parametrize("settings", [(2,), (3, 2, 1), (2, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_a_rectifier_may_stand_behind_the_pooling(settings: tuple[int, ...], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    # Few values, so that many are equal; zeros of both signs.
    x = torch.randint(-2, 3, (2, 3, 8, 8), generator=random) * torch.tensor(-1.0)
    x[0, 0, 0, 0] = torch.nan
    before, after = (_graph((F.relu,), (F.max_pool2d, *settings)) for _ in range(2))
    exchange(after)
    assert _targets(after) == [F.max_pool2d, torch.relu_]
    for mine, theirs in zip(_run(after, x), _run(before, x), strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_a_rectifier_overwrites_only_what_nobody_needs() -> None:
    convolved = _graph((F.conv2d, WEIGHT), (F.relu,))
    kept = _graph((torch.sigmoid,), (F.relu,))
    two_readers = fx.Graph()
    x = two_readers.placeholder("x")
    shared = two_readers.call_function(torch.conv2d, (x, WEIGHT))
    rectified = two_readers.call_function(F.relu, (shared,))
    pooled = two_readers.call_function(F.max_pool2d, (rectified, 2))
    two_readers.output((pooled, rectified, shared))
    for graph in (convolved, kept, two_readers):
        exchange(graph)
    assert _targets(convolved) == [torch.conv2d, torch.relu_]
    assert _targets(kept) == [torch.sigmoid, F.relu]
    assert _targets(two_readers) == [torch.conv2d, F.relu, F.max_pool2d]


class _Kernels(TorchDispatchMode):
    """Notes over how many channels each kernel for gradients of convolutions goes."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.channels.append(args[2].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("avx512", [True, False])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
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
    found = []
    for function in (F.conv2d, convolution.convolve_images):
        out = function(*tensors, *settings, 2)
        with _Kernels() as kernels:
            gradients = torch.autograd.grad(out.square().sum(), tensors)
        found.append((out, *gradients))
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    # Of the input, then of the weights over two channels and over one; else all at once.
    assert kernels.channels == ([3, 2, 1] if channels == 3 and not avx512 else [channels])
