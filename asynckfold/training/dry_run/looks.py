"""A sample of a model's outputs, and the operation that made them."""

from __future__ import annotations

import re
from typing import Any

import torch

from asynckfold.jobs.objective import Look

LOOKED_AT = 4096
"""Most numbers of the outputs to keep."""

_SHAPING = (
    *("Alias", "Clone", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose"),
    *("UnsafeView", "Unsqueeze", "View"),
)


def look_at(outputs: torch.Tensor) -> Look:
    """Return some outputs, and the sigmoid or softmax that made them, if any."""
    node = outputs.grad_fn
    while node is not None and _operation(node) in _SHAPING and node.next_functions:
        node = node.next_functions[0][0]
    last = "" if node is None else _operation(node)
    width = max(1, outputs[:1].numel())
    rows = outputs[: max(2, LOOKED_AT // width)].detach().float().cpu().numpy()
    return Look(rows, last if last in ("Sigmoid", "Softmax", "LogSoftmax") else "")


def _operation(node: Any) -> str:
    """Return ``"Sigmoid"`` for a ``SigmoidBackward0``."""
    return re.sub(r"Backward\d+$", "", node.name())
