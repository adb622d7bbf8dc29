"""Functions that move, join or reduce elements: STACKED, with every dimension shifted by one."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from asynckfold.training import torch_internals
from asynckfold.training.fusion.layouts import Layout, NotFusible, Value, align, axes, plain_shape
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule, per_replica


def shifted(function: Callable[..., Any], *places: int, default: int | None = None) -> Rule:
    """Return the rule of a function whose arguments at `places`, or by name, are dimensions.

    Its first argument is a tensor, or several; ``default`` is a dimension that may be left out.
    """

    def rule(low: Lowering, input: Value | Sequence[Value], *args: Any, **kwargs: Any) -> Emitted:
        missing = places and len(args) < places[-1] and not kwargs.keys() & _DIMENSIONS
        if missing:
            kwargs = {**kwargs, "dim": default}
        moved = [_behind(item) if at in places else item for at, item in enumerate(args, 1)]
        named = {
            name: _behind(item) if name in _DIMENSIONS else item for name, item in kwargs.items()
        }
        nodes = low.stacked(input) if isinstance(input, Value) else [*map(low.stacked, input)]
        return Layout.STACKED, low.emit(function, nodes, *moved, **named)

    return rule


_DIMENSIONS = frozenset({"dim", "dim0", "dim1", "dims", "source", "destination"})


def _behind(dims: Any) -> Any:
    """Return the stacked dimensions of plain ones."""
    if dims is None:
        raise NotFusible("a function without dim has no batched form")
    return axes(dims, 0) if isinstance(dims, (list, tuple)) else axes(dims, 0)[0]


def reducing(function: Callable[..., Any]) -> Rule:
    """Return the rule of a function that reduces one, several or all plain dimensions."""

    def rule(
        low: Lowering, input: Value, dim: Any = None, *settings: Any, **kwargs: Any
    ) -> Emitted:
        if isinstance(dim, bool):
            raise NotFusible("a flag in place of dim has no batched form")
        if input.rank == 0:
            return Layout.STACKED, low.stacked(input)
        return low.on_stacked(function, input, axes(dim, input.rank), *settings, **kwargs)

    return rule


def mapped(function: Callable[..., Any]) -> Rule:
    """Return the rule of a function that is called once for all replicas, as by `vmap`."""

    def rule(low: Lowering, *args: Any, **kwargs: Any) -> Emitted:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        differing, width = per_replica(leaves), low.width
        places = [item in differing for item in leaves]

        def stacked(*items: Any) -> Any:
            level = torch_internals.enter_vmap(width, "error")

            def inner(item: torch.Tensor) -> Any:
                return torch_internals.batched(item, 0, level)

            def outer(item: torch.Tensor) -> Any:
                return torch_internals.unbatched(item, level, width, 0)

            try:
                plain = [
                    pytree.tree_map_only(torch.Tensor, inner, item) if differs else item
                    for item, differs in zip(items, places, strict=True)
                ]
                some, named = pytree.tree_unflatten(plain, spec)
                return pytree.tree_map_only(torch.Tensor, outer, function(*some, **named))
            finally:
                torch_internals.leave_vmap()

        nodes = [low.stacked(item) if item in differing else item for item in leaves]
        return Layout.STACKED, low.emit(stacked, *nodes)

    return rule


def _sizes(sizes: Sequence[Any]) -> Any:
    """Return sizes that may come one by one, or as one sequence, or as the shape of a tensor."""
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)


def size(low: Lowering, input: Value, dim: int | None = None) -> Emitted:
    """The shape that the plain model sees, which is a Python value and the same for all."""
    shape = low.emit(plain_shape, low.stacked(input))
    return Layout.SHARED, shape if dim is None else low.emit(operator.getitem, shape, dim)


def attribute(low: Lowering, input: Value, name: str) -> Emitted:
    """``x.shape`` and its like."""
    if name == "shape":
        return size(low, input)
    if name == "mT" or (name == "T" and input.rank == 2):
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


def flatten(low: Lowering, input: Value, start_dim: int = 0, end_dim: int = -1) -> Emitted:
    """Merge dimensions; a number becomes a vector."""
    if input.rank == 0:
        return low.on_stacked(align, input, 1)
    return low.on_stacked(torch.flatten, input, *axes((start_dim, end_dim), input.rank))


def permute(low: Lowering, input: Value, *dims: Any) -> Emitted:
    """Reorder the dimensions behind the replica."""
    order = axes(tuple(d % input.rank for d in _sizes(dims)), input.rank)
    return low.on_stacked(torch.permute, input, (0, *order))


transpose = shifted(torch.transpose, 1, 2)


def flip(low: Lowering, input: Value, *dims: Any) -> Emitted:
    """Reverse dimensions."""
    return low.on_stacked(torch.flip, input, axes(_sizes(dims), input.rank))


def expand(low: Lowering, input: Value, *sizes: Any) -> Emitted:
    """Repeat without copying; may add dimensions in front of the plain ones."""
    return low.on_stacked(_expand, input, _sizes(sizes))


def _expand(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return align(x, len(sizes)).expand(-1, *sizes)


def getitem(low: Lowering, input: Value, index: Any) -> Emitted:
    """Index behind the replica; an entry of a tuple of tensors as it is."""
    if not input.is_tensor:
        return input.layout, low.emit(operator.getitem, input.node, index)
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, Value) and item.is_tensor for item in indices):
        return mapped(operator.getitem)(low, input, index)
    return low.on_stacked(_getitem, input, indices)


def _getitem(x: torch.Tensor, indices: tuple[Any, ...]) -> torch.Tensor:
    index = (slice(None), *indices)
    return x[index]


def _with_item(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Return a copy in which some elements are replaced."""
    changed = x.clone()
    changed[index] = value
    return changed


def extreme(name: str) -> Rule:
    """Return the rule of ``max`` and ``min``: of all, along a dimension, or of two tensors."""
    along = shifted(getattr(torch, name), 1)
    of_all = reducing(getattr(torch, f"a{name}"))

    def rule(low: Lowering, input: Value, dim: Any = None, keepdim: bool = False) -> Emitted:
        if isinstance(dim, Value):
            return mapped(getattr(torch, name))(low, input, dim)
        return of_all(low, input) if dim is None else along(low, input, dim, keepdim)

    return rule


def norm(
    low: Lowering, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Emitted:
    """``x.norm`` and ``torch.linalg.vector_norm``."""
    ord = kwargs.pop("p", ord)
    if isinstance(ord, str) or kwargs:
        raise NotFusible("such a norm has no batched form")
    return low.on_stacked(torch.linalg.vector_norm, x, ord, axes(dim, x.rank), keepdim)


def new(name: str) -> Rule:
    """Return the rule of ``x.new_zeros`` and its like: a tensor for all replicas."""

    def rule(low: Lowering, input: Value, *args: Any, **kwargs: Any) -> Emitted:
        return Layout.SHARED, low.emit_method(name, low.stacked(input), *args, **kwargs)

    return rule


_MOVING: dict[str, Rule] = {
    "reshape": reshape,
    "flatten": flatten,
    "permute": permute,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "t": lambda low, input: transpose(low, input, 0, 1),
    "squeeze": lambda low, input, dim=None: low.on_stacked(
        torch.squeeze, input, axes(dim, input.rank)
    ),
    "unsqueeze": shifted(torch.unsqueeze, 1),
    "unflatten": shifted(torch.unflatten, 1),
    "movedim": shifted(torch.movedim, 1, 2),
    "flip": flip,
    "roll": shifted(torch.roll, 2),
    "chunk": shifted(torch.chunk, 2, default=0),
    "split": shifted(torch.split, 2, default=0),
    "tensor_split": shifted(torch.tensor_split, 2, default=0),
    "unbind": shifted(torch.unbind, 1, default=0),
    "narrow": shifted(torch.narrow, 1),
    "select": shifted(torch.select, 1),
    "index_select": shifted(torch.index_select, 1),
    "tril": shifted(torch.tril),
    "triu": shifted(torch.triu),
}

_REDUCING: dict[str, Rule] = {
    **{
        name: reducing(getattr(torch, name))
        for name in ("mean", "sum", "amax", "amin", "logsumexp", "var", "std")
    },
    **{
        name: shifted(getattr(torch, name), 1)
        for name in ("argmax", "argmin", "cumsum", "cumprod", "softmax", "log_softmax")
    },
    "max": extreme("max"),
    "min": extreme("min"),
    "norm": norm,
}

FUNCTIONS: dict[Any, Rule] = {
    **{getattr(torch, name): rule for name, rule in (_MOVING | _REDUCING).items()},
    torch.cat: shifted(torch.cat, 1, default=0),
    torch.concat: shifted(torch.cat, 1, default=0),
    torch.stack: shifted(torch.stack, 1, default=0),
    torch.linalg.vector_norm: norm,
    torch.linalg.norm: norm,
    F.softmax: shifted(F.softmax, 1),
    F.log_softmax: shifted(F.log_softmax, 1),
    F.glu: shifted(F.glu, 1, default=-1),
    F.one_hot: shifted(F.one_hot),
    builtins.getattr: attribute,
    operator.getitem: getitem,
    operator.setitem: mapped(_with_item),
}

METHODS: dict[str, Rule] = {
    **_MOVING,
    **_REDUCING,
    "expand": expand,
    "expand_as": mapped(torch.Tensor.expand_as),
    "repeat": mapped(torch.Tensor.repeat),
    "view": reshape,
    "view_as": mapped(torch.Tensor.reshape_as),
    "reshape_as": mapped(torch.Tensor.reshape_as),
    "size": size,
    "dim": lambda low, input: (Layout.SHARED, low.emit(_rank, low.stacked(input))),
    **{name: new(name) for name in ("new_zeros", "new_ones", "new_full", "new_tensor")},
}


def _rank(x: torch.Tensor) -> int:
    return x.dim() - 1


ALIASES = frozenset(
    {
        *_MOVING.keys() - {"flip", "roll", "index_select", "tril", "triu"},
        *("view", "view_as", "reshape_as", "expand", "expand_as", "getitem", "getattr"),
    }
)
