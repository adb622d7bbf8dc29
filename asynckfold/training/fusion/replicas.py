"""Whether some models are replicas of one, and what of a model no trace would show."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.training import seeding
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.tracing import copied, describe

_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in sorted(_INTERNAL) if name.endswith("_hooks"))
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def check(models: Sequence[nn.Module], inputs: Sequence[Any]) -> None:
    """Refuse what is not R times one model, and what does more in its forward than compute.

    Raises
    ------
    NotFusible
        Names the layer and the reason.
    """
    for problem in chain(_differences(models), _obstacles(models[0]), _deeds(models[0], inputs)):
        raise NotFusible(problem)


def _differences(models: Sequence[nn.Module]) -> Iterator[str]:
    first = models[0]
    seen: dict[int, int] = {}
    for row, model in enumerate(models):
        for tensor in chain(model.parameters(), model.buffers()):
            if seen.setdefault(id(tensor), row) != row:
                yield "two replicas share a parameter or buffer"
    for model in models[1:]:
        if _tensors(model) != _tensors(first):
            yield "the replicas differ in the names, shapes, types or ties of their tensors"
            return
        for (path, mine), (_, other) in zip(first.named_modules(), model.named_modules(), strict=True):
            if type(mine) is not type(other):
                yield f"the replicas differ: {describe(path, mine)} is a {type(other).__name__}"
                return
            yield from (
                f"the replicas differ: {describe(path, mine)} has {name} {value!r} and {theirs!r}"
                for name, value in _settings(mine).items()
                if (theirs := _settings(other).get(name)) != value
            )


def _tensors(model: nn.Module) -> list[tuple[Any, ...]]:
    numbers: dict[int, int] = {}
    return [
        (name, t.shape, t.dtype, t.device, t.requires_grad, numbers.setdefault(id(t), len(numbers)))
        for name, t in chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    ] + [(path,) for path, _ in model.named_modules()]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, and containers of such."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _INTERNAL and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in chain(value.keys(), value.values()))
    return isinstance(value, _PLAIN)


def _obstacles(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if any(getattr(module, name, None) for name in _HOOKS if "state_dict" not in name):
            yield f"{describe(path, module)} has hooks"
        if isinstance(module, nn.RNNBase):
            yield f"{describe(path, module)} is recurrent, and its kernel has no batched form"
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
            yield f"parameter {name} gets its shape only in the first forward"
        elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"parameter {name} has hooks"
        elif parameter.layout is not torch.strided:
            yield f"parameter {name} is not a dense tensor"


def _deeds(model: nn.Module, inputs: Sequence[Any]) -> Iterator[str]:
    """Run copies of the model, and see what the forward does beside computing."""
    for training in (True, False):
        probe = copied(model).train(training)
        before = [_state(module) for module in probe.modules()]
        with seeding.preserved():
            drawn = _python_generators()
            try:
                probe(*inputs)
            except Exception as error:  # noqa: BLE001
                yield f"the model's forward raises {type(error).__name__}: {error}"
                return
            if drawn != _python_generators():
                yield "the forward draws random numbers from Python or NumPy"
        for (path, module), old in zip(probe.named_modules(), before, strict=True):
            for name, value in _state(module).items():
                if not _equal(old.get(name), value):
                    yield f"{describe(path, module)} changes its attribute {name} in its forward"


def _state(module: nn.Module) -> dict[str, Any]:
    """Return a snapshot of everything in a module that is neither a parameter nor a buffer."""
    attributes = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else repr(value)
        for name, value in attributes.items()
        if isinstance(value, torch.Tensor) or _is_plain(value)
    }


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old.shape == new.shape and bool(torch.equal(old, new))
    return type(old) is type(new) and bool(old == new)


def _python_generators() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), state[1].tobytes(), state[2]


def custom_gradients(run: Callable[[], Any]) -> Iterator[str]:
    """Yield the names of the user's own autograd functions that an output comes from."""
    with torch.enable_grad():
        output = run()
    waiting = [t.grad_fn for t in torch.utils._pytree.tree_leaves(output) if _has_graph(t)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield type(node).__name__.removesuffix("Backward")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _has_graph(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.grad_fn is not None
