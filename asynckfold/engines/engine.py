"""The contract between the sweep and whoever executes placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from asynckfold.jobs.messages import RunEvent, Task
from asynckfold.jobs.placement import Load, Placement

Tell = Callable[[RunEvent], None]
"""Receives the events of tasks."""

ReadLoad = Callable[[Sequence[Placement], Mapping[int, tuple[int, ...]]], Load]
"""(running placements, pinned cores by process of this run) → the load."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a placement.

    Parameters
    ----------
    results : list
        One entry per task: a `Result`, or None if the worker was asked to stop or had reported the
        result before. For a dry run or a baseline: its single finding.
    pid : int
        Its process.
    peak_memory : int
        Largest resident set of that process, in bytes.
    """

    results: list[Any]
    pid: int
    peak_memory: int = 0


class Engine(Protocol):
    """Executes placements.

    Rules for every implementation:

    - `load` never blocks for long and never raises; it subtracts the engine's work. The sweep
      calls it at every tick, so an engine with workers also supervises them there: a worker that
      hangs is killed, and its future ends with a `WorkerDiedError` of outcome ``"hang"``.
    - `submit` returns at once (a serial engine may return a completed future). The future ends with
      an `Answer`, with a `WorkerDiedError` if the process ended without one, or with a
      `StorageError` if the disk failed or no worker can be started; exceptions of user code are
      results, not exceptions.
    - Events of a task arrive through the ``tell`` passed at construction, from any thread, before
      its future ends.
    - `shift` returns at once. The cores change neither results nor outcome.
    - `close` asks running tasks to save themselves, waits up to `grace_s` for their futures, then
      ends everything that the engine started. It may be called twice.

    Attributes
    ----------
    runs_in_submit : bool
        Whether `submit` returns when its tasks have ended.
    batch_seconds : float or None
        Length of batches of short jobs, where starting a placement is slow; None for the default.
    """

    runs_in_submit: bool
    batch_seconds: float | None

    def load(self, running: Sequence[Placement]) -> Load:
        """Return one snapshot of the machine, or of all nodes of the cluster (`Load.peers`)."""

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Start a placement."""

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Move a placement to other cores; without any, pause it until it gets some."""

    def close(self, grace_s: float = 0.0) -> None:
        """End all tasks and release all resources."""
