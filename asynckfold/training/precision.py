"""Number format of a model's computation.

=====  ==========================================================================================
fp32   that of the parameters, with the settings of torch in the caller's process
tf32   the same; GPUs round the inputs of matrix products and convolutions to TF32
bf16   matrix products and convolutions in bfloat16, by `torch.autocast`
fp16   the same in float16: losses are scaled, so that small gradients do not become 0
=====  ==========================================================================================

Autocast computes in float32 what would lose accuracy. Parameters, gradients and optimizer state
keep their format. Outputs are converted back, so that every loss is computed in float32, in all
trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from asynckfold.data.transforms import mapped, tensors_in
from asynckfold.training.calls import call_model

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def outputs_of(model: Callable[..., Any], inputs: Any, precision: str) -> Any:
    """Return a model's outputs, computed in a number format (`TrainerParams.precision`).

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1)
    >>> outputs_of(layer, torch.ones(3, 2), "bf16").dtype
    torch.float32
    """
    dtype = AUTOCAST.get(precision)
    if dtype is None:
        return call_model(model, inputs)
    with torch.autocast(_device(inputs).type, dtype):
        outputs = call_model(model, inputs)
    return in_float32(outputs, dtype)


def in_float32(outputs: Any, dtype: torch.dtype) -> Any:
    """Return outputs, a tensor or a tree of tensors, with those of `dtype` in float32."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype is dtype else outputs
    return mapped(lambda item: item.float() if item.dtype is dtype else item, outputs)


def _device(inputs: Any) -> torch.device:
    return next((item.device for item in tensors_in(inputs)), torch.device("cpu"))


def scaler_of(
    precision: str, device: torch.device, optimizer: torch.optim.Optimizer
) -> GradScaler | None:
    """Return a scaler of losses for float16; None for other formats."""
    if precision != "fp16":
        return None
    if isinstance(optimizer, torch.optim.SGD):
        # Its fused kernel leaves the momentum uninitialised if it leaves out the first step.
        optimizer._step_supports_amp_scaling = False
    return GradScaler(device.type)


def step(optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> None:
    """Take a step; with a scaler, leave it out if a gradient overflowed, and adapt the scale."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
