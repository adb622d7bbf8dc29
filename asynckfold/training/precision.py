"""In which number format a model computes: that of its parameters, or bfloat16 by autocast.

By `torch.autocast`, products and convolutions compute in bfloat16, and what would lose by it in
float32. Parameters, gradients and what the optimizer keeps stay as they are. Outputs are float32
again, so that every loss, the user's own included, is taken in float32, in all trainers alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def outputs_of(model: Callable[..., Any], inputs: torch.Tensor, precision: str) -> Any:
    """Return a model's outputs, computed in a number format.

    Parameters
    ----------
    model : callable
        A module, or several as one.
    inputs : Tensor
        One batch.
    precision : {"fp32", "bf16"}
        Of `TrainerParams`.

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
