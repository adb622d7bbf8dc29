"""Functions of torch by simpler ones, which are traced in their place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from asynckfold.training import torch_internals
from asynckfold.training.fusion.layouts import NotFusible


def multihead(
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """``nn.MultiheadAttention``; a causal mask is in `attn_mask`."""
    if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
        raise NotFusible("attention with bias_k, add_zero_attn, kdim or vdim")
    parts, heads = (query, key, value), module.num_heads
    if not module.batch_first:
        parts = tuple(part.transpose(0, 1) for part in parts)
    weights = module.in_proj_weight.chunk(3)
    biases = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projected: list[Any] = [
        F.linear(part, weights[i], None if biases is None else biases[i])
        for i, part in enumerate(parts)
    ]
    query, key, value = (item.unflatten(-1, (heads, -1)).transpose(1, 2) for item in projected)
    # To broadcast with (B, heads, L, S); True in a mask means: not looked at.
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, heads)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    dropout_p = module.dropout if module.training else 0.0
    outputs, shares = _attention(query, key, value, masks, dropout_p)
    # In the memory order of torch's, in which a dropout behind it draws.
    joined = outputs.permute(2, 0, 1, 3).flatten(2)
    outputs = F.linear(joined, module.out_proj.weight, module.out_proj.bias)
    if module.batch_first:
        outputs = outputs.transpose(0, 1)
    if not need_weights:
        return outputs, None
    return outputs, shares.mean(1) if average_attn_weights else shares


def scaled_dot_product(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``F.scaled_dot_product_attention``, in whose masks True means: looked at."""
    if enable_gqa:
        raise NotFusible("attention with grouped queries has no batched form")
    if attn_mask is not None and _example(attn_mask).dtype == torch.bool:
        attn_mask = attn_mask.logical_not()
    masks = [] if attn_mask is None else [attn_mask]
    return _attention(query, key, value, masks, dropout_p, scale, is_causal=is_causal)[0]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    masks: list[Any],
    dropout_p: float,
    scale: float | None = None,
    *,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Return outputs (..., length, features) and attention weights (Vaswani et al. 2017)."""
    factor = 1 / math.sqrt(_example(query).shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-1, -2)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -math.inf)
    for mask in masks:
        hides = _example(mask).dtype == torch.bool
        scores = scores.masked_fill(mask, -math.inf) if hides else scores + mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = F.dropout(weights.contiguous(), dropout_p)
    return weights @ value, weights


def _example(value: Any) -> torch.Tensor:
    example: torch.Tensor = value.node.meta["example"] if isinstance(value, fx.Proxy) else value
    return example


def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """Return ``g * v / |v|``, the norm over all dimensions but one (Salimans & Kingma 2016)."""
    dims = [other for other in range(v.dim()) if dim < 0 or other != dim]
    return v * (g / torch.linalg.vector_norm(v, 2, dims, keepdim=True))


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product,
    torch_internals.weight_norm: weight_norm,
}
"""`nn.MultiheadAttention`, a module, is decomposed by the tracer."""
