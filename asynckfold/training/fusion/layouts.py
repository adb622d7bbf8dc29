"""Memory layouts of a tensor with the values of R replicas, and conversions between them.

::

    plain    (B, C, H, W)        what one model computes
    STACKED  (R, B, C, H, W)     any plain value, the replica in front
    CHANNELS (B, R·C, H, W)      replicas within the channels, channels last in memory

Linear algebra needs STACKED, convolutions CHANNELS, element-wise functions take either. `unfold` is
a view; `fold` is one too, as long as the memory is still in the order of `fold`.

Parameters and buffers are stacked by name in a `Stack`; the models hold views of them. A `Slot`
holds the order in which the dimensions of a tensor are kept: the gradient of a batched kernel has
the order of the weight that it was given, and reordering it would copy all weights in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn


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


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer by name.

    ``order`` holds its plain dimensions as the stack keeps them: (1, 0) for the weight of a linear
    layer, kept as (R, in, out). ``is_parameter`` is False for a buffer.
    """

    order: tuple[int, ...]
    is_parameter: bool

    @property
    def inverse(self) -> tuple[int, ...]:
        """The kept dimensions, in the order of the plain model."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def slots_of(model: nn.Module, orders: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
    """Return the slots of a model by name, a tied tensor once, under its first name."""
    kinds = {True: model.named_parameters(), False: model.named_buffers()}
    return {
        name: Slot((is_parameter and orders.get(name)) or tuple(range(tensor.dim())), is_parameter)
        for is_parameter, named in kinds.items()
        for name, tensor in named
    }


class Stack:
    """The tensors of consecutive replicas: for each slot one of shape (R, ...), in its order."""

    def __init__(self, slots: Mapping[str, Slot], tensors: Mapping[str, torch.Tensor]) -> None:
        self.slots, self.tensors = dict(slots), dict(tensors)
        self._parameters = {k: t for k, t in tensors.items() if isinstance(t, nn.Parameter)}

    @classmethod
    def of(
        cls, models: Sequence[nn.Module], slots: Mapping[str, Slot], *, binds: bool = True
    ) -> Stack:
        """Stack the models' tensors, and let `binds` make them views of the stack."""
        named = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in models]
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, slot in slots.items():
                plain = [tensors_of[name].detach().permute(slot.order) for tensors_of in named]
                stacked = torch.stack(plain).contiguous()
                for values, tensors_of in zip(stacked, named, strict=True) if binds else ():
                    # The objects stay, so that optimizers and ties that hold them stay valid.
                    tensors_of[name].data = values.permute(slot.inverse)
                if slot.is_parameter:
                    trained = named[0][name].requires_grad
                    stacked = nn.Parameter(stacked, requires_grad=trained)
                tensors[name] = stacked
        return cls(slots, tensors)

    def part(self, replicas: range) -> Stack:
        """Return consecutive replicas as a view of this stack, with separate leaves."""
        tensors = {}
        for name, tensor in self.tensors.items():
            part = tensor.detach()[replicas.start : replicas.stop]
            if self.slots[name].is_parameter:
                part = nn.Parameter(part, requires_grad=tensor.requires_grad)
            tensors[name] = part
        return Stack(self.slots, tensors)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, (R, ...) each."""
        return self._parameters

    def plain(self, name: str, stacked: torch.Tensor, replica: int) -> torch.Tensor:
        """Return one replica's part of a tensor in the order of a slot, in plain order."""
        return stacked[replica].permute(self.slots[name].inverse)
