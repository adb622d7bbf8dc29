"""The parameters of a model as one vector, to be sent and divided into parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.errors import Problem, refuse
from asynckfold.training.parameter_server.wire import FrameError
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
        """Return that of a model; raise `InputError` without real parameters."""
        named = list(model.named_parameters())
        refuse(_parameter_problems(named))
        double = any(item.dtype == torch.float64 for _, item in named)
        shapes = tuple((name, tuple(item.shape)) for name, item in named)
        return cls(shapes, "float64" if double else "float32")

    @property
    def total(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    def part(self, index: int, count: int) -> slice:
        """Return the slice that one of several servers holds; lengths differ by one at most.

        Examples
        --------
        >>> layout = ParameterLayout((("weight", (2, 3)), ("bias", (1,))), "float32")
        >>> layout.part(0, 2), layout.part(1, 2)
        (slice(0, 3, None), slice(3, 7, None))
        """
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

    def difference(self, other: ParameterLayout) -> str:
        """Return the first difference to another layout; empty if there is none.

        Examples
        --------
        >>> layout = ParameterLayout((("weight", (2, 3)), ("bias", (2,))), "float32")
        >>> layout.difference(ParameterLayout((("weight", (2, 4)),), "float32"))
        'weight of shape (2, 4) instead of weight of shape (2, 3)'
        >>> layout.difference(ParameterLayout(layout.shapes[:1], "float32"))
        '1 parameters instead of 2'
        """
        for (name, shape), (theirs, their_shape) in zip(self.shapes, other.shapes, strict=False):
            if (name, shape) != (theirs, their_shape):
                return f"{theirs} of shape {their_shape} instead of {name} of shape {shape}"
        if len(self.shapes) != len(other.shapes):
            return f"{len(other.shapes)} parameters instead of {len(self.shapes)}"
        return "" if self.dtype == other.dtype else f"{other.dtype} instead of {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the byte order of this machine."""
        return {"shapes": self.shapes, "dtype": f"{np.dtype(self.dtype).newbyteorder('=').str}"}

    @classmethod
    def from_json(cls, data: Any) -> ParameterLayout:
        """Undo `to_json`; raise `FrameError` for anything else."""
        try:
            shapes = tuple((str(name), tuple(map(int, shape))) for name, shape in data["shapes"])
            code = str(data["dtype"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FrameError(f"the message does not describe a model: {error}") from error
        known = {np.dtype(name).str: name for name in ("float32", "float64")}
        return cls(shapes, known.get(code, code))


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


def _parameter_problems(named: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Problem]:
    if not named:
        yield Problem("a model must have parameters", "none", "Pass the model that is trained.")
    for name, item in named:
        if not item.is_floating_point():
            yield Problem(
                "parameters must be real numbers", f"{name} of {item.dtype}", "Use another model."
            )


def count_problems(**counts: object) -> Iterator[Problem]:
    """Refuse anything but integers of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(
                f"{name} must be a whole number of at least 1", repr(value), f"Pass {name}=1."
            )


def lr_problems(groups: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    """Refuse invalid learning rates."""
    for group in groups:
        lr = group["lr"]
        if not isinstance(lr, (int, float)) or not 0 <= lr < math.inf:
            yield Problem("lr must be a number of at least 0", repr(lr), "Pass for instance 0.1.")


def timeout_problems(timeout_s: float) -> Iterator[Problem]:
    """Refuse invalid timeouts."""
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        yield Problem("timeout_s must be a number above 0", repr(timeout_s), "Pass seconds.")


def shard_problems(shard: object, total: int) -> Iterator[Problem]:
    """Refuse anything but a part of `total` numbers."""
    if not is_part(shard, total):
        yield Problem(
            "shard must be (index, count), index from 0 to count - 1, and each part must have "
            f"one of the model's {total} numbers",
            repr(shard),
            "Pass (0, 2) for the first of two servers.",
        )


def is_part(shard: object, total: int) -> bool:
    """Whether it is (index, count) of at most `total` parts."""
    return (
        isinstance(shard, (tuple, list))
        and len(shard) == 2
        and all(type(number) is int for number in shard)
        and 0 <= shard[0] < shard[1] <= total
    )


def model_problems(model: object) -> Iterator[Problem]:
    """Refuse what is no model."""
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        yield Problem(rule, f"{model!r:.80}", "Pass the model that is trained.")


def membership_problems(trained: Sequence[torch.Tensor], model: nn.Module) -> Iterator[Problem]:
    """Refuse parameters of other models."""
    if unfit := list(model_problems(model)):
        yield from unfit
        return
    known = set(map(id, model.parameters()))
    foreign = sum(id(item) not in known for item in trained)
    if foreign:
        yield Problem(
            "params must be parameters of the model",
            f"{foreign} that are not",
            "Pass model.parameters().",
        )


def folder_problems(checkpoint: str | Path | None) -> Iterator[Problem]:
    """Refuse a checkpoint without a folder."""
    if checkpoint is not None and not Path(checkpoint).absolute().parent.is_dir():
        yield Problem(
            "the folder of checkpoint must exist", str(checkpoint), "Make it, or pass another."
        )


def difference_problems(header: dict[str, Any]) -> Iterator[Problem]:
    """Refuse a replica with another model than the server."""
    if header.get("kind") == "refused":
        yield Problem(
            "a replica must have the model of its server",
            f"{header.get('difference')!s:.200}",
            "Build both from the same code with the same arguments.",
        )


def parts_problems(shards: Sequence[Any], count: int) -> Iterator[Problem]:
    """Refuse servers that do not hold `count` different parts."""
    fit = all(is_part(shard, count) and shard[1] == count for shard in shards)
    if not fit or len({shard[0] for shard in shards}) < len(shards):
        yield Problem(
            f"{count} addresses must be those of servers with shard=(0, {count}) to "
            f"({count - 1}, {count})",
            f"shards {', '.join(map(str, shards))}",
            "Pass the addresses of all servers of the model.",
        )
