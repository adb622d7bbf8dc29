"""Tensors in anonymous shared memory, for processes forked afterwards."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

ALIGNMENT = 64
"""Bytes of a cache line: two tensors never share one."""


def shared(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of dense CPU tensors, with the same strides, in one piece of shared memory.

    Processes forked from now on see each other's writes. Anonymous memory leaves no name behind.
    """
    dense = [tensor.detach() for tensor in tensors]
    sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in dense]
    memory = mmap.mmap(-1, max(ALIGNMENT, sum(sizes)))
    copies, offset = [], 0
    for tensor, size in zip(dense, sizes, strict=True):
        # The clone of a dense tensor keeps the strides, in any order of the dimensions.
        copy, count = tensor.clone(), tensor.numel()
        if count:
            part = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
            copy = part.as_strided(copy.size(), copy.stride()).copy_(copy)
        copies.append(copy)
        offset += size
    return copies


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, tied ones once."""
    return list(dict.fromkeys([*model.parameters(), *model.buffers()]))


def share_model(model: nn.Module) -> None:
    """Move parameters and buffers into shared memory; the objects and their ties stay."""
    tensors = tensors_of(model)
    place(tensors, shared(tensors))


def place(tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Point tensors, which stay the same objects, to these places in memory."""
    for tensor, location in zip(tensors, places, strict=True):
        tensor.data = location


def copy_each(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy the values of tensors into others, on any devices."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def share_state(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return an optimizer's state with its tensors in shared memory."""
    tensors = [item for each in state.values() for item in each.values() if torch.is_tensor(item)]
    places = iter(shared(tensors))
    return {
        parameter: {
            name: next(places) if torch.is_tensor(item) else item for name, item in each.items()
        }
        for parameter, each in state.items()
    }
