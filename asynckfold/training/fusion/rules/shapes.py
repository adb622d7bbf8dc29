"""Functions that move, join or reduce elements: STACKED, with every dimension shifted by one."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Layout, Value, align
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def axes(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the stacked dimensions of plain dimensions; None means all."""
    if dims is None:
        return tuple(range(1, rank + 1))
    return tuple(d + 1 if d >= 0 else d for d in ((dims,) if isinstance(dims, int) else dims))


def shifted(function: Callable[..., Any], place: int, default: int | None = None) -> Rule:
    """Return the rule of a function of one or several tensors with ``dim`` as argument `place`."""

    def rule(low: Lowering, input: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.pop("dim", args[place] if len(args) > place else default)
        if not isinstance(dim, int):
            return NotImplemented
        nodes = low.stacked(input) if isinstance(input, Value) else [*map(low.stacked, input)]
        (dim,), before = axes(dim, 0), args[:place]
        return Layout.STACKED, low.emit(function, nodes, *before, dim=dim, **kwargs)

    return rule


def reducing(function: Callable[..., Any]) -> Rule:
    """Return the rule of a function that reduces one, several or all plain dimensions."""

    def rule(low: Lowering, input: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Emitted:
        if input.rank == 0:
            return Layout.STACKED, low.stacked(input)
        return low.on_stacked(function, input, axes(dim, input.rank), *args, **kwargs)

    return rule


def _sizes(sizes: Sequence[Any]) -> Any:
    """Return sizes that may come one by one, or as one sequence, or as the shape of a tensor."""
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)


def size(low: Lowering, input: Value, dim: int | None = None) -> Emitted:
    """The shape that the plain model sees, which is a Python value and the same for all."""
    shape = low.emit(_plain_shape, low.stacked(input))
    return Layout.SHARED, shape if dim is None else low.emit(operator.getitem, shape, dim)


def _plain_shape(stacked: torch.Tensor) -> torch.Size:
    return stacked.shape[1:]


def attribute(low: Lowering, input: Value, name: str) -> Any:
    """``x.shape``."""
    return size(low, input) if name == "shape" else NotImplemented


def reshape(low: Lowering, input: Value, *shape: Any) -> Any:
    """``view`` and ``reshape``; the memory may lie otherwise than the plain model's."""
    sizes = _sizes(shape)
    if isinstance(sizes, torch.dtype):
        return NotImplemented
    return low.on_stacked(_reshape, input, sizes)


def _reshape(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return x.reshape(x.shape[0], *sizes)


def flatten(low: Lowering, input: Value, start_dim: int = 0, end_dim: int = -1) -> Emitted:
    """Merge dimensions; a number becomes a vector."""
    if input.rank == 0:
        return low.on_stacked(align, input, 1)
    return low.on_stacked(torch.flatten, input, *axes((start_dim, end_dim), input.rank))


def permute(low: Lowering, input: Value, *dims: Any) -> Emitted:
    """Reorder the dimensions behind the replica."""
    order = axes(tuple(d % input.rank for d in _sizes(dims)), input.rank)
    return low.on_stacked(torch.permute, input, (0, *order))


def transpose(low: Lowering, input: Value, dim0: int, dim1: int) -> Emitted:
    """Exchange two dimensions."""
    return low.on_stacked(torch.transpose, input, *axes((dim0, dim1), input.rank))


def getitem(low: Lowering, input: Value, index: Any) -> Any:
    """Index behind the replica; an entry of a tuple of tensors as it is."""
    if not input.is_tensor:
        return input.layout, low.emit(operator.getitem, input.node, index)
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, Value) and item.is_tensor for item in indices):
        return NotImplemented
    return low.on_stacked(_getitem, input, indices)


def _getitem(x: torch.Tensor, indices: tuple[Any, ...]) -> torch.Tensor:
    index = (slice(None), *indices)
    return x[index]


_BY_NAME: dict[str, Rule] = {
    "reshape": reshape,
    "flatten": flatten,
    "permute": permute,
    "transpose": transpose,
    "unsqueeze": shifted(torch.unsqueeze, 0),
    "chunk": shifted(torch.chunk, 1, 0),
    "split": shifted(torch.split, 1, 0),
    "softmax": shifted(torch.softmax, 0),
    "log_softmax": shifted(torch.log_softmax, 0),
    "mean": reducing(torch.mean),
    "sum": reducing(torch.sum),
    "amax": reducing(torch.amax),
}

RULES: dict[Any, Rule] = {
    **_BY_NAME,
    **{getattr(torch, name): rule for name, rule in _BY_NAME.items()},
    torch.cat: shifted(torch.cat, 0, 0),
    torch.stack: shifted(torch.stack, 0, 0),
    F.softmax: shifted(F.softmax, 0),
    F.log_softmax: shifted(F.log_softmax, 0),
    builtins.getattr: attribute,
    operator.getitem: getitem,
    "view": reshape,
    "size": size,
}
