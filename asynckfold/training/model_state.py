"""What a model keeps besides its parameters, and what its forward does besides computing outputs.

Buffers and extra state are compared, and restored after an evaluation. A graph of the forward would
not repeat what the forward does to attributes, to Python's and NumPy's generators, or by hooks."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.jobs.digests import bytecode
from asynckfold.jobs.digests.objects import unwrapped
from asynckfold.jobs.recipe import pack

_EXTRA = "_extra_state"
"""What torch calls it in a ``state_dict``."""


class StateSnapshot:
    """Buffers and extra state of a model, to be compared or restored; nothing if not `needed`.

    Examples
    --------
    >>> norm = nn.BatchNorm1d(2)
    >>> kept = StateSnapshot(norm)
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
    # Most attributes are of these kinds; pickling each takes longer than a step of a small model.
    if type(one) is type(other) and isinstance(one, (bool, int, str, type(None))):
        return bool(one == other)
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(map(same, one, other))
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


_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in sorted(_INTERNAL) if name.endswith("_hooks"))
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)

_KNOWN = ("torch", "torchvision", "asynckfold")
"""Packages whose modules keep nothing but parameters and buffers."""

_STATELESS = (types.FunctionType, types.BuiltinFunctionType, type, functools.partial, nn.Module)

State = list[dict[str, Any]]
"""Of each module of a model, its plain attributes and tensors."""


def describe(path: str, module: nn.Module) -> str:
    """Return the name of a layer in messages.

    >>> describe("features.0", nn.ReLU())
    'layer features.0 (ReLU)'
    """
    return f"layer {path} ({type(module).__name__})" if path else "the model"


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without parameters, buffers, modules, and what torch adds."""
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL}


def is_plain(value: Any) -> bool:
    """Whether a value is a number, text or the like, or a collection of these."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(is_plain(item) for item in chain(value.keys(), value.values()))
    return isinstance(value, _PLAIN)


def state(model: nn.Module) -> State:
    """Return a snapshot of the attributes of all modules."""
    return [_plain_of(module, torch.clone) for module in model.modules()]


def _plain_of(module: nn.Module, of_tensor: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Return plain attributes and tensors of a module, as texts and as `of_tensor` says."""
    return {
        name: of_tensor(value) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in attributes(module).items()
        if isinstance(value, torch.Tensor) or is_plain(value)
    }


def changes(model: nn.Module, before: State) -> Iterator[str]:
    """Name the attributes that changed, or were added, since a snapshot."""
    for (path, module), old, new in zip(model.named_modules(), before, state(model), strict=True):
        for name, value in new.items():
            if not same(old.get(name), value):
                yield f"{describe(path, module)} changes its attribute {name} in its forward"


def hooks(model: nn.Module) -> Iterator[str]:
    """Name the modules and parameters that have hooks."""
    for path, module in model.named_modules():
        if any(getattr(module, name, None) for name in _HOOKS if "state_dict" not in name):
            yield f"{describe(path, module)} has hooks"
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, kind, None) for kind in _PARAMETER_HOOKS):
            yield f"parameter {name} has hooks"


def side_effects_of(model: nn.Module, forward: Callable[[], object]) -> Iterator[str]:
    """Call what runs the model; name what it did besides."""
    before, drawn = state(model), _generators()
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    forward()
    if drawn != _generators():
        yield "its forward draws random numbers from Python or NumPy"
    yield from changes(model, before)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor is not tensors.get(name):
            yield f"its forward replaces {name}"


def kept(model: nn.Module, criterion: Any, device: torch.device) -> Iterator[str]:
    """Name what the user's code keeps, or may keep, from step to step, except on the device."""
    packages = [(item, type(item).__module__.split(".")[0]) for item in model.modules()]
    modules = [item for item, package in packages if package not in _KNOWN]
    for function in (criterion, *(type(item).forward for item in modules)):
        if code := getattr(unwrapped(function), "__code__", None):
            use = bytecode.use(code)
            changed = use.changes if function is criterion else use.changes | use.attributes
            yield from (f"{code.co_name} changes {name}" for name in sorted(changed))
    for module in modules:
        for name, value in attributes(module).items():
            is_constant = isinstance(value, _STATELESS) or is_plain(value)
            if not is_constant and getattr(value, "device", None) != device:
                yield f"{type(module).__name__} has {name}, a {type(value).__name__}"


def frozen(model: nn.Module) -> list[Any]:
    """Return what a graph of the forward freezes: addresses, modes, plain attributes."""
    tensors = chain(model.parameters(), model.buffers())
    return [
        *((item.data_ptr(), item.requires_grad) for item in tensors),
        *((item.training, _plain_of(item, torch.Tensor.data_ptr)) for item in model.modules()),
    ]


def _generators() -> tuple[Any, ...]:
    _, words, position, *_ = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), np.asarray(words).tobytes(), position
