"""Outputs of the dry run: a sample of them, and what they depend on in evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.data.transforms.trees import tensors_in
from asynckfold.jobs.objective import OutputSample
from asynckfold.jobs.schema import Schema
from asynckfold.training import seeding
from asynckfold.training.calls import outputs_of
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.model_state import StateSnapshot

MOST_NUMBERS = 4096
"""Numbers to keep of the outputs, at most."""

_SHAPING = (
    *("Alias", "Clone", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose"),
    *("UnsafeView", "Unsqueeze", "View"),
)

APART = {"fp32": 1e-3, "bf16": 5e-2}
"""Difference of outputs, relative to their size, from which they count as different. Other batch
sizes round by about 1e-6 in float32 and 4e-3 in bfloat16; batch statistics of 4 instead of 8
samples change outputs by some tenths."""

_BY_BATCH = (
    "in evaluation, its outputs for a sample depend on the other samples of the batch (as with a "
    "BatchNorm without running statistics, or with batch_first=False): scores and predictions hold "
    "for batches of eval_batch_size samples in this order only"
)
_AT_RANDOM = (
    "in evaluation, its outputs are random (as with dropout that ignores eval mode): "
    "scores hold for these random numbers only"
)


def output_sample(outputs: Any, columns: Schema | None = None) -> OutputSample:
    """Return some outputs, and the sigmoid or softmax that made them, if any; trees as columns."""
    if columns is not None:
        return OutputSample(_some(columns.join(outputs)), tree=columns)
    node, name = outputs.grad_fn, ""
    while node is not None:
        # "Sigmoid" for a ``SigmoidBackward0``.
        name = re.sub(r"Backward\d+$", "", node.name())
        node = node.next_functions[0][0] if name in _SHAPING and node.next_functions else None
    return OutputSample(
        _some(outputs), name if name in ("Sigmoid", "Softmax", "LogSoftmax") else ""
    )


def _some(outputs: torch.Tensor) -> npt.NDArray[np.float32]:
    width = max(1, outputs[:1].numel())
    rows: npt.NDArray[np.float32]
    rows = outputs[: max(2, MOST_NUMBERS // width)].detach().float().cpu().numpy()
    return rows


def evaluation_depends_on(
    model: nn.Module,
    samples: torch.Tensor,
    precision: str = "fp32",
    batch: Callable[[torch.Tensor], Any] = torch.clone,
    *,
    changes: bool = False,
) -> str:
    """Say what else the outputs in evaluation depend on; empty if only on their samples.

    Evaluates a copy, and again with another seed, without the outer samples. `batch` makes the
    model's inputs of `samples`; `changes`: an evaluation changes the model, and restores it.

    Examples
    --------
    >>> evaluation_depends_on(nn.BatchNorm1d(3, track_running_stats=False), torch.randn(8, 3))[:67]
    'in evaluation, its outputs for a sample depend on the other samples'
    """

    def outputs_on(part: torch.Tensor, seed: int = 0) -> torch.Tensor:
        seeding.seed_all(seed)
        outputs = tensors_in(outputs_of(twin, batch(part), precision))
        before.restore()
        return torch.cat([item.double().reshape(len(part), -1) for item in outputs], dim=1)

    if len(samples) < 2:
        return ""
    # A model that cannot be copied or evaluated like this gets no verdict here.
    with suppress(Exception), seeding.preserved(), torch.no_grad():
        twin = copied(model).eval()
        before = StateSnapshot(twin, needed=changes)
        whole = outputs_on(samples)
        inner = slice((len(samples) + 2) // 4, -(len(samples) // 4) or None)
        if _differ(whole[inner], outputs_on(samples[inner], 1), precision):
            return _AT_RANDOM if _differ(whole, outputs_on(samples, 1), precision) else _BY_BATCH
    return ""


def _differ(one: torch.Tensor, other: torch.Tensor, precision: str) -> bool:
    if one.shape != other.shape:
        return False
    known = one.isfinite() & other.isfinite()
    size = one[known].abs().max() if known.any() else torch.zeros(())
    return bool(((one - other)[known].abs() > APART[precision] * size).any())
