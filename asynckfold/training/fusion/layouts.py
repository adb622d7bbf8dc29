"""How one tensor holds the values of R replicas, and conversions between layouts.

::

    plain    (B, C, H, W)        what one model computes
    STACKED  (R, B, C, H, W)     any plain value, the replica in front
    CHANNELS (B, R·C, H, W)      replicas within the channels, channels last in memory

Linear algebra needs STACKED, convolutions CHANNELS, element-wise functions take either. `unfold` is
a view; `fold` is one too, as long as the memory is still in the order of `fold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class NotFusible(Exception):  # noqa: N818
    """A model without a batched form; the message is the reason, in one sentence."""


class Layout(Enum):
    """Where the replica dimension is."""

    SHARED = "no replica: one value for all"
    STACKED = "(R, ...)"
    CHANNELS = "(B, R*C, ...)"


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the plain model, and its node in the batched graph.

    ``example`` is what the plain model computed for the example inputs, a tensor only as shape and
    dtype on "meta"; ``name`` is that of a parameter or buffer, empty for computed values.
    """

    node: Any
    layout: Layout
    example: Any
    name: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, not a number, size or tuple."""
        return isinstance(self.example, torch.Tensor)

    @property
    def rank(self) -> int:
        """Number of dimensions of the plain value."""
        return int(self.example.dim())


def fold(stacked: torch.Tensor) -> torch.Tensor:
    """Return (R, B, C, ...) as (B, R·C, ...), channels last in memory."""
    spatial = range(3, stacked.dim())
    # With one channel, flatten alone would be a view in the old order.
    return stacked.permute(1, *spatial, 0, 2).flatten(-2).contiguous().movedim(-1, 1)


def unfold(folded: torch.Tensor, width: int) -> torch.Tensor:
    """Return (B, R·C, ...) as a view (R, B, C, ...)."""
    shape = (folded.shape[0], width, folded.shape[1] // width, *folded.shape[2:])
    return folded.view(shape).movedim(1, 0)


def align(stacked: torch.Tensor, rank: int) -> torch.Tensor:
    """Insert ones after R until the plain value has `rank` dimensions."""
    missing = rank + 1 - stacked.dim()
    return stacked.reshape(stacked.shape[0], *(1,) * missing, *stacked.shape[1:])


def spread(shared: torch.Tensor, width: int) -> torch.Tensor:
    """Return a shared value as a view (R, ...)."""
    return shared.expand(width, *shared.shape)


def plain_shape(stacked: torch.Tensor) -> torch.Size:
    """Return the shape that the plain model sees."""
    return stacked.shape[1:]


def axis(dim: int) -> int:
    """Return the stacked dimension of plain dimension `dim`."""
    return dim + 1 if dim >= 0 else dim


def axes(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the stacked dimensions of plain dimensions; None means all."""
    if dims is None:
        return tuple(range(1, rank + 1))
    return tuple(axis(dim) for dim in ((dims,) if isinstance(dims, int) else dims))
