"""Random functions: each replica draws from its generator, as its plain model would.

On a CPU these are the numbers that the plain model draws from the global generator in the same
state: each replica's part of a mask has the memory order of the plain mask, because some kernels
fill it in that order. On a GPU the kernel of ``F.dropout`` draws other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule

Generators = Sequence[torch.Generator]
Order = tuple[int, ...]


def dropout(low: Lowering, input: Value, p: float = 0.5, training: bool = True) -> Emitted:
    """Drop elements."""
    if not training or p == 0:
        return input.layout, input.node
    return low.on_stacked(drop, input, p, low.generators, memory_order(input.example))


def _features_rule(rank: int) -> Rule:
    """Return the rule of a dropout of whole channels, for inputs of this rank."""

    def rule(low: Lowering, input: Value, p: float = 0.5, training: bool = True) -> Any:
        if not training or p == 0:
            return input.layout, input.node
        if input.rank != rank:
            return NotImplemented
        return low.on_stacked(drop, input, p, low.generators, (0, 1))

    return rule


def drop(x: torch.Tensor, p: float, generators: Generators, order: Order) -> torch.Tensor:
    """Return (R, ...) with elements set to 0 with probability p, the others scaled to match.

    They are drawn in the order of dimensions; those that it lacks are dropped as one.
    """
    if p == 1:
        return x * 0
    each = x[(slice(None),) * (1 + len(order)) + (slice(1),) * (x.dim() - 1 - len(order))]
    return x * mask_of(each, p, generators, order).div_(1 - p)


def memory_order(plain: torch.Tensor) -> Order:
    """Return the dimensions of a plain value from the outermost in memory to the innermost."""
    strides = plain.stride()
    return tuple(sorted(range(plain.dim()), key=lambda dim: -strides[dim]))


def mask_of(x: torch.Tensor, p: float, generators: Generators, order: Order) -> torch.Tensor:
    """Return what is kept of (R, ...), 1 with probability 1 - p, else 0."""
    return _drawn(x, generators, order, lambda rows, g: rows.bernoulli_(1 - p, generator=g))


def _drawn(
    x: torch.Tensor, generators: Generators, order: Order, draw: Callable[..., Any]
) -> torch.Tensor:
    """Return a tensor of the shape of x, each replica's part drawn from its generator."""
    dims = [0, *(1 + dim for dim in order), *range(1 + len(order), x.dim())]
    drawn = torch.empty_permuted(x.shape, dims, dtype=x.dtype, device=x.device)
    for rows, generator in zip(drawn.unbind(), generators, strict=True):
        draw(rows, generator)
    return drawn


def _like_rule(method: str) -> Rule:
    """Return the rule of ``torch.rand_like`` or ``torch.randn_like``, by the method that draws."""

    def drawn(x: torch.Tensor, generators: Generators, order: Order) -> torch.Tensor:
        return _drawn(x, generators, order, lambda rows, g: getattr(rows, method)(generator=g))

    return lambda low, input: low.on_stacked(
        drawn, input, low.generators, memory_order(input.example)
    )


RULES: dict[Any, Rule] = {
    F.dropout: dropout,
    F.dropout1d: _features_rule(3),
    F.dropout2d: _features_rule(4),
    F.dropout3d: _features_rule(5),
    torch.rand_like: _like_rule("uniform_"),
    torch.randn_like: _like_rule("normal_"),
}
