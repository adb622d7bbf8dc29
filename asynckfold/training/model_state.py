"""What a model keeps besides its parameters: compared, and restored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from asynckfold.jobs.recipe import pack

_EXTRA = "_extra_state"
"""What torch calls it in a ``state_dict``."""


class Kept:
    """Buffers and extra state of a model, to be compared or restored; nothing if not `needed`.

    Examples
    --------
    >>> norm = nn.BatchNorm1d(2)
    >>> kept = Kept(norm)
    >>> _ = norm(torch.ones(3, 2))
    >>> kept.changed()
    ['running_mean', 'running_var', 'num_batches_tracked']
    >>> kept.restore()
    >>> kept.changed()
    []
    """

    def __init__(self, model: nn.Module, *, needed: bool = True) -> None:
        self._model = model
        state = _state_of(model) if needed else ()
        self._values = {name: (value, _copied(value)) for name, value in state}

    def changed(self) -> list[str]:
        """Return the names of those whose values are others now."""
        return [
            name
            for name, value in _state_of(self._model)
            if name not in self._values or not same(self._values[name][1], value)
        ]

    def restore(self) -> None:
        """Put them back, with their values: where a tensor is shared, it stays so."""
        for name, (tensor, value) in self._values.items():
            path, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(path)
            if leaf == _EXTRA:
                module.set_extra_state(_copied(value))
            elif tensor is None or tensor.shape != value.shape:
                module._buffers[leaf] = _copied(value)
            else:
                tensor.detach().copy_(value)
                module._buffers[leaf] = tensor


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _state_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield buffers and extra state of all modules, by name."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for leaf, value in module._buffers.items():
            yield f"{prefix}{leaf}", value
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}{_EXTRA}", module.get_extra_state()


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit for bit; tensors on the CPU or on one GPU."""
    if isinstance(one, torch.Generator) and isinstance(other, torch.Generator):
        return same(one.get_state(), other.get_state())
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return pack(one) == pack(other)
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout is torch.sparse_coo:
        parts = (one._indices(), other._indices()), (one._values(), other._values())
        return all(same(*pair) for pair in parts)
    if one.layout is not torch.strided:
        return pack(one.detach()) == pack(other.detach())
    first, second = (
        item.detach().contiguous().reshape(-1).view(torch.uint8) for item in (one, other)
    )
    return torch.equal(first, second)
