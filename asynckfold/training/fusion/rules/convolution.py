"""Convolutions: CHANNELS in, CHANNELS out, each replica a group of its own.

Channels last in memory, a grouped convolution of small nets was 2 times faster than R plain ones;
in torch's default format it was slower than they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Layout, NotFusible, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def _rule(function: Any, spatial: int) -> Rule:
    def convolution(
        low: Lowering,
        input: Value,
        weight: Value,
        bias: Value | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Emitted:
        _check_batched(input, spatial)
        kernel, shift = _flat(low, weight), None if bias is None else _flat(low, bias)
        settings = (stride, padding, dilation, groups * low.width)
        return Layout.CHANNELS, low.emit(function, low.channels(input), kernel, shift, *settings)

    return convolution


def _transposed_rule(function: Any, spatial: int) -> Rule:
    def transposed(
        low: Lowering,
        input: Value,
        weight: Value,
        bias: Value | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Emitted:
        _check_batched(input, spatial)
        kernel, shift = _flat(low, weight), None if bias is None else _flat(low, bias)
        settings = (stride, padding, output_padding, groups * low.width, dilation)
        return Layout.CHANNELS, low.emit(function, low.channels(input), kernel, shift, *settings)

    return transposed


def _transposed_leaf(function: Any, spatial: int) -> Rule:
    rule = _transposed_rule(function, spatial)

    def leaf(
        low: Lowering, path: str, module: nn.ConvTranspose2d, input: Value, output_size: Any = None
    ) -> Emitted:
        if output_size is not None:
            raise NotFusible("output_size has no batched form")
        bias = None if module.bias is None else low.parameter(f"{path}.bias")
        return rule(
            low,
            input,
            low.parameter(f"{path}.weight"),
            bias,
            module.stride,
            module.padding,
            module.output_padding,
            module.groups,
            module.dilation,
        )

    return leaf


def _check_batched(input: Value, spatial: int) -> None:
    if input.rank != spatial + 2:
        raise NotFusible(f"a convolution of an input without a batch dimension ({input.rank}-D)")


def _flat(low: Lowering, value: Value) -> Any:
    """Return (R, channels, ...) as (R·channels, ...)."""
    return low.emit(torch.flatten, low.stacked(value), 0, 1)


FUNCTIONS: dict[Any, Rule] = {
    torch.conv1d: _rule(F.conv1d, 1),
    torch.conv2d: _rule(F.conv2d, 2),
    torch.conv3d: _rule(F.conv3d, 3),
    torch.conv_transpose1d: _transposed_rule(F.conv_transpose1d, 1),
    torch.conv_transpose2d: _transposed_rule(F.conv_transpose2d, 2),
    torch.conv_transpose3d: _transposed_rule(F.conv_transpose3d, 3),
}

LEAVES: dict[type[nn.Module], Rule] = {
    nn.ConvTranspose1d: _transposed_leaf(F.conv_transpose1d, 1),
    nn.ConvTranspose2d: _transposed_leaf(F.conv_transpose2d, 2),
    nn.ConvTranspose3d: _transposed_leaf(F.conv_transpose3d, 3),
}

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
