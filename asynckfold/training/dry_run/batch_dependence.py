"""Whether a model's outputs in evaluation depend on more than the sample itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from asynckfold.data.transforms import tensors_in
from asynckfold.training import seeding
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.model_state import Kept
from asynckfold.training.precision import outputs_of

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


def _as_it_is(samples: torch.Tensor) -> Any:
    return samples


def evaluation_depends_on(
    model: nn.Module,
    inputs: torch.Tensor,
    precision: str = "fp32",
    batch: Callable[[torch.Tensor], Any] = _as_it_is,
    *,
    changes: bool = False,
) -> str:
    """Say what else the outputs in evaluation depend on; empty if only on their samples.

    Evaluates a copy of the model again with another seed, in halves of the batch, and in reverse
    order. `batch` makes the model's inputs of what are samples here; `changes`: an evaluation
    changes the model, and restores it.

    Examples
    --------
    >>> evaluation_depends_on(nn.BatchNorm1d(3, track_running_stats=False), torch.randn(8, 3))[:67]
    'in evaluation, its outputs for a sample depend on the other samples'
    """
    half = len(inputs) // 2
    if not half:
        return ""
    # A model that cannot be copied or evaluated like this gets no verdict here.
    try:
        with seeding.preserved(), torch.no_grad():
            twin = copied(model).eval()
            kept = Kept(twin, needed=changes)

            def outputs_on(part: torch.Tensor, seed: int = 0) -> torch.Tensor:
                seeding.seed_all(seed)
                outputs = outputs_of(twin, batch(part.clone()), precision)
                kept.restore()
                if isinstance(outputs, list) and len(outputs) == len(part):
                    return pad_sequence([_row(sample) for sample in outputs], batch_first=True)
                parts = [item.double().reshape(len(item), -1) for item in tensors_in(outputs)]
                return torch.cat(parts, dim=1)

            whole = outputs_on(inputs)
            if _differ(whole, outputs_on(inputs, 1), precision):
                return _AT_RANDOM
            halves = torch.cat([outputs_on(inputs[:half]), outputs_on(inputs[half:])])
            others = halves, outputs_on(inputs.flip(0)).flip(0)
            if any(_differ(whole, other, precision) for other in others):
                return _BY_BATCH
    except Exception:  # noqa: BLE001
        return ""
    return ""


def _row(sample: Any) -> torch.Tensor:
    """Return all numbers of the outputs of one sample."""
    return torch.cat([item.double().flatten() for item in tensors_in(sample)])


def _differ(one: torch.Tensor, other: torch.Tensor, precision: str) -> bool:
    if one.shape != other.shape:
        return False
    known = one.isfinite() & other.isfinite()
    size = one[known].abs().max() if known.any() else torch.zeros(())
    return bool(((one - other)[known].abs() > APART[precision] * size).any())
