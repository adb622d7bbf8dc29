"""The parameters and buffers of R replicas, stacked by name; the models hold views of them.

A `Slot` holds the order in which the dimensions of a tensor are kept: the gradient of a batched
kernel has the order of the weight that it was given, and reordering it would copy all weights in
every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer by name.

    ``order`` holds its plain dimensions as the stack keeps them: (1, 0) for the weight of a linear
    layer, kept as (R, in, out). ``is_parameter`` is False for a buffer.
    """

    order: tuple[int, ...]
    is_parameter: bool

    @property
    def is_plain(self) -> bool:
        """Whether the order is the plain model's."""
        return self.order == tuple(range(len(self.order)))

    @property
    def inverse(self) -> tuple[int, ...]:
        """The kept dimensions, in the order of the plain model."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def slots_of(model: nn.Module, orders: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
    """Return the slots of a model by name, a tied tensor once, under its first name."""
    parameters = {
        name: Slot(orders.get(name, tuple(range(tensor.dim()))), True)
        for name, tensor in model.named_parameters()
    }
    buffers = {
        name: Slot(tuple(range(tensor.dim())), False) for name, tensor in model.named_buffers()
    }
    return parameters | buffers


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied tensors, each with its first name."""
    first: dict[int, str] = {}
    found = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


class Stack:
    """The tensors of consecutive replicas: for each slot one of shape (R, ...), in its order."""

    def __init__(self, slots: Mapping[str, Slot], tensors: Mapping[str, torch.Tensor]) -> None:
        self.slots, self.tensors = dict(slots), dict(tensors)

    @classmethod
    def of(cls, models: Sequence[nn.Module], slots: Mapping[str, Slot]) -> Stack:
        """Stack the models' tensors, and make each model's own tensors views of the stack."""
        named = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in models]
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, slot in slots.items():
                plain = [tensors_of[name].detach().permute(slot.order) for tensors_of in named]
                stacked = torch.stack(plain).contiguous()
                for own, tensors_of in zip(stacked, named, strict=True):
                    # The objects stay, so that optimizers and ties that hold them stay valid.
                    tensors_of[name].data = own.permute(slot.inverse)
                if slot.is_parameter:
                    trained = named[0][name].requires_grad
                    stacked = nn.Parameter(stacked, requires_grad=trained)
                tensors[name] = stacked
        return cls(slots, tensors)

    def part(self, replicas: range) -> Stack:
        """Return consecutive replicas as a view of this stack, with leaves of their own."""
        tensors = {}
        for name, tensor in self.tensors.items():
            part = tensor.detach()[replicas.start : replicas.stop]
            if self.slots[name].is_parameter:
                part = nn.Parameter(part, requires_grad=tensor.requires_grad)
            tensors[name] = part
        return Stack(self.slots, tensors)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, (R, ...) each."""
        return {k: t for k, t in self.tensors.items() if isinstance(t, nn.Parameter)}

    def plain(self, name: str, stacked: torch.Tensor, replica: int) -> torch.Tensor:
        """Return one replica's part of a tensor in the order of a slot, in plain order."""
        return stacked[replica].permute(self.slots[name].inverse)
