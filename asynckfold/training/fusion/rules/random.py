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
Order = tuple[int, ...] | None


def _rule(function: Callable[..., Any], spatial: int | None = None) -> Rule:
    """Return the rule of a dropout, of whole channels where it has `spatial` dimensions."""

    def rule(low: Lowering, input: Value, p: float = 0.5, training: bool = True) -> Emitted:
        if not training or p == 0:
            return input.layout, input.node
        if spatial is None:
            return low.on_stacked(function, input, p, low.generators, memory_order(input.example))
        if input.rank != spatial + 2:
            raise TypeError(f"an input of {input.rank} dimensions")
        return low.on_stacked(function, input, p, low.generators)

    return rule


def drop(x: torch.Tensor, p: float, generators: Generators, order: Order = None) -> torch.Tensor:
    """Return (R, ...) with elements set to 0 with probability p, the others scaled to match."""
    if p == 1:
        return x * 0
    return x * mask_of(x, p, generators, order).div_(1 - p)


def memory_order(plain: torch.Tensor) -> Order:
    """Return the dimensions of a plain value from the outermost in memory to the innermost."""
    strides = plain.stride()
    order = tuple(sorted(range(plain.dim()), key=lambda dim: -strides[dim]))
    return None if order == tuple(range(plain.dim())) else order


def _drop_features(x: torch.Tensor, p: float, generators: Generators) -> torch.Tensor:
    one_each = x[(slice(None),) * 3 + (slice(1),) * (x.dim() - 3)]
    if p == 1:
        return x * 0
    return x * mask_of(one_each, p, generators).div_(1 - p)


def _alpha_drop(x: torch.Tensor, p: float, generators: Generators, order: Order) -> torch.Tensor:
    """Drop with equal mean and variance (Klambauer et al. 2017), as ``F.alpha_dropout`` does."""
    if p == 1:
        return x * 0
    mask, alpha = mask_of(x, p, generators, order), 1.7580993408473766
    scale = ((alpha**2 * p + 1) * (1 - p)) ** -0.5
    dropped: torch.Tensor = x * (mask * scale) + ((mask - 1) * (alpha * scale) + alpha * scale * p)
    return dropped


def mask_of(x: torch.Tensor, p: float, generators: Generators, order: Order = None) -> torch.Tensor:
    """Return what is kept of (R, ...), 1 with probability 1 - p, else 0."""
    return _drawn(x, generators, order, lambda rows, g: rows.bernoulli_(1 - p, generator=g))


def _drawn(
    x: torch.Tensor, generators: Generators, order: Order, draw: Callable[..., Any]
) -> torch.Tensor:
    """Return a tensor of the shape of x, each replica's part drawn from its generator."""
    dims = range(x.dim()) if order is None else (0, *(1 + dim for dim in order))
    drawn = torch.empty_permuted(x.shape, tuple(dims), dtype=x.dtype, device=x.device)
    for rows, generator in zip(drawn.unbind(), generators, strict=True):
        draw(rows, generator)
    return drawn


def _like_rule(draw: str) -> Rule:
    """Return the rule of ``torch.rand_like`` or ``torch.randn_like``, by the method that draws."""

    def drawn(x: torch.Tensor, generators: Generators, order: Order) -> torch.Tensor:
        return _drawn(x, generators, order, lambda rows, g: getattr(rows, draw)(generator=g))

    return lambda low, input: low.on_stacked(
        drawn, input, low.generators, memory_order(input.example)
    )


FUNCTIONS: dict[Any, Rule] = {
    F.dropout: _rule(drop),
    torch.dropout: lambda low, input, p, train: _rule(drop)(low, input, p, train),
    F.dropout1d: _rule(_drop_features, 1),
    F.dropout2d: _rule(_drop_features, 2),
    F.dropout3d: _rule(_drop_features, 3),
    F.alpha_dropout: _rule(_alpha_drop),
    torch.rand_like: _like_rule("uniform_"),
    torch.randn_like: _like_rule("normal_"),
}

# Without training they return what they were given.
ALIASES = frozenset(
    f"{kind}dropout{dims}" for kind in ("", "alpha_") for dims in ("", "1d", "2d", "3d")
)

_NAMES = """
bernoulli cauchy dropout exponential feature_dropout geometric log_normal multinomial normal
poisson rand rand_like randint randint_like randn randn_like random randperm rrelu uniform
"""
NAMES = frozenset(_NAMES.split())
