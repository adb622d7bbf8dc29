"""Training time of a job, and its limit; the time of what a device computes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Training time of a job: the seconds in its checkpoint, and those since.

    The sum covers all attempts and sessions that led to the current position. Work that was lost
    with a dead worker is not counted. Of a fusion group of several `jobs`, each gets an equal share
    of the seconds.
    """

    def __init__(
        self,
        limit_s: float | None = None,
        jobs: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = limit_s
        self._jobs = jobs
        self._clock = clock
        self._began = clock()
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._before + (self._clock() - self._began) / self._jobs

    @property
    def expired(self) -> bool:
        """Whether the limit is reached."""
        return self.limit_s is not None and self.seconds >= self.limit_s

    def continue_from(self, seconds: float) -> None:
        """Add the seconds of a checkpoint; in a fusion group, the greatest of its jobs counts."""
        self._before = max(self._before, seconds)

    def call_uncounted(self, look: Callable[[], bool]) -> bool:
        """Call `look`, in which a job may pause, without counting its time."""
        since = self._clock()
        answer = look()
        self._began += self._clock() - since
        return answer


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Mark the moment; on a GPU, when it will have computed all that it was given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(one: float | torch.cuda.Event, other: float | torch.cuda.Event) -> float:
    """Return the seconds between two marks, for which a GPU has been waited."""
    if isinstance(one, torch.cuda.Event):
        assert isinstance(other, torch.cuda.Event)
        return float(one.elapsed_time(other)) / 1000
    assert isinstance(other, float)
    return other - one
