"""A sample of a model's outputs, and the operation that made them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asynckfold.jobs.columns import Columns
from asynckfold.jobs.objective import OutputSample

MOST_NUMBERS = 4096
"""Numbers to keep of the outputs, at most."""

_SHAPING = (
    *("Alias", "Clone", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose"),
    *("UnsafeView", "Unsqueeze", "View"),
)


def output_sample(outputs: Any, columns: Columns | None = None) -> OutputSample:
    """Return some outputs, and the sigmoid or softmax that made them, if any; trees as columns."""
    if columns is not None:
        return OutputSample(_some(columns.join(outputs)), tree=columns)
    node = outputs.grad_fn
    while node is not None and _operation(node) in _SHAPING and node.next_functions:
        node = node.next_functions[0][0]
    last = "" if node is None else _operation(node)
    return OutputSample(
        _some(outputs), last if last in ("Sigmoid", "Softmax", "LogSoftmax") else ""
    )


def _some(outputs: torch.Tensor) -> npt.NDArray[np.float32]:
    width = max(1, outputs[:1].numel())
    rows: npt.NDArray[np.float32]
    rows = outputs[: max(2, MOST_NUMBERS // width)].detach().float().cpu().numpy()
    return rows


def _operation(node: Any) -> str:
    """Return ``"Sigmoid"`` for a ``SigmoidBackward0``."""
    return re.sub(r"Backward\d+$", "", node.name())
