"""What a run leaves to others, checked against the machine before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asynckfold.errors import Problem
from asynckfold.system.limits import allowed_cores
from asynckfold.system.machine import Machine, total_memory
from asynckfold.system.units import MIB, gibibytes, in_bytes

NICEST = 19


@dataclass(frozen=True)
class Sharing:
    """The arguments of `AsyncKFold` of the same names, which documents them."""

    reserve_cores: int = 0
    max_memory: float | str | None = None
    nice: int = 0
    min_free_memory: float | str = "256MiB"
    max_wait: float | None = 3600.0
    yield_to_others: bool = False

    def machine(self, devices: Any = "auto") -> Machine:
        """Return the machine as far as this run may use it."""
        total = total_memory()
        most = self.max_memory
        return Machine(
            devices,
            reserve_cores=self.reserve_cores,
            max_memory=None if most is None else in_bytes(most, total),
            min_free_memory=in_bytes(self.min_free_memory, total),
            yields=self.yield_to_others,
        )

    def problems(self, parallelize: bool = True) -> Iterator[Problem]:
        """Yield all that is wrong with these settings on this machine."""
        yield from self._core_problems()
        yield from self._memory_problems()
        if not _is_whole(self.nice) or not 0 <= self.nice <= NICEST:
            yield Problem(
                f"nice must be a whole number from 0 to {NICEST}",
                repr(self.nice),
                "Pass nice=10 to let others come first.",
            )
        elif self.nice and not parallelize:
            yield Problem(
                "nice is for worker processes, and parallelize=False starts none",
                f"nice={self.nice}",
                "Drop one of them.",
            )
        if self.max_wait is not None and not _is_positive(self.max_wait):
            yield Problem(
                "max_wait must be a number of seconds above 0, or None",
                repr(self.max_wait),
                "Pass max_wait=3600, or None to wait for ever.",
            )

        wanted: object = self.yield_to_others
        if not isinstance(wanted, bool):
            yield Problem(
                "yield_to_others must be True or False",
                repr(self.yield_to_others),
                "Pass yield_to_others=True to let running jobs make room for others.",
            )
        elif wanted and not parallelize:
            yield Problem(
                "yield_to_others moves and pauses workers, and parallelize=False starts none",
                "yield_to_others=True",
                "Drop one of them.",
            )

    def _core_problems(self) -> Iterator[Problem]:
        cores, reserved = len(allowed_cores()), self.reserve_cores
        if not _is_whole(reserved) or reserved < 0:
            yield Problem(
                "reserve_cores must be a whole number of at least 0",
                repr(reserved),
                "Pass reserve_cores=1 to leave one core free.",
            )
        elif reserved >= cores:
            yield Problem(
                "reserve_cores must leave at least one core to the run",
                f"{reserved} of the {cores} that this process may use",
                f"Pass reserve_cores={cores - 1} or less.",
            )

    def _memory_problems(self) -> Iterator[Problem]:
        total = total_memory()
        for name, value in (
            ("max_memory", self.max_memory),
            ("min_free_memory", self.min_free_memory),
        ):
            if value is None and name == "max_memory":
                continue
            try:
                size = in_bytes(value, total)
            except ValueError:
                yield Problem(
                    f"{name} must be a share of the memory up to 1, or bytes such as '2GiB'",
                    repr(value),
                    f"Pass {name}=0.1, '10%' or '2GiB'.",
                )
                continue
            if name == "max_memory" and not size:
                yield Problem(
                    "max_memory must leave some memory to the run",
                    f"{value!r} of {gibibytes(total, 2)}",
                    "Pass max_memory='8GiB', or leave it out.",
                )
            if name == "min_free_memory" and 0 < total <= size:
                yield Problem(
                    "min_free_memory must be less than the memory that this process may use",
                    f"{value!r}, which is {gibibytes(size, 2)} of {gibibytes(total, 2)}",
                    "Pass min_free_memory=0.1 or less.",
                )


def room_problems(
    expected: Mapping[str, int], most: int | None, together: Mapping[str, int] | None = None
) -> Iterator[Problem]:
    """Yield which models no memory is allowed for.

    Parameters
    ----------
    expected : Mapping of str to int
        Bytes that a job is expected to take, by model.
    most : int or None
        Bytes that all running jobs may take.
    together : Mapping of str to int, optional
        How many jobs of a model are trained as one at most, by model, where that is not just one.
    """
    if most is None:
        return
    for model, count in (together or {}).items():
        size = count * expected[model]
        if expected[model] <= most < size:
            yield Problem(
                "max_memory must be enough for jobs that are trained as one",
                f"{gibibytes(most, 2)}, and {gibibytes(size, 2)} expected for "
                f"{count} jobs of {model}",
                f"Pass max_memory='{math.ceil(size / MIB)}MiB' or more, or fuse fewer.",
            )
    for model, size in expected.items():
        if size > most:
            yield Problem(
                "max_memory must be enough for one job of each model",
                f"{gibibytes(most, 2)}, and {gibibytes(size, 2)} expected for a job of {model}",
                f"Pass max_memory='{math.ceil(size / MIB)}MiB' or more, or leave {model} out.",
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]
