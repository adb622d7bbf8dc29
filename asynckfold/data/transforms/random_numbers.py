"""Random numbers: counter-based draws for batches, and the global generators, seeded and watched.

Comparing the large states of the global generators takes 40 us. Instead, each has a twin: after the
code has run, both give a number, and if these differ, one of the two was used meanwhile.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asynckfold.data.transforms.trees import same_sample
from asynckfold.jobs.recipe import parts_of

_WORD = (1 << 64) - 1

_GOLDEN = 0x9E3779B97F4A7C15


def _mix(state: Any) -> Any:
    """Mix states of `splitmix64`: an array, or a Python integer, which is faster for one number."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)


def splitmix64(seed: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return numbers of the SplitMix64 sequence of `seed` (mod 2**64) by position, from 0.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". The state is a
    counter, so any number can be computed without the ones before it.

    >>> hex(int(splitmix64(0, np.array([0]))[0]))
    '0xe220a8397b1dcdaf'
    """
    state = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    mixed: npt.NDArray[np.uint64] = _mix(state + np.uint64(seed & _WORD))
    return mixed


@dataclass(frozen=True, eq=False)
class Draw:
    """The random numbers of one step: one 64-bit number per sample of a batch."""

    seed: int
    epoch: int
    indices: npt.NDArray[np.int64]  # sample numbers, (B,)
    place: int = 0  # position of the step in its view
    sent: Mapping[int, Tensor] = field(default_factory=dict)  # bits on the device, by place

    def bits(self) -> npt.NDArray[np.uint64]:
        """Return one 64-bit number per sample, shape (B,)."""
        key = 0
        for part in (self.seed, self.epoch, self.place):
            key = _mix((key + part + _GOLDEN) & _WORD)
        return splitmix64(key, self.indices)

    def at(self, place: int) -> Draw:
        """Return the draw of another step for the same samples."""
        return replace(self, place=place)

    def bits_on(self, device: torch.device) -> Tensor:
        """Return `bits` as int64 on a device; they were sent before, or are now."""
        if self.place in self.sent:
            return self.sent[self.place]
        return torch.from_numpy(self.bits().view(np.int64)).to(device)


@dataclass(frozen=True, eq=False)
class JoinedDraw(Draw):
    """The draws of several batches of one size, joined."""

    seeds: Sequence[int] = ()  # of each batch's job

    def bits(self) -> npt.NDArray[np.uint64]:
        """Return one 64-bit number per sample, the same as in its own batch."""
        parts = zip(self.seeds, np.split(self.indices, len(self.seeds)), strict=True)
        draws = [Draw(seed, self.epoch, indices, self.place) for seed, indices in parts]
        return np.concatenate([draw.bits() for draw in draws])


# The global generators


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU); restore them afterwards."""
    with generators_kept():
        seed_generators(seed)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (CPU) afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002  users' transforms draw from it
        torch.set_rng_state(states[2])


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  users' transforms draw from it
    # torch.manual_seed would also touch every other device.
    torch.default_generator.manual_seed(seed % 2**64)


def varies(call: Callable[[], Any]) -> bool:
    """Return whether a call is random: it draws from a global generator, or two results differ.

    A call that draws is random even if both results are equal: a rare event (a flip in one of a
    hundred samples) does not show in a few results.
    """
    results = []
    for seed in (1, 2):
        with generators_kept():
            watch = Watch(seed=seed)
            results.append(call())
            if watch.drew():
                return True
    return not same_sample(*results)


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
    `generators_kept`), and the generators that `holders` hold. `unseeded` tells whether one of the
    latter was used, which nobody seeds.
    """

    def __init__(self, *holders: Any, seed: int = 0) -> None:
        self._held = held_generators(*holders)
        self.unseeded = False
        self._python = random.Random()
        self._numpy = np.random.RandomState()
        self._torch = torch.Generator(device="cpu")
        self._words = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2)]
        self.sync(seed)

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
        held_used = any(
            _state(generator) != before
            for generator, before in zip(self._held, self._states, strict=True)
        )
        self.unseeded |= held_used
        used = held_used or not all(same)
        if used:
            self.sync(0)
        return used


def held_generators(*holders: Any) -> list[Any]:
    """Return the generators that objects hold: in attributes, closures, defaults and globals.

    >>> rng = np.random.default_rng(0)
    >>> held_generators(lambda x: x + rng.random()) == [rng]
    True
    >>> held_generators(lambda x: x + np.random.random())
    []
    """
    held: list[Any] = []
    seen = {id(generator) for generator in _GLOBAL}
    todo = list(holders)
    while todo and len(seen) < _MOST_OBJECTS:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if _state(item) is not None:
            held.append(item)
        else:
            todo.extend(_parts(item))
    return held


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
    if issubclass(kind, (str, bytes, int, float, ModuleType, np.ndarray, torch.Tensor)):
        return
    if isinstance(item, type) and item.__module__.partition(".")[0] in _LIBRARIES:
        return
    # A long list is one of samples.
    most = 100 if issubclass(kind, (list, tuple)) else _MOST_OBJECTS
    for path, part in islice(parts_of(item), most):
        # Of classes, only those of objects: their methods may use a generator of their module.
        if not isinstance(part, type) or path in (".__class__", ".__bases__"):
            yield part


_LIBRARIES = ("builtins", "torch", "torchvision", "numpy")
