"""Whether models are replicas of one, and properties of a model that no trace would show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from asynckfold.training import model_state
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.tracing import Arguments, copied, first_sentence
from asynckfold.training.model_state import attributes, is_plain


def check(models: Sequence[nn.Module], arguments: Arguments) -> None:
    """Refuse models that are not replicas, or whose forward does more than compute."""
    for problem in chain(_differences(models), model_state.hooks(models[0])):
        raise NotFusible(problem)
    probe = copied(models[0])
    for training in (False, True):
        # The user's code may raise anything; that becomes the reason.
        try:
            run = partial(arguments.call, probe.train(training), arguments.example)
            effects = list(model_state.side_effects_of(probe, run))
        except Exception as error:
            raise NotFusible(f"its forward raises {first_sentence(error)}") from error
        for problem in effects:
            raise NotFusible(problem)


def surely_alike(models: Sequence[nn.Module]) -> bool:
    """Whether equal attributes prove that all replicas compute the same; if not, compare traces."""
    return all(
        type(mine) is type(other)
        and all(
            vars(other).get(name) is value or (is_plain(value) and vars(other).get(name) == value)
            for name, value in attributes(mine).items()
        )
        for model in models[1:]
        for mine, other in zip(models[0].modules(), model.modules(), strict=True)
    )


def _differences(models: Sequence[nn.Module]) -> Iterator[str]:
    owners: dict[int, int] = {}
    for row, model in enumerate(models):
        for tensor in chain(model.parameters(), model.buffers()):
            if owners.setdefault(id(tensor), row) != row:
                yield "two replicas share a parameter or buffer"
        if _tensors(model) != _tensors(models[0]):
            yield "the replicas differ in the names, shapes, types or ties of their tensors"


def _tensors(model: nn.Module) -> list[tuple[Any, ...]]:
    numbers: dict[int, int] = {}
    return [
        (name, t.shape, t.dtype, t.device, t.requires_grad, numbers.setdefault(id(t), len(numbers)))
        for name, t in chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    ] + [(path,) for path, _ in model.named_modules()]
