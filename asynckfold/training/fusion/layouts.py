"""How the values of R replicas lie in one tensor, and the ways from one layout to the other.

::

    plain    (B, C, H, W)        what one model computes
    STACKED  (R, B, C, H, W)     any plain value, the replica in front
    CHANNELS (B, R·C, H, W)      replicas within the channels, channels last in memory

Linear algebra wants STACKED, convolutions want CHANNELS, element-wise functions take what they get.
`unfold` is a view; `fold` is one, too, as long as the memory is still in the order of `fold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class NotFusible(Exception):  # noqa: N818
    """A model that has no batched form here; the text is the reason, in one sentence."""


class Layout(Enum):
    """Where the replica is."""

    SHARED = "no replica: one value for all"
    STACKED = "(R, ...)"
    CHANNELS = "(B, R*C, ...)"


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the plain model, as the batched graph holds it.

    Parameters
    ----------
    node : fx.Node
        Its node in the batched graph.
    layout : Layout
        How the replicas lie in it.
    example : tensor on "meta", or any object
        What the plain model computed for the example inputs: shape and dtype only.
    name : str
        Of the parameter or buffer that it is; empty for anything computed.
    """

    node: Any
    layout: Layout
    example: Any
    name: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether it is one tensor, not a number, size or tuple."""
        return isinstance(self.example, torch.Tensor)

    @property
    def rank(self) -> int:
        """Number of dimensions of the plain value."""
        return int(self.example.dim())


def fold(stacked: torch.Tensor) -> torch.Tensor:
    """Return (R, B, C, ...) as (B, R·C, ...), channels last in memory."""
    spatial = range(3, stacked.dim())
    # Of one channel, flatten alone would be a view in the old order.
    return stacked.permute(1, *spatial, 0, 2).flatten(-2).contiguous().movedim(-1, 1)


def unfold(folded: torch.Tensor, width: int) -> torch.Tensor:
    """Return (B, R·C, ...) as a view (R, B, C, ...)."""
    shape = (folded.shape[0], width, folded.shape[1] // width, *folded.shape[2:])
    return folded.view(shape).movedim(1, 0)


def align(stacked: torch.Tensor, rank: int) -> torch.Tensor:
    """Return (R, ...) with ones after R, so that the plain value has `rank` dimensions."""
    missing = rank + 1 - stacked.dim()
    return stacked.reshape(stacked.shape[0], *(1,) * missing, *stacked.shape[1:])


def spread(shared: torch.Tensor, width: int) -> torch.Tensor:
    """Return a value that all replicas share as a view (R, ...)."""
    return shared.expand(width, *shared.shape)


def plain_shape(stacked: torch.Tensor) -> torch.Size:
    """Return the shape that the plain model sees."""
    return stacked.shape[1:]


def axis(dim: int) -> int:
    """Return the dimension of a stacked value that is `dim` of the plain one."""
    return dim + 1 if dim >= 0 else dim


def axes(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the dimensions of a stacked value that are `dims` of the plain one; None means all."""
    if dims is None:
        return tuple(range(1, rank + 1))
    return tuple(axis(dim) for dim in ((dims,) if isinstance(dims, int) else dims))
