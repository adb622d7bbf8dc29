"""Tensors in memory that processes forked afterwards share: without a name, gone with the last."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import nn

ALIGNMENT = 64
"""Bytes of a cache line: two tensors never share one."""


def shared(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors, of the same shapes and layouts, in one piece of shared memory.

    Anonymous memory has no name that could stay behind, and the processes that are forked from now
    on see each other's writes.

    Parameters
    ----------
    tensors : iterable of Tensor
        Dense tensors on the CPU.

    Examples
    --------
    >>> (found,) = shared([torch.arange(6.0).reshape(2, 3).T])
    >>> found.stride(), found[2].tolist()
    ((1, 3), [2.0, 5.0])
    """
    given = [tensor.detach() for tensor in tensors]
    sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in given]
    memory = mmap.mmap(-1, max(ALIGNMENT, sum(sizes)))
    found, offset = [], 0
    for tensor, size in zip(given, sizes, strict=True):
        found.append(_placed(tensor, memory, offset))
        offset += size
    return found


def _placed(tensor: torch.Tensor, memory: mmap.mmap, offset: int) -> torch.Tensor:
    if tensor.numel() == 0:
        return tensor.clone()
    # Of a dense tensor, in whatever order of its dimensions, the clone has the same strides.
    copy = tensor.clone()
    place = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    made = place.as_strided(copy.size(), copy.stride())
    made.copy_(copy)
    return made


def share_model(model: nn.Module) -> None:
    """Move parameters and buffers into shared memory, where they stand in all processes.

    Parameters stay the objects that an optimizer knows; what is tied stays tied.
    """
    found = list(dict.fromkeys([*model.parameters(), *model.buffers()]))
    place(found, shared(found))


def place(tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Let tensors, which stay the objects that they are, have their values in these places."""
    for tensor, found in zip(tensors, places, strict=True):
        tensor.data = found


def copy_each(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy the values of some tensors into others, on whatever devices."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def share_state(
    state: dict[torch.Tensor, dict[str, object]],
) -> dict[torch.Tensor, dict[str, object]]:
    """Return the state of an optimizer with its tensors in shared memory, the rest as it is."""
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
