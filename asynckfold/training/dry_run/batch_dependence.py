"""Whether what a model says of a sample, when it is evaluated, depends on more than the sample."""

from __future__ import annotations

import torch
from torch import nn

from asynckfold.training import seeding
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.precision import outputs_of

APART = {"fp32": 1e-3, "bf16": 5e-2}
"""Difference of outputs, as a share of their size, from which they are not taken as equal. Batches
of other sizes round by about 1e-6 in float32 and 4e-3 in bfloat16; statistics of 4 in place of 8
samples change outputs by some tenths."""

_BY_BATCH = (
    "in evaluation, its outputs for a sample depend on the other samples of the batch (as with a "
    "BatchNorm without running statistics, or with batch_first=False): scores and predictions hold "
    "for batches of eval_batch_size samples in this order only"
)
_AT_RANDOM = (
    "in evaluation, its outputs are random (as with dropout that is on whatever the mode is): "
    "scores hold for these random numbers only"
)


def evaluation_depends_on(model: nn.Module, inputs: torch.Tensor, precision: str = "fp32") -> str:
    """Say on what else outputs in evaluation depend; empty where on their samples only.

    The outputs of some samples are compared with those of the same samples under other random
    numbers, in half of the batch, and in the reverse order. The model itself is left as it is.

    Parameters
    ----------
    model : nn.Module
        It is copied.
    inputs : Tensor of shape (n, ...)
        Some samples.
    precision : {"fp32", "bf16"}
        In which it computes.

    Examples
    --------
    >>> samples = torch.randn(8, 3)
    >>> evaluation_depends_on(nn.BatchNorm1d(3), samples)
    ''
    >>> evaluation_depends_on(nn.BatchNorm1d(3, track_running_stats=False), samples)[:67]
    'in evaluation, its outputs for a sample depend on the other samples'
    """
    half = len(inputs) // 2
    if not half:
        return ""
    # What cannot be copied or evaluated so fails, or does not, by itself.
    try:
        with seeding.preserved(), torch.no_grad():
            twin = copied(model).eval()

            def said(part: torch.Tensor, seed: int = 0) -> torch.Tensor:
                seeding.seed_all(seed)
                outputs: torch.Tensor = outputs_of(twin, part.clone(), precision)
                return outputs.double()

            whole = said(inputs)
            if _apart(whole, said(inputs, 1), precision):
                return _AT_RANDOM
            halves = torch.cat([said(inputs[:half]), said(inputs[half:])])
            others = halves, said(inputs.flip(0)).flip(0)
            if any(_apart(whole, other, precision) for other in others):
                return _BY_BATCH
    except Exception:  # noqa: BLE001
        return ""
    return ""


def _apart(one: torch.Tensor, other: torch.Tensor, precision: str) -> bool:
    if one.shape != other.shape:
        return False
    known = one.isfinite() & other.isfinite()
    size = one[known].abs().max() if known.any() else torch.zeros(())
    return bool(((one - other)[known].abs() > APART[precision] * size).any())
