"""The contract between the sweep and whoever executes placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from asynckfold.jobs.messages import RunEvent, Task
from asynckfold.jobs.placement import Load, Placement

Tell = Callable[[RunEvent], None]

Look = Callable[[Sequence[Placement], Mapping[int, tuple[int, ...]]], Load]
"""(what runs, own processes and the cores that each is pinned to) → the load."""


@dataclass(frozen=True)
class Answer:
    """What a placement came to.

    Parameters
    ----------
    results : list
        One entry a task: a `Result`, or None where the worker was asked to stop or told the result
        before. For a preflight or
        a baseline: its single finding.
    pid : int
        The process that did it.
    peak_memory : int
        Largest resident set meanwhile, bytes.
    """

    results: list[Any]
    pid: int
    peak_memory: int = 0


class Engine(Protocol):
    """Executes placements.

    Rules for every implementation:

    - `load` never blocks for long and never raises; it subtracts the engine's own work. The sweep
      calls it every tick, so that an engine also sees after its workers there: one that hangs is
      killed, and its future ends with `WorkerDiedError` of the outcome ``"hang"``. An engine in
      this very process cannot.
    - `submit` returns at once (a serial engine may return a future that is done already). The
      future ends with an `Answer`, with `WorkerDiedError` when the process ended without one, or
      with `StorageError` when the disk refused or the machine starts no worker at all; user
      exceptions are results, not exceptions.
    - Events of a task arrive through the ``tell`` that the engine was made with, before its future
      ends, from any thread.
    - `shift` returns at once. Other cores change neither what a placement computes nor how it ends.
    - `close` asks running tasks to save themselves, waits up to `grace_s` for their futures, then
      ends everything that the engine started. It may be called twice.
    """

    def load(self, running: Sequence[Placement]) -> Load:
        """Return one snapshot of the machine."""
        ...

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Start a placement."""
        ...

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Let a placement go on with other cores; without any, pause it until it gets some."""
        ...

    def close(self, grace_s: float = 0.0) -> None:
        """End what runs and let go of everything."""
        ...
