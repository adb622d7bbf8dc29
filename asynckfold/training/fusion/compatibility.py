"""Whether models are replicas of one, and properties of a model that no trace would show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from asynckfold.training import model_state
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.tracing import Arguments, copied
from asynckfold.training.model_state import attributes, describe, is_plain


def check(models: Sequence[nn.Module], arguments: Arguments) -> None:
    """Refuse models that are not replicas, or whose forward does more than compute."""
    for problem in chain(_differences(models), _obstacles(models[0])):
        raise NotFusible(problem)
    for training in (False, True):
        _run(models[0], arguments, training=training)


def surely_alike(models: Sequence[nn.Module]) -> bool:
    """Whether equal attributes prove that all replicas compute the same; if not, compare traces."""
    first = models[0]
    return all(
        vars(other)[name] is value or is_plain(value)
        for model in models[1:]
        for mine, other in zip(first.modules(), model.modules(), strict=True)
        for name, value in attributes(mine).items()
    )


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
        for (path, mine), (_, other) in zip(
            first.named_modules(), model.named_modules(), strict=True
        ):
            if _kind(mine) != _kind(other):
                yield f"the replicas differ: {describe(path, mine)} is a {type(other).__name__}"
                return
            yield from (
                f"the replicas differ: {describe(path, mine)} has {name} {value!r} and {theirs!r}"
                for name, value in _settings(mine).items()
                if (theirs := _settings(other).get(name)) != value
            )


def _kind(module: nn.Module) -> Any:
    # Each parametrized layer has a distinct class.
    if nn.utils.parametrize.is_parametrized(module):
        return type(module).__name__, type(module).__bases__
    return type(module)


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
    """Return the plain attributes of a module, containers included."""
    return {name: value for name, value in attributes(module).items() if is_plain(value)}


def _obstacles(model: nn.Module) -> Iterator[str]:
    yield from model_state.hooks(model)
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            yield f"{describe(path, module)} is recurrent, and its kernel has no batched form"
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            yield f"parameter {name} gets its shape only in the first forward"
        elif parameter.layout is not torch.strided:
            yield f"parameter {name} is not a dense tensor"


def _run(model: nn.Module, arguments: Arguments, *, training: bool) -> None:
    """Run a copy; refuse side effects of its forward, and autograd functions of the user's."""
    probe = copied(model).train(training)
    outputs: list[Any] = []

    def forward() -> None:
        # The user's code may raise anything; that becomes the reason.
        try:
            with torch.enable_grad():
                outputs.append(arguments.call(probe, arguments.example))
        except Exception as error:
            raise NotFusible(f"its forward raises {type(error).__name__}: {error}") from error

    for problem in model_state.side_effects_of(probe, forward):
        raise NotFusible(problem)
    for name in _custom_functions(outputs):
        # A trace would look into the function, and differentiate what it finds.
        raise NotFusible(f"the model uses {name}, a custom autograd function")


def _custom_functions(outputs: Any) -> Iterator[str]:
    """Yield the names of the user's autograd functions that outputs come from."""
    waiting = [item.grad_fn for item in pytree.tree_leaves(outputs) if _has_graph(item)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield type(node).__name__.removesuffix("Backward")
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting.extend(new)


def _has_graph(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.grad_fn is not None
