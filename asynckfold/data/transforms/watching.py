"""Detect whether code draws random numbers, at the cost of one comparison per sample.

Comparing the large states of the global generators takes 40 us. Instead, each has a twin: after the
code has run, both give a number, and if these differ, one of the two was used meanwhile.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from asynckfold.data.transforms.generators import seed_generators

_MOST_OBJECTS = 2000
"""How many objects are looked at in search of generators: what is held in a list of samples is
data."""

_GLOBAL = (
    random.random.__self__,  # type: ignore[attr-defined]
    np.random.mtrand._rand,
    torch.default_generator,
)


class Watch:
    """Tells whether a generator was used since the last check.

    Watches the global generators of Python, NumPy and torch (CPU), which it seeds (use it within
    `generators_kept`), and the generators that `holders` hold; `own` tells whether one of those was
    used, which nobody seeds.
    """

    def __init__(self, *holders: Any) -> None:
        self._held = held_generators(*holders)
        self.own = False
        self._python = random.Random()
        self._numpy = np.random.RandomState()
        self._torch = torch.Generator(device="cpu")
        self._words = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2)]
        self.sync(0)

    def sync(self, seed: int) -> None:
        """Seed the global generators and start watching."""
        seed_generators(seed)
        self._python.seed(seed)
        self._numpy.seed(seed % 2**32)
        self._torch.manual_seed(seed % 2**64)
        self._states = [_state(generator) for generator in self._held]

    def drew(self) -> bool:
        """Return whether a generator was used since the last check."""
        self._words[0].random_()
        self._words[1].random_(generator=self._torch)
        same = [
            random.random() == self._python.random(),
            np.random.random_sample() == self._numpy.random_sample(),  # noqa: NPY002
            self._words[0].item() == self._words[1].item(),
        ]
        own = self._own_used()
        self.own = self.own or own
        used = own or not all(same)
        if used:
            self.sync(0)
        return used

    def _own_used(self) -> bool:
        return any(
            _state(generator) != before
            for generator, before in zip(self._held, self._states, strict=True)
        )


def held_generators(*holders: Any) -> list[Any]:
    """Return the generators that objects hold: in attributes, closures, defaults and globals.

    >>> rng = np.random.default_rng(0)
    >>> held_generators(lambda x: x + rng.random()) == [rng]
    True
    >>> held_generators(lambda x: x + np.random.random())
    []
    """
    found: list[Any] = []
    seen = {id(generator) for generator in _GLOBAL}
    todo = list(holders)
    while todo and len(seen) < _MOST_OBJECTS:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if _state(item) is not None:
            found.append(item)
        else:
            todo.extend(_parts(item))
    return found


def _state(item: Any) -> bytes | None:
    """Return the state of a generator; None for anything else."""
    if isinstance(item, random.Random):
        known = type(item).getstate is random.Random.getstate
        return pickle.dumps(item.getstate()) if known else None
    if isinstance(item, np.random.Generator):
        return pickle.dumps(item.bit_generator.state)
    if isinstance(item, np.random.RandomState):
        return pickle.dumps(item.get_state())
    if isinstance(item, torch.Generator):
        return item.get_state().numpy().tobytes()
    return None


def _parts(item: Any) -> Iterator[Any]:
    kind = type(item)
    if issubclass(kind, (str, bytes, int, float, type, ModuleType, np.ndarray, torch.Tensor)):
        return
    if issubclass(kind, dict):
        yield from list(item.values())[:_MOST_OBJECTS]
    elif issubclass(kind, (list, tuple)):
        # A long list is one of samples.
        yield from item[:100]
    elif issubclass(kind, partial):
        yield from (item.func, item.args, item.keywords)
    elif issubclass(kind, MethodType):
        yield from (item.__self__, item.__func__)
    elif issubclass(kind, FunctionType):
        yield from _function_parts(item)
    else:
        yield getattr(item, "__dict__", None)
        yield from _methods(kind)


def _function_parts(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty until its variable is assigned
            continue
    yield function.__defaults__
    yield function.__kwdefaults__
    scope = function.__globals__
    for name in function.__code__.co_names:
        if name in scope and not isinstance(scope[name], ModuleType):
            yield scope[name]


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yield the methods of a user's class, which may use a generator of their module."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("builtins", "torch", "torchvision", "numpy"):
            yield from (part for part in vars(base).values() if isinstance(part, FunctionType))
