"""Convolutions: CHANNELS in, CHANNELS out, one group for each replica.

Channels last in memory, a grouped convolution of small nets was 2 times faster than R plain ones;
in torch's default format it was slower than they are. Images have their gradients by `_Images`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Value
from asynckfold.training.fusion.lowering import Lowering, Rule

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
    ) -> Any:
        if input.rank != spatial + 2:
            return NotImplemented
        of_images = spatial == 2 and not isinstance(padding, str)
        return low.on_channels(
            convolve_images if of_images else function,
            input,
            low.emit(torch.flatten, low.stacked(weight), 0, 1),
            None if bias is None else low.emit(torch.flatten, low.stacked(bias), 0, 1),
            stride,
            padding,
            dilation,
            groups * low.width,
        )

    return convolution


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


def _pooling_rule(function: Any, spatial: int) -> Rule:
    def pooling(low: Lowering, input: Value, *args: Any, **kwargs: Any) -> Any:
        if input.rank != spatial + 2 or kwargs.pop("return_indices", False):
            return NotImplemented
        return low.on_channels(function, input, *args, **kwargs)

    return pooling


CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)

RULES: dict[Any, Rule] = {
    **{function: _rule(function, spatial) for spatial, function in enumerate(CONVOLUTIONS, 1)},
    **{
        getattr(owner, name): _pooling_rule(getattr(F, name), spatial)
        for spatial in (1, 2, 3)
        for kind in ("max_pool", "avg_pool", "adaptive_avg_pool")
        for name in [f"{kind}{spatial}d"]
        for owner in (F, torch)
        if hasattr(owner, name)
    },
}
