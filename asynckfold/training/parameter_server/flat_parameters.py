"""The parameters of a model as one vector, to be sent and divided into parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.errors import InputError, Problem, refuse
from asynckfold.training.process_group.shared_tensors import copy_each

Floats = npt.NDArray[np.floating[Any]]


def as_bytes(values: Floats) -> memoryview:
    """Return the memory of an array."""
    return values.data.cast("B")


@dataclass(frozen=True)
class ParameterLayout:
    """The parameters of a model, in their order, as one vector.

    ``shapes`` has name and shape of each, tied ones once; ``dtype`` is that of the vector, in which
    smaller types are exact.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """Return that of a model; raise `InputError` for parameters that are not real."""
        named = list(model.named_parameters())
        for name, item in named:
            if not item.is_floating_point():
                rule, received = "parameters must be real numbers", f"{name} of {item.dtype}"
                raise InputError.one(rule, received, "Use another model.")
        double = any(item.dtype == torch.float64 for _, item in named)
        shapes = tuple((name, tuple(item.shape)) for name, item in named)
        return cls(shapes, "float64" if double else "float32")

    @property
    def total(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    def part(self, index: int, count: int) -> slice:
        """Return the slice that one of several servers holds; lengths differ by one at most."""
        return slice(self.total * index // count, self.total * (index + 1) // count)

    def empty(self) -> torch.Tensor:
        """Return a vector of zeros."""
        return torch.zeros(self.total, dtype=getattr(torch, self.dtype))

    def vector(self, model: nn.Module) -> torch.Tensor:
        """Return a copy of a model's parameters."""
        vector = self.empty()
        copy_each(self.views(vector), model.parameters())
        return vector

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters as views of a vector."""
        sizes = [math.prod(shape) for _, shape in self.shapes]
        pieces = zip(torch.split(vector, sizes), self.shapes, strict=True)
        return [piece.view(shape) for piece, (_, shape) in pieces]

    def entries(self) -> list[Any]:
        """Return dtype, names and shapes as they are after a way through JSON."""
        entries: list[Any] = json.loads(json.dumps([self.dtype, *self.shapes]))
        return entries


@dataclass(frozen=True)
class ServedParameters:
    """Parameters, or a part of them, to which several replicas push.

    ``counts`` are the pushes, and the sum and maximum of their staleness: the number of pushes of
    others since the replica fetched the parameters. ``lock`` admits one replica at a time.
    """

    values: Floats
    counts: npt.NDArray[np.int64]
    lock: AbstractContextManager[Any]
    staleness_aware: bool

    def push(self, update: Floats, seen: int) -> None:
        """Subtract an update of a replica, whose parameters include `seen` pushes."""
        with self.lock:
            staleness = int(self.counts[0]) - seen
            self.counts[:2] += (1, staleness)
            self.counts[2] = max(self.counts[2], staleness)
            if self.staleness_aware:
                update /= max(1, staleness)
            # NumPy stays in this thread; torch would start a thread pool for each of ours.
            np.subtract(self.values, update, out=self.values)

    def fetch(self, room: Floats) -> int:
        """Copy the parameters to a buffer; return how many pushes are in them."""
        with self.lock:
            np.copyto(room, self.values)
            return int(self.counts[0])


def refuse_counts(**counts: object) -> None:
    """Refuse anything but integers of at least 1."""
    rule = "{} must be a whole number of at least 1"
    refuse(
        Problem(rule.format(name), repr(value), f"Pass {name}=1.")
        for name, value in counts.items()
        if type(value) is not int or value < 1
    )


def refuse_other_model(mine: ParameterLayout, theirs: Iterable[Any]) -> None:
    """Refuse the `entries` of a server with another model."""
    for one, other in zip_longest(mine.entries(), theirs):
        if one != other:
            raise InputError.one(
                "a replica must have the model of its server",
                f"{one}, where the server has {other}",
                "Build both from the same code with the same arguments.",
            )


def refuse_shards(shards: Iterable[Any], count: int) -> None:
    """Refuse servers that do not hold all of `count` different parts."""
    wanted = [[number, count] for number in range(count)]
    if sorted(shards) != wanted:
        raise InputError.one(
            f"{count} addresses must be those of servers with shard=(0, {count}) to "
            f"({count - 1}, {count})",
            f"shards {', '.join(map(str, shards))}",
            "Pass the addresses of all servers of the model.",
        )
