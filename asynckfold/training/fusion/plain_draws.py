"""Let a plain model draw the random numbers of its replica in a fusion group.

On a CPU both draw the same by themselves. On a GPU the kernels of dropout and attention draw in a
way of their own, so that a plain and a fused step would differ by their masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.rules import lookup, random


@contextmanager
def drawing_as_replica(
    generator: torch.Generator, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Meanwhile, torch's dropouts draw from `generator` as those of a fused replica do.

    `dtype` is that in which the replica draws; by default the plain model's.

    Examples
    --------
    >>> with drawing_as_replica(torch.Generator().manual_seed(0)):
    ...     drawn = F.dropout(torch.ones(4), 0.5)
    >>> set(drawn.tolist()) <= {0.0, 2.0}
    True
    """
    draws = _Draws(generator, dtype)
    exchanged = [
        *((F, name, draws.features) for name in ("dropout1d", "dropout2d", "dropout3d")),
        (F, "dropout", draws.elements),
        (torch, "dropout", draws.elements),
        (F, "alpha_dropout", draws.alpha),
        (F, "scaled_dot_product_attention", draws.attention),
        (torch, "rand_like", draws.uniform),
        (torch, "randn_like", draws.normal),
    ]
    usual = [(owner, name, getattr(owner, name)) for owner, name, _ in exchanged]
    try:
        for owner, name, function in exchanged:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in usual:
            setattr(owner, name, function)


class _Draws:
    """The random functions, of one replica."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype | None) -> None:
        self._generators, self._dtype = [generator], dtype
        self._usual_attention = F.scaled_dot_product_attention

    def elements(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """``F.dropout``."""
        if not training or p == 0:
            return input
        found = self._dropped(input, input, p, random.memory_order(input))
        return _result(input, found, inplace)

    def features(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """``F.dropout2d`` and those of other dimensions."""
        if not training or p == 0:
            return input
        one_each = input[(slice(None),) * 2 + (slice(1),) * (input.dim() - 2)]
        return _result(input, self._dropped(input, one_each, p), inplace)

    def alpha(
        self, input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> torch.Tensor:
        """``F.alpha_dropout``."""
        if not training or p == 0:
            return input
        if p == 1:
            return _result(input, input * 0, inplace)
        mask = self._mask(input, p, random.memory_order(input)).to(input.dtype)
        return _result(input, random.with_alpha(input, mask, p), inplace)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        """``F.scaled_dot_product_attention``."""
        if dropout_p == 0:
            return self._usual_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, **settings
            )
        weights = lookup.attention_weights(query, key, attn_mask, is_causal, scale)
        return self._dropped(weights, weights, dropout_p) @ value

    def uniform(self, input: torch.Tensor) -> torch.Tensor:
        """``torch.rand_like``."""
        order = random.memory_order(input)
        return random.uniform(self._stacked(input), self._generators, order)[0].to(input.dtype)

    def normal(self, input: torch.Tensor) -> torch.Tensor:
        """``torch.randn_like``."""
        order = random.memory_order(input)
        return random.normal(self._stacked(input), self._generators, order)[0].to(input.dtype)

    def _dropped(
        self, x: torch.Tensor, like: torch.Tensor, p: float, order: random.Order = None
    ) -> torch.Tensor:
        if p == 1:
            return x * 0
        # Scaled as torch's kernels do: in float32, where numbers are shorter.
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * (self._mask(like, p, order).to(wide) / (1 - p))).to(x.dtype)

    def _mask(self, like: torch.Tensor, p: float, order: random.Order = None) -> torch.Tensor:
        return random.mask_of(self._stacked(like), p, self._generators, order)[0]

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(self._dtype or x.dtype).unsqueeze(0)


def _result(input: torch.Tensor, found: torch.Tensor, inplace: bool) -> torch.Tensor:
    return input.copy_(found) if inplace else found
