"""The fixture ``warm`` and the processes that it starts, as tests see them: see `tests.nursery`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from asynckfold import AsyncKFoldError, RunStore


class Started(Protocol):
    """A process of Python; ``returncode`` is known once it has ended."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended."""

    def printed(self) -> str:
        """Return what it has printed."""

    def send_signal(self, number: int) -> None:
        """Send a signal to it."""

    def kill(self) -> None:
        """Kill it."""


class Nursery(Protocol):
    """Starts processes of Python that need not import torch again."""

    def start(
        self,
        words: Sequence[object],
        output: Path,
        environment: Mapping[str, str] | None = None,
        errors: Path | None = None,
        ignored: Sequence[int] = (),
    ) -> Started:
        """Start what ``python WORDS`` would be; what it prints is appended to ``output``."""


def finished(root: Path) -> int:
    """Return how many results a run has so far."""
    try:
        with RunStore.read(root) as store:
            return len(store.finished())
    except AsyncKFoldError:
        return 0  # there is no run yet


def training(root: Path) -> bool:
    """Whether a job of the run has ended an epoch."""
    try:
        with RunStore.read(root) as store:
            return bool(store.epochs())
    except AsyncKFoldError:
        return False
