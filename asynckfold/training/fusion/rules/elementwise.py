"""Element-wise functions take any layout that all arguments have."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from asynckfold.training.fusion.layouts import Layout, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule, per_replica


def elementwise(call: Callable[..., Any], low: Lowering, *args: Any, **kwargs: Any) -> Emitted:
    """Emit ``call(args)``: CHANNELS where all arguments are, else STACKED and aligned."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [item for item in leaves if isinstance(item, Value) and item.is_tensor]
    shapes = {tuple(item.example.shape) for item in tensors if item.rank > 0}
    folded = all(item.layout is Layout.CHANNELS for item in per_replica(leaves))
    if folded and len(shapes) == 1 and len(per_replica(leaves)) == len(tensors):
        layout, convert = Layout.CHANNELS, low.channels
    else:
        rank = max(item.rank for item in tensors)
        layout, convert = Layout.STACKED, lambda value: low.aligned(value, rank)
    nodes = [convert(item) if item in tensors else item for item in leaves]
    args, kwargs = pytree.tree_unflatten(nodes, spec)
    return layout, call(*args, **kwargs)


def of_function(function: Callable[..., Any]) -> Rule:
    """Return the rule of an element-wise function."""

    def rule(low: Lowering, *args: Any, **kwargs: Any) -> Emitted:
        return elementwise(lambda *a, **k: low.emit(function, *a, **k), low, *args, **kwargs)

    return rule


def of_method(name: str) -> Rule:
    """Return the rule of an element-wise method of tensors."""

    def rule(low: Lowering, *args: Any, **kwargs: Any) -> Emitted:
        kwargs.pop("memory_format", None)
        return elementwise(lambda *a, **k: low.emit_method(name, *a, **k), low, *args, **kwargs)

    return rule


def same(low: Lowering, input: Value, *args: Any, **kwargs: Any) -> Emitted:
    """Return the value: the function changes at most its memory layout."""
    return input.layout, input.node


def assigned(low: Lowering, input: Value, value: Any) -> Emitted:
    """Emit the result of ``copy_`` and ``fill_``."""
    return of_function(_assigned)(low, input, value)


def _assigned(x: torch.Tensor, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full_like(x, value)
    return value.to(x.dtype).expand_as(x)


# One table for functions and methods, which mean the same under one name.
_NAMES = """
abs add addcdiv addcmul atan atan2 bitwise_and bitwise_not bitwise_or ceil clamp clamp_max
clamp_min clip clone cos cosh deg2rad div eq erf erfc exp exp2 expm1 floor floor_divide fmod frac ge
gt isfinite isinf isnan le lerp log log10 log1p log2 logical_and logical_not logical_or logical_xor
logit lt masked_fill maximum minimum mul nan_to_num ne neg pow reciprocal remainder round rsqrt
sigmoid sign sin sinc sinh sqrt square sub tan tanh true_divide trunc where xlogy
detach float double half bfloat16 long int bool type_as zeros_like ones_like full_like
relu heaviside hypot asin acos asinh acosh atanh
"""

_ACTIVATIONS = """
celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu
sigmoid silu softplus softshrink softsign tanh tanhshrink threshold _threshold
"""

_OPERATORS = """
abs add and_ eq floordiv ge gt invert le lt mod mul ne neg or_ pos pow sub truediv xor
"""

FUNCTIONS: dict[Any, Rule] = {
    **{
        getattr(torch, name): of_function(getattr(torch, name))
        for name in _NAMES.split()
        if hasattr(torch, name)
    },
    **{
        getattr(F, name): of_function(getattr(F, name))
        for name in _ACTIVATIONS.split()
        if hasattr(F, name)
    },
    **{
        getattr(operator, name): of_function(getattr(operator, name)) for name in _OPERATORS.split()
    },
    torch.selu: of_function(torch.selu),
    torch.celu: of_function(torch.celu),
}

METHODS: dict[str, Rule] = {
    **{name: of_method(name) for name in _NAMES.split() if hasattr(torch.Tensor, name)},
    "to": of_method("to"),
    "contiguous": same,
    "requires_grad": same,
    "copy": assigned,
    "fill": assigned,
    "zero": lambda low, input: assigned(low, input, 0),
}

_SAME_TYPE = "bfloat16 bool contiguous detach double float half int long requires_grad to type_as"
ALIASES = frozenset(_SAME_TYPE.split())
