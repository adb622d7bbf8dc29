"""Number format of a model's computation: that of its parameters, or bfloat16 by autocast.

`torch.autocast` computes matrix products and convolutions in bfloat16, and what would lose accuracy
in float32. Parameters, gradients and optimizer state keep their format. Outputs are converted back,
so that every loss is computed in float32, in all trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def outputs_of(model: Callable[..., Any], inputs: torch.Tensor, precision: str) -> Any:
    """Return a model's outputs, computed in a number format (`TrainerParams.precision`).

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1)
    >>> outputs_of(layer, torch.ones(3, 2), "bf16").dtype
    torch.float32
    """
    if precision == "fp32":
        return model(inputs)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = model(inputs)
    is_short = isinstance(outputs, torch.Tensor) and outputs.dtype is torch.bfloat16
    return outputs.float() if is_short else outputs
