"""Functions along dimensions: sums, extremes, softmax, cumulative sums. STACKED."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Layout, NotFusible, Value, axes, axis
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule
from asynckfold.training.fusion.rules.elementwise import of_function

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

FUNCTIONS: dict[Any, Rule] = {
    **{getattr(torch, name): rule for name, rule in _BOTH.items()},
    F.softmax: partial(softmax, torch.softmax),
    F.log_softmax: partial(softmax, torch.log_softmax),
    F.glu: _along(F.glu, -1),
    torch.linalg.vector_norm: vector_norm,
    torch.linalg.norm: vector_norm,
}

METHODS: dict[str, Rule] = dict(_BOTH)
