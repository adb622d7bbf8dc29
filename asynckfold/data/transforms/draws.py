"""Counter-based random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WORD = (1 << 64) - 1

_GOLDEN = 0x9E3779B97F4A7C15


def _mix(state: int) -> int:
    """One state of `splitmix64`; Python integers are faster for a single number."""
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
    state: npt.NDArray[np.uint64] = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    state += np.uint64(seed & _WORD)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


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
class JoinedDraw:
    """The draws of several batches of one size, joined."""

    seeds: Sequence[int]  # of each batch's job
    epoch: int
    batches: npt.NDArray[np.int64]  # sample numbers, (R, B)
    place: int = 0
    sent: Mapping[int, Tensor] = field(default_factory=dict)  # as in `Draw`, of all batches

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Sample numbers, of all batches."""
        return self.batches.reshape(-1)

    def bits(self) -> npt.NDArray[np.uint64]:
        """Return one 64-bit number per sample, the same as in its own batch."""
        parts = zip(self.seeds, self.batches, strict=True)
        own = [Draw(seed, self.epoch, indices, self.place) for seed, indices in parts]
        return np.concatenate([draw.bits() for draw in own])

    def at(self, place: int) -> JoinedDraw:
        """Return the draw of another step for the same samples."""
        return replace(self, place=place)

    def bits_on(self, device: torch.device) -> Tensor:
        """Return `bits` as int64 on a device; they were sent before, or are now."""
        if self.place in self.sent:
            return self.sent[self.place]
        return torch.from_numpy(self.bits().view(np.int64)).to(device)


AnyDraw = Draw | JoinedDraw
