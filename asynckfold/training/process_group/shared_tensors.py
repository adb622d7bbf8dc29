"""Tensors in anonymous shared memory, for processes forked afterwards."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import nn

ALIGNMENT = 64
"""Bytes of a cache line: two tensors never share one."""


def shared(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of dense CPU tensors, with the same strides, in one piece of shared memory.

    Processes forked from now on see each other's writes. Anonymous memory leaves no name behind.

    Examples
    --------
    >>> (copy,) = shared([torch.arange(6.0).reshape(2, 3).T])
    >>> copy.stride(), copy[2].tolist()
    ((1, 3), [2.0, 5.0])
    """
    dense = [tensor.detach() for tensor in tensors]
    sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in dense]
    memory = mmap.mmap(-1, max(ALIGNMENT, sum(sizes)))
    copies, offset = [], 0
    for tensor, size in zip(dense, sizes, strict=True):
        copies.append(_placed(tensor, memory, offset))
        offset += size
    return copies


def _placed(tensor: torch.Tensor, memory: mmap.mmap, offset: int) -> torch.Tensor:
    if tensor.numel() == 0:
        return tensor.clone()
    # The clone of a dense tensor keeps the strides, in any order of the dimensions.
    copy = tensor.clone()
    place = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    made = place.as_strided(copy.size(), copy.stride())
    made.copy_(copy)
    return made


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


def share_state(
    state: dict[torch.Tensor, dict[str, object]],
) -> dict[torch.Tensor, dict[str, object]]:
    """Return an optimizer's state with its tensors in shared memory."""
    keys = [
        (parameter, name)
        for parameter, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    made = {parameter: dict(values) for parameter, values in state.items()}
    tensors = [state[parameter][name] for parameter, name in keys]
    for (parameter, name), place in zip(keys, shared(tensors), strict=True):  # type: ignore[arg-type]
        made[parameter][name] = place
    return made
