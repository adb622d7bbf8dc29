"""What draws random numbers: each replica from its own generator, as its plain model would.

On a CPU these are the numbers that the plain model draws from the global generator in the same
state. On a GPU ``F.dropout`` has a kernel of its own, which draws others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Layout, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule

Generators = Sequence[torch.Generator]


def dropout(low: Lowering, input: Value, p: float = 0.5, training: bool = True) -> Emitted:
    """Emit each replica's own mask."""
    if not training or p == 0:
        return input.layout, input.node
    return Layout.STACKED, low.emit(drop, low.stacked(input), p, low.generators)


def drop(x: torch.Tensor, p: float, generators: Generators) -> torch.Tensor:
    """Return (R, ...) with elements set to 0 with probability p, the others scaled to match."""
    return x * 0 if p == 1 else x * _mask(x, x.shape, p, generators).div_(1 - p)


def _feature_rule(spatial: int) -> Rule:
    def feature_dropout(
        low: Lowering, input: Value, p: float = 0.5, training: bool = True
    ) -> Emitted:
        """Emit masks of whole channels."""
        if not training or p == 0:
            return input.layout, input.node
        if input.rank != spatial + 2:
            raise TypeError(f"an input of {input.rank} dimensions")
        return Layout.STACKED, low.emit(_drop_features, low.stacked(input), p, low.generators)

    return feature_dropout


def _drop_features(x: torch.Tensor, p: float, generators: Generators) -> torch.Tensor:
    shape = (*x.shape[:3], *(1,) * (x.dim() - 3))
    return x * 0 if p == 1 else x * _mask(x, shape, p, generators).div_(1 - p)


def alpha_dropout(low: Lowering, input: Value, p: float = 0.5, training: bool = False) -> Emitted:
    """Emit the dropout that keeps mean and variance (Klambauer et al. 2017)."""
    if not training or p == 0:
        return input.layout, input.node
    return Layout.STACKED, low.emit(_alpha_drop, low.stacked(input), p, low.generators)


def _alpha_drop(x: torch.Tensor, p: float, generators: Generators) -> torch.Tensor:
    if p == 1:
        return x * 0
    alpha = 1.7580993408473766
    scale = ((alpha**2 * p + 1) * (1 - p)) ** -0.5
    mask = _mask(x, x.shape, p, generators)
    return x * (mask * scale) + ((mask - 1) * (alpha * scale) + alpha * scale * p)


def _mask(
    x: torch.Tensor, shape: Sequence[int], p: float, generators: Generators
) -> torch.Tensor:
    mask = torch.empty(shape, dtype=x.dtype, device=x.device)
    for row, generator in zip(mask.unbind(), generators, strict=True):
        row.bernoulli_(1 - p, generator=generator)
    return mask


def rand_like(low: Lowering, input: Value) -> Emitted:
    """Uniform numbers."""
    return Layout.STACKED, low.emit(_filled, low.stacked(input), "uniform_", low.generators)


def randn_like(low: Lowering, input: Value) -> Emitted:
    """Normal numbers."""
    return Layout.STACKED, low.emit(_filled, low.stacked(input), "normal_", low.generators)


def _filled(x: torch.Tensor, method: str, generators: Generators) -> torch.Tensor:
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for row, generator in zip(found.unbind(), generators, strict=True):
        getattr(row, method)(generator=generator)
    return found


FUNCTIONS: dict[Any, Rule] = {
    F.dropout: dropout,
    torch.dropout: lambda low, input, p, train: dropout(low, input, p, train),
    F.dropout1d: _feature_rule(1),
    F.dropout2d: _feature_rule(2),
    F.dropout3d: _feature_rule(3),
    F.alpha_dropout: alpha_dropout,
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
}

NAMES = frozenset(
    """
    bernoulli cauchy dropout exponential feature_dropout geometric log_normal multinomial normal
    poisson rand rand_like randint randint_like randn randn_like random randperm rrelu uniform
    """.split()
)
