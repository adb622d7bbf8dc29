"""Element-wise functions take any layout that all arguments have; reductions keep the replica."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from asynckfold.training.fusion.layouts import Layout, NotFusible, Value, axes, axis
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


def prelu(low: Lowering, input: Value, weight: Value) -> Emitted:
    """One slope for all elements, or one for each channel."""
    x = low.stacked(input)
    return Layout.STACKED, low.emit(_prelu, x, low.stacked(weight))


def _prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    slope = weight.reshape(weight.shape[0], 1, -1, *(1,) * (x.dim() - 3)) if x.dim() > 2 else weight
    return torch.where(x > 0, x, slope * x)


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
    torch.prelu: prelu,
    F.prelu: prelu,
    torch.selu: of_function(torch.selu),
    torch.celu: of_function(torch.celu),
}

METHODS: dict[str, Rule] = {
    **{name: of_method(name) for name in _NAMES.split() if hasattr(torch.Tensor, name)},
    "to": of_method("to"),
    "contiguous": same,
    "requires_grad": same,
    "prelu": prelu,
    "copy": assigned,
    "fill": assigned,
    "zero": lambda low, input: assigned(low, input, 0),
}

_SAME_TYPE = "bfloat16 bool contiguous detach double float half int long requires_grad to type_as"
ALIASES = frozenset(_SAME_TYPE.split())


Dims = int | Sequence[int] | None


def _over(function: Callable[..., Any]) -> Rule:
    """Return the rule of a function that reduces one, several or all plain dimensions."""

    def reduction(
        low: Lowering, input: Value, dim: Dims = None, keepdim: bool = False, **kwargs: Any
    ) -> Emitted:
        if input.rank == 0:
            return Layout.STACKED, low.stacked(input)
        dims = axes(dim, input.rank)
        return low.on_stacked(function, input, dims, keepdim=keepdim, **kwargs)

    return reduction


def _spread(function: Callable[..., Any]) -> Rule:
    """Return the rule of ``var`` and ``std``."""

    def reduction(
        low: Lowering,
        input: Value,
        dim: Dims | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: int | None = None,
    ) -> Emitted:
        if isinstance(dim, bool):
            unbiased, dim = dim, None
        settings = {"keepdim": keepdim, "correction": int(unbiased)}
        if correction is not None:
            settings["correction"] = correction
        node = low.emit(function, low.stacked(input), axes(dim, input.rank), **settings)
        return Layout.STACKED, node

    return reduction


def _extreme(name: str) -> Rule:
    """Return the rule of ``max`` and ``min``: of all, along a dimension, or of two tensors."""
    both = getattr(torch, f"{name}imum")
    of_all = _over(getattr(torch, f"a{name}"))

    def extreme(low: Lowering, input: Value, dim: Any = None, keepdim: bool = False) -> Emitted:
        if isinstance(dim, Value):
            return of_function(both)(low, input, dim)
        if dim is None:
            return of_all(low, input)
        node = low.emit(getattr(torch, name), low.stacked(input), axis(dim), keepdim)
        return Layout.STACKED, node

    return extreme


def _along(function: Callable[..., Any], default: int | None = None) -> Rule:
    """Return the rule of a function that works along one dimension."""

    def along(
        low: Lowering, input: Value, dim: int | None = default, *args: Any, **kwargs: Any
    ) -> Emitted:
        if dim is None:
            raise NotFusible("a function along a dimension that is not given")
        kwargs.pop("_stacklevel", None)
        return low.on_stacked(function, input, axis(dim), *args, **kwargs)

    return along


def softmax(
    function: Callable[..., Any],
    low: Lowering,
    input: Value,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: Any = None,
) -> Emitted:
    """``F.softmax`` and its like."""
    return _along(function)(low, input, dim, dtype=dtype)


def norm(
    low: Lowering, input: Value, p: Any = 2, dim: Dims = None, keepdim: bool = False
) -> Emitted:
    """``x.norm``."""
    if isinstance(p, str):
        raise NotFusible(f"norm of kind {p} has no batched form")
    return vector_norm(low, input, p, dim, keepdim)


def vector_norm(
    low: Lowering, x: Value, ord: Any = 2, dim: Dims = None, keepdim: bool = False
) -> Emitted:
    """``torch.linalg.vector_norm``."""
    return low.on_stacked(torch.linalg.vector_norm, x, ord, axes(dim, x.rank), keepdim)


_BOTH: dict[str, Rule] = {
    "mean": _over(torch.mean),
    "sum": _over(torch.sum),
    "amax": _over(torch.amax),
    "amin": _over(torch.amin),
    "logsumexp": _over(torch.logsumexp),
    "var": _spread(torch.var),
    "std": _spread(torch.std),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "argmax": _along(torch.argmax),
    "argmin": _along(torch.argmin),
    "cumsum": _along(torch.cumsum),
    "cumprod": _along(torch.cumprod),
    "softmax": _along(torch.softmax),
    "log_softmax": _along(torch.log_softmax),
    "norm": norm,
}

FUNCTIONS |= {
    **{getattr(torch, name): rule for name, rule in _BOTH.items()},
    F.softmax: partial(softmax, torch.softmax),
    F.log_softmax: partial(softmax, torch.log_softmax),
    F.glu: _along(F.glu, -1),
    torch.linalg.vector_norm: vector_norm,
    torch.linalg.norm: vector_norm,
}

METHODS |= _BOTH
