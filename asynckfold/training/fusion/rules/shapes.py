"""Functions that only move elements: STACKED, with every dimension shifted by one."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import (
    Layout,
    NotFusible,
    Value,
    align,
    axes,
    axis,
    plain_shape,
)
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule, per_replica


def _sizes(given: Sequence[Any]) -> Any:
    """Return sizes that may come one by one, or as one sequence, or as the shape of a tensor."""
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else list(given)


def size(low: Lowering, input: Value, dim: int | None = None) -> Emitted:
    """The shape that the plain model sees, which is a Python value and the same for all."""
    shape = low.emit(plain_shape, low.stacked(input))
    return Layout.SHARED, shape if dim is None else low.emit(operator.getitem, shape, dim)


def attribute(low: Lowering, input: Value, name: str) -> Emitted:
    """``x.shape`` and its like."""
    if name == "shape":
        return size(low, input)
    if name in ("T", "mT") and input.rank == 2:
        return transpose(low, input, 0, 1)
    if name == "mT":
        return transpose(low, input, -1, -2)
    if name in ("device", "dtype"):
        return Layout.SHARED, low.emit(builtins.getattr, low.stacked(input), name)
    raise NotFusible(f"attribute {name} of a tensor has no batched form")


def reshape(low: Lowering, input: Value, *shape: Any) -> Emitted:
    """``view`` and ``reshape``; the memory may lie otherwise than the plain model's."""
    sizes = _sizes(shape)
    if isinstance(sizes, torch.dtype):
        raise NotFusible("view as another dtype has no batched form")
    return low.on_stacked(_reshape, input, sizes)


def _reshape(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return x.reshape(x.shape[0], *sizes)


def view_as(low: Lowering, input: Value, other: Value) -> Emitted:
    """Take the shape of another value."""
    shape = low.emit(plain_shape, low.stacked(other))
    return low.on_stacked(_reshape, input, shape)


def flatten(low: Lowering, input: Value, start_dim: int = 0, end_dim: int = -1) -> Emitted:
    """Merge dimensions; a number becomes a vector."""
    if input.rank == 0:
        return low.on_stacked(align, input, 1)
    dims = axis(start_dim), axis(end_dim)
    return low.on_stacked(torch.flatten, input, *dims)


def permute(low: Lowering, input: Value, *dims: Any) -> Emitted:
    """Reorder the dimensions behind the replica."""
    order = axes(tuple(d % input.rank for d in _sizes(dims)), input.rank)
    return low.on_stacked(torch.permute, input, (0, *order))


def transpose(low: Lowering, input: Value, dim0: int = 0, dim1: int = 1) -> Emitted:
    """Exchange two dimensions; ``t()`` without any."""
    return low.on_stacked(torch.transpose, input, axis(dim0), axis(dim1))


def squeeze(low: Lowering, input: Value, dim: int | Sequence[int] | None = None) -> Emitted:
    """Drop dimensions of one, never the replica's."""
    dims = axes(dim, input.rank)
    return low.on_stacked(torch.squeeze, input, dims)


def expand(low: Lowering, input: Value, *sizes: Any) -> Emitted:
    """Repeat without copying; may add dimensions in front of the plain ones."""
    return low.on_stacked(_expand, input, _sizes(sizes))


def _expand(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return align(x, len(sizes)).expand(-1, *sizes)


def expand_as(low: Lowering, input: Value, other: Value) -> Emitted:
    """Repeat up to the shape of another."""
    shape = low.emit(plain_shape, low.stacked(other))
    return low.on_stacked(_expand, input, shape)


def repeat(low: Lowering, input: Value, *sizes: Any) -> Emitted:
    """Repeat with copying."""
    return low.on_stacked(_repeat, input, _sizes(sizes))


def _repeat(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return align(x, len(sizes)).repeat(1, *sizes)


def getitem(low: Lowering, input: Value, index: Any) -> Emitted:
    """Index behind the replica; an entry of a tuple of tensors as it is."""
    if not input.is_tensor:
        return input.layout, low.emit(operator.getitem, input.node, index)
    return low.on_stacked(_getitem, input, _indices(index))


def _indices(index: Any) -> tuple[Any, ...]:
    indices = index if isinstance(index, tuple) else (index,)
    if per_replica(indices):
        raise NotFusible("an index that differs between replicas has no batched form")
    if sum(isinstance(item, Value) and item.is_tensor for item in indices) > 1:
        raise NotFusible("more than one index tensor has no batched form")
    return indices


def _getitem(x: torch.Tensor, indices: tuple[Any, ...]) -> torch.Tensor:
    index = (slice(None), *indices)
    return x[index]


def setitem(low: Lowering, input: Value, index: Any, value: Any) -> Emitted:
    """A copy in which some elements are replaced."""
    indices = _indices(index)
    if any(isinstance(item, Value) for item in indices):
        raise NotFusible("assignment at computed indices has no batched form")
    if isinstance(value, Value) and value.is_tensor:
        value = low.aligned(value, max(value.rank, input.example[indices].dim()))
    return low.on_stacked(_setitem, input, indices, value)


def _setitem(x: torch.Tensor, indices: tuple[Any, ...], value: Any) -> torch.Tensor:
    changed = x.clone()
    index = (slice(None), *indices)
    changed[index] = value
    return changed


def _joining(function: Callable[..., Any]) -> Rule:
    def join(low: Lowering, tensors: Sequence[Value], dim: int = 0) -> Emitted:
        return Layout.STACKED, low.emit(function, [low.stacked(t) for t in tensors], axis(dim))

    return join


def _with_dim(function: Callable[..., Any], default: int | None = None) -> Rule:
    """Return the rule of a function (input, setting, dim)."""

    def rule(low: Lowering, input: Value, setting: Any, dim: int | None = default) -> Emitted:
        if dim is None:
            raise NotFusible("a function without dim has no batched form")
        return low.on_stacked(function, input, setting, axis(dim))

    return rule


def _dim_first(function: Callable[..., Any], default: int | None = None) -> Rule:
    """Return the rule of a function (input, dim, settings)."""

    def rule(low: Lowering, input: Value, dim: int | None = default, *settings: Any) -> Emitted:
        if dim is None:
            raise NotFusible("a function without dim has no batched form")
        return low.on_stacked(function, input, axis(dim), *settings)

    return rule


def unflatten(low: Lowering, input: Value, dim: int, sizes: Any) -> Emitted:
    """Divide a dimension."""
    return low.on_stacked(torch.unflatten, input, axis(dim), sizes)


def split(low: Lowering, tensor: Value, split_size_or_sections: Any, dim: int = 0) -> Emitted:
    """Cut into pieces of given sizes."""
    sizes = split_size_or_sections
    return low.on_stacked(torch.split, tensor, sizes, axis(dim))


def movedim(low: Lowering, input: Value, source: Any, destination: Any) -> Emitted:
    """Move dimensions."""
    ways = axes(source, input.rank), axes(destination, input.rank)
    return low.on_stacked(torch.movedim, input, *ways)


def flip(low: Lowering, input: Value, *dims: Any) -> Emitted:
    """Reverse dimensions."""
    return low.on_stacked(torch.flip, input, axes(_sizes(dims), input.rank))


def rolled(low: Lowering, input: Value, shifts: Any, dims: Any) -> Emitted:
    """Rotate along dimensions."""
    return low.on_stacked(torch.roll, input, shifts, axes(dims, input.rank))


def one_hot(low: Lowering, input: Value, num_classes: int) -> Emitted:
    """One more dimension behind, of a size that is given."""
    return low.on_stacked(F.one_hot, input, num_classes)


def new(name: str) -> Rule:
    """Return the rule of ``x.new_zeros`` and its like: a tensor for all replicas."""

    def rule(low: Lowering, input: Value, *args: Any, **kwargs: Any) -> Emitted:
        return Layout.SHARED, low.emit_method(name, low.stacked(input), *args, **kwargs)

    return rule


_BOTH: dict[str, Rule] = {
    "reshape": reshape,
    "flatten": flatten,
    "permute": permute,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "t": transpose,
    "squeeze": squeeze,
    "unsqueeze": _dim_first(torch.unsqueeze),
    "unflatten": unflatten,
    "movedim": movedim,
    "flip": flip,
    "roll": rolled,
    "chunk": _with_dim(torch.chunk, 0),
    "tensor_split": _with_dim(torch.tensor_split, 0),
    "unbind": _dim_first(torch.unbind, 0),
    "narrow": _dim_first(torch.narrow),
    "select": _dim_first(torch.select),
    "index_select": _dim_first(torch.index_select),
    "tril": lambda low, input, diagonal=0: (
        Layout.STACKED,
        low.emit(torch.tril, low.stacked(input), diagonal),
    ),
    "triu": lambda low, input, diagonal=0: (
        Layout.STACKED,
        low.emit(torch.triu, low.stacked(input), diagonal),
    ),
}

FUNCTIONS: dict[Any, Rule] = {
    **{getattr(torch, name): rule for name, rule in _BOTH.items()},
    torch.cat: _joining(torch.cat),
    torch.concat: _joining(torch.cat),
    torch.stack: _joining(torch.stack),
    torch.split: split,
    F.one_hot: one_hot,
    builtins.getattr: attribute,
    operator.getitem: getitem,
    operator.setitem: setitem,
}

METHODS: dict[str, Rule] = {
    **_BOTH,
    "view": reshape,
    "view_as": view_as,
    "reshape_as": view_as,
    "expand": expand,
    "expand_as": expand_as,
    "repeat": repeat,
    "split": lambda low, input, split_size, dim=0: split(low, input, split_size, dim),
    "size": size,
    "dim": lambda low, input: (Layout.SHARED, low.emit(_rank, low.stacked(input))),
    "new_zeros": new("new_zeros"),
    "new_ones": new("new_ones"),
    "new_full": new("new_full"),
    "new_tensor": new("new_tensor"),
}


def _rank(x: torch.Tensor) -> int:
    return x.dim() - 1


ALIASES = frozenset(
    {
        *_BOTH.keys() - {"flip", "roll", "index_select", "tril", "triu"},
        *("view", "view_as", "reshape_as", "expand", "expand_as", "split", "getitem", "getattr"),
    }
)
