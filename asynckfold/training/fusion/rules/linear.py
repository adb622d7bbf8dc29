"""Matrix products and look-ups: STACKED in and out, one product for all replicas."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training import torch_internals
from asynckfold.training.fusion.layouts import Layout, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def linear(low: Lowering, input: Value, weight: Value, bias: Value | None = None) -> Emitted:
    """Emit ``input @ weight.T + bias``, the weight as (R, in, out)."""
    if weight.name and low.slots[weight.name].order == (1, 0):
        transposed = low.storage[weight.name]
    else:
        transposed = low.emit("transpose", low.stacked(weight), 1, 2)
    shift = None if bias is None else low.stacked(bias)
    return low.on_stacked(affine, input, transposed, shift)


def affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight + bias`` for x (R, ..., in), weight (R, in, out), bias (R, out)."""
    rows = x if x.dim() == 3 else x.reshape(x.shape[0], -1, x.shape[-1])
    if bias is None:
        product = torch.bmm(rows, weight)
    else:
        product = torch.baddbmm(bias.unsqueeze(1), rows, weight)
    return product if x.dim() == 3 else product.reshape(*x.shape[:-1], product.shape[-1])


def matmul(low: Lowering, input: Value, other: Value) -> Any:
    """Emit a product whose plain factors are matrices or batches of matrices."""
    if other.rank == 2 and other.layout is not Layout.SHARED and input.rank >= 2:
        return low.on_stacked(affine, input, low.stacked(other), None)
    if input.rank == other.rank >= 2:
        return low.on_stacked(torch.matmul, input, low.stacked(other))
    return NotImplemented


def embedding(
    low: Lowering,
    input: Value,
    weight: Value,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Emit one table of R·V rows, in which each replica's indices are shifted."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    return low.on_stacked(_embedding, input, low.stacked(weight), padding_idx)


def _embedding(
    indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None
) -> torch.Tensor:
    width, rows = weight.shape[:2]
    # Beyond the table there is the next replica's, not an error.
    inside = ((indices >= 0) & (indices < rows)).all()
    torch_internals.assert_async(inside, "index out of range in an embedding")
    first = torch.arange(0, width * rows, rows, device=indices.device)
    shifted = indices + first.view(-1, *(1,) * (indices.dim() - 1))
    vectors = F.embedding(shifted, weight.flatten(0, 1))
    if padding_idx is None:
        return vectors
    is_padding = (indices == padding_idx % rows).unsqueeze(-1)
    return torch.where(is_padding, vectors.detach(), vectors)


_PRODUCTS = ("matmul", "mm", "bmm")

RULES: dict[Any, Rule] = {
    F.linear: linear,
    operator.matmul: matmul,
    **dict.fromkeys(_PRODUCTS, matmul),
    **{getattr(torch, name): matmul for name in _PRODUCTS},
    F.embedding: embedding,
}
