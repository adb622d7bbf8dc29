"""Element-wise functions take any layout that all arguments have."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from asynckfold.training.fusion.layouts import Layout, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def elementwise(function: Any) -> Rule:
    """Return the rule of a function or method: CHANNELS where all arguments are, else STACKED."""

    def rule(low: Lowering, *args: Any, **kwargs: Any) -> Emitted:
        kwargs.pop("memory_format", None)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [item for item in leaves if isinstance(item, Value)]
        tensors = [item for item in values if item.is_tensor]
        shapes = {tuple(item.example.shape) for item in tensors if item.rank > 0}
        if len(shapes) == 1 and all(item.layout is Layout.CHANNELS for item in tensors):
            layout, nodes = Layout.CHANNELS, {item: low.channels(item) for item in tensors}
        else:
            rank = max(item.rank for item in tensors)
            layout, nodes = Layout.STACKED, {item: low.aligned(item, rank) for item in tensors}
        args, kwargs = pytree.tree_unflatten(
            [nodes.get(item, item) if isinstance(item, Value) else item for item in leaves], spec
        )
        return layout, low.emit(function, *args, **kwargs)

    return rule


def same(low: Lowering, input: Value, *args: Any, **kwargs: Any) -> Emitted:
    """Return the value: the function changes at most its memory layout."""
    return input.layout, input.node


# One table for functions and methods, which mean the same under one name.
_NAMES = """
abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min clone cos
div eq erf exp expm1 floor ge gt isfinite isnan le lerp log log1p logical_and logical_not logical_or
lt masked_fill maximum minimum mul ne neg pow reciprocal round rsqrt sigmoid sign sin sqrt square
sub tan tanh true_divide where detach float double half bfloat16 long int bool to type_as zeros_like
ones_like full_like relu celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu
logsigmoid mish relu6 selu silu softplus softshrink softsign tanhshrink threshold _threshold
and_ invert mod or_ truediv
"""

RULES: dict[Any, Rule] = {
    **{
        getattr(owner, name): elementwise(getattr(owner, name))
        for owner in (torch, F, operator)
        for name in _NAMES.split()
        if callable(getattr(owner, name, None))
    },
    **{name: elementwise(name) for name in _NAMES.split() if hasattr(torch.Tensor, name)},
    "contiguous": same,
    "requires_grad": same,
}
