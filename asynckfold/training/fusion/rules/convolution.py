"""Convolutions: CHANNELS in, CHANNELS out, one group for each replica.

Channels last in memory, a grouped convolution of small nets was 2 times faster than R plain ones;
in torch's default format it was slower than they are. Images have their gradients by `_Images`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import NotFusible, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether oneDNN's kernels for three channels are as fast as others, see `_Images`."""


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
        of_images = spatial == 2 and not isinstance(padding, str)
        call = convolve_images if of_images else function
        settings = (stride, padding, dilation, groups * low.width)
        return _emit(low, call, spatial, input, weight, bias, *settings)

    return convolution


def _emit(
    low: Lowering,
    function: Any,
    spatial: int,
    input: Value,
    weight: Value,
    bias: Value | None,
    *settings: Any,
) -> Emitted:
    """Emit a convolution of all replicas with these settings, in the function's order."""
    if input.rank != spatial + 2:
        raise NotFusible(f"a convolution of an input without a batch dimension ({input.rank}-D)")
    kernel, shift = _flat(low, weight), None if bias is None else _flat(low, bias)
    return low.on_channels(function, input, kernel, shift, *settings)


def convolve_images(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    """Return ``F.conv2d`` of these and its settings, with gradients by `_Images`."""
    if torch.is_autocast_enabled(x.device.type):
        # Autocast does not look into a custom autograd function.
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    convolved: torch.Tensor = _Images.apply(x, weight, bias, *settings)
    return convolved


class _Images(torch.autograd.Function):
    """``F.conv2d`` with faster gradients of bias and weight, the same but for rounding.

    Measured for 5 groups of 32 images of 32×32 (1 core of an AMD EPYC, torch 2.15): the gradient of
    a bias took 0.3 to 4.5 ms in the convolution's kernel, and 0.1 to 0.6 ms as a sum. That of
    weights over three channels, as colours are, took 14.8 ms for 6 outputs and kernels of 5×5; over
    two channels 2.4, over one 1.5, over four 4.9: oneDNN has a slower kernel for three. With
    AVX-512 (a Xeon) three took 3.8, two 2.6, one 1.8 ms, so they stay together there; a step of
    LeNet took 25.9 ms instead of 29.0, and on an EPYC with AVX-512 10.3 instead of 10.9.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> torch.Tensor:
        """Convolve."""
        ctx.save_for_backward(x, weight)
        ctx.settings = (_pair(stride), _pair(padding), _pair(dilation), False, (0, 0), groups)
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of input, weight and bias that are wanted."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        apart = of_weight and weight.shape[1] == 3 and x.device.type == "cpu" and not AVX512

        def gradients(part: torch.Tensor, kernel: torch.Tensor, *mask: bool) -> Any:
            return torch.ops.aten.convolution_backward(
                grad, part, kernel, None, *ctx.settings, [*mask, False]
            )

        grad_x, grad_weight, _ = gradients(x, weight, of_x, of_weight and not apart)
        if apart:
            # (B, height, width, groups, channels)
            last = x.movedim(1, -1).unflatten(-1, (-1, 3))
            grad_weight = torch.cat(
                [
                    gradients(last[..., of].flatten(-2).movedim(-1, 1), weight[:, of], False, True)[
                        1
                    ]
                    for of in (slice(0, 2), slice(2, 3))
                ],
                1,
            )
        return grad_x, grad_weight, grad.sum((0, 2, 3)) if of_bias else None, *(None,) * 4


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


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
        settings = (stride, padding, output_padding, groups * low.width, dilation)
        return _emit(low, function, spatial, input, weight, bias, *settings)

    return transposed


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

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


def _channelwise(function: Any, spatial: int | None) -> Rule:
    def channelwise(low: Lowering, input: Value, *args: Any, **kwargs: Any) -> Emitted:
        if spatial is not None and input.rank != spatial + 2:
            raise NotFusible(f"pooling of an input without a batch dimension ({input.rank}-D)")
        if kwargs.pop("return_indices", False):
            raise NotFusible("return_indices has no batched form")
        return low.on_channels(function, input, *args, **kwargs)

    return channelwise


def pad(
    low: Lowering,
    input: Value,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Emitted:
    """Pad the last dimensions; by mirrored or repeated values only what is no channel."""
    if len(pad) // 2 <= input.rank - 2:
        return low.on_channels(F.pad, input, pad, mode, value)
    if mode != "constant":
        raise NotFusible(f"padding of an input without a batch dimension ({input.rank}-D)")
    return low.on_stacked(F.pad, input, pad, mode, value)


def _pools() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for spatial in (1, 2, 3):
        for kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "lp_pool"):
            function = getattr(F, f"{kind}{spatial}d")
            rule = _channelwise(function, spatial)
            rules[function] = rule
            if (twin := getattr(torch, f"{kind}{spatial}d", None)) is not None:
                rules[twin] = rule
    return rules


FUNCTIONS |= {
    **_pools(),
    F.interpolate: _channelwise(F.interpolate, None),
    torch.pixel_shuffle: _channelwise(torch.pixel_shuffle, 2),
    torch.pixel_unshuffle: _channelwise(torch.pixel_unshuffle, 2),
    F.pad: pad,
}
