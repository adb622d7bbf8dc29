"""Matrix products, attention and look-ups: STACKED in and out, one product for all replicas."""

from __future__ import annotations

import math
import operator
import string
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from asynckfold.training import torch_internals
from asynckfold.training.fusion.layouts import Layout, NotFusible, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule
from asynckfold.training.fusion.rules.random import drop
from asynckfold.training.fusion.rules.shapes import mapped


def linear(low: Lowering, input: Value, weight: Value, bias: Value | None = None) -> Emitted:
    """Emit ``input @ weight.T + bias``, the weight as (R, in, out)."""
    if weight.name and low.slots[weight.name].order == (1, 0):
        transposed = low.storage[weight.name]
    else:
        transposed = low.emit_method("transpose", low.stacked(weight), 1, 2)
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


def matmul(low: Lowering, input: Value, other: Value) -> Emitted:
    """Emit a product whose plain factors are vectors, matrices or batches of matrices."""
    if other.rank == 2 and other.layout is not Layout.SHARED and input.rank >= 2:
        return low.on_stacked(affine, input, low.stacked(other), None)
    if input.rank == other.rank >= 2:
        return low.on_stacked(torch.matmul, input, low.stacked(other))
    return mapped(torch.matmul)(low, input, other)


def einsum(low: Lowering, equation: str, *operands: Any) -> Emitted:
    """Give each operand, and the result, one more letter in front."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    equation = equation.replace(" ", "")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    if "->" not in equation or not free:
        raise NotFusible("einsum without an arrow has no batched form")
    terms, result = equation.split("->")
    stacked = ",".join(free[0] + term for term in terms.split(","))
    nodes = [low.stacked(operand) for operand in operands]
    return Layout.STACKED, low.emit(torch.einsum, f"{stacked}->{free[0]}{result}", *nodes)


def embedding(
    low: Lowering,
    input: Value,
    weight: Value,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Emitted:
    """Emit one table of R·V rows, in which each replica's indices are shifted."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotFusible("embedding with max_norm, scale_grad_by_freq or sparse")
    nodes = low.stacked(input), low.stacked(weight)
    return Layout.STACKED, low.emit(_embedding, *nodes, padding_idx)


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


def attention(
    low: Lowering,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Emitted:
    """``F.scaled_dot_product_attention``."""
    if enable_gqa:
        raise NotFusible("attention with grouped queries has no batched form")
    nodes = [low.stacked(item) for item in (query, key, value)]
    mask = None if attn_mask is None else low.aligned(attn_mask, query.rank)
    both = low.emit(_attention, *nodes, mask, dropout_p, is_causal, scale, low.generators)
    return Layout.STACKED, low.emit(operator.getitem, both, 0)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    generators: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (R, ..., length, features) and attention weights (Vaswani et al. 2017)."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-1, -2)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = drop(weights, dropout_p, generators)
    return weights @ value, weights


def multihead(
    low: Lowering,
    path: str,
    module: nn.MultiheadAttention,
    query: Value,
    key: Value,
    value: Value,
    key_padding_mask: Value | None = None,
    need_weights: bool = True,
    attn_mask: Value | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Emitted:
    """``nn.MultiheadAttention``."""
    if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
        raise NotFusible("attention with bias_k, add_zero_attn, kdim or vdim")
    if query.rank != 3:
        raise NotFusible("attention without a batch dimension")
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    weights = [
        None if absent else low.stacked(low.parameter(f"{path}.{name}"))
        for name in names
        for absent in [name.endswith("bias") and module.in_proj_bias is None]
    ]
    masks = _masks(low, attn_mask, key_padding_mask, module.num_heads)
    settings = (
        module.num_heads,
        module.batch_first,
        module.dropout if module.training else 0.0,
        need_weights and average_attn_weights,
    )
    nodes = [low.stacked(item) for item in (query, key, value)]
    return Layout.STACKED, low.emit(
        _multihead, *nodes, weights, masks, low.generators, settings, need_weights
    )


def _multihead(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: list[torch.Tensor | None],
    masks: list[torch.Tensor],
    generators: Any,
    settings: tuple[int, bool, float, bool],
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    heads, batch_first, dropout_p, average = settings
    in_weight, in_bias, out_weight, out_bias = weights
    assert in_weight is not None
    assert out_weight is not None
    parts = [query, key, value] if batch_first else [t.transpose(1, 2) for t in (query, key, value)]
    biases = (None,) * 3 if in_bias is None else in_bias.chunk(3, 1)
    projected = [
        affine(part, weight.transpose(1, 2), bias)
        .reshape(*part.shape[:-1], heads, -1)
        .transpose(2, 3)
        for part, weight, bias in zip(parts, in_weight.chunk(3, 1), biases, strict=True)
    ]
    mask = None
    for one in masks:
        # True in a mask means: not looked at.
        shift = torch.where(one, -math.inf, 0.0).to(query.dtype) if one.dtype == torch.bool else one
        mask = shift if mask is None else mask + shift
    queries, keys, values = projected
    outputs, shares = _attention(queries, keys, values, mask, dropout_p, False, None, generators)
    joined = affine(outputs.transpose(2, 3).flatten(3), out_weight.transpose(1, 2), out_bias)
    outputs = joined if batch_first else joined.transpose(1, 2)
    if not need_weights:
        return outputs, None
    return outputs, shares.mean(2) if average else shares


def _masks(
    low: Lowering, attn_mask: Value | None, key_padding_mask: Value | None, heads: int
) -> list[Any]:
    """Return the nodes of those masks that there are, to broadcast with (R, B, heads, L, S)."""
    masks = []
    if attn_mask is not None and attn_mask.rank == 2:
        masks.append(low.aligned(attn_mask, 4))
    elif attn_mask is not None:
        node = low.aligned(attn_mask, 3)
        masks.append(low.emit(torch.unflatten, node, -3, (-1, heads)))
    if key_padding_mask is not None:
        node = low.aligned(key_padding_mask, 2)
        masks.append(low.emit(_before_keys, node))
    return masks


def _before_keys(mask: torch.Tensor) -> torch.Tensor:
    return mask[..., :, None, None, :]


_PRODUCTS = ("matmul", "mm", "bmm", "mv", "dot")

FUNCTIONS: dict[Any, Rule] = {
    F.linear: linear,
    **{getattr(torch, name): matmul for name in _PRODUCTS},
    operator.matmul: matmul,
    torch.addmm: mapped(torch.addmm),
    torch.einsum: einsum,
    torch.prelu: mapped(torch.prelu),
    F.embedding: embedding,
    F.scaled_dot_product_attention: attention,
}

METHODS: dict[str, Rule] = {
    **dict.fromkeys(_PRODUCTS, matmul),
    "addmm": mapped(torch.addmm),
    "prelu": mapped(torch.prelu),
}

LEAVES: dict[type[nn.Module], Rule] = {nn.MultiheadAttention: multihead}
