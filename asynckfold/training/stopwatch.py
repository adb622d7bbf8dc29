"""How long a job has trained, and whether that is longer than it may."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """The seconds that a job has trained: those that its checkpoint tells, and those since.

    A checkpoint carries them, so that they are those of all attempts and sessions that brought the
    job to where it is; what was lost with a worker that died is not charged to its job.

    Parameters
    ----------
    limit_s : float or None
        Seconds that the job may train; None: any.
    jobs : int
        How many are trained as one: each has an equal part of the seconds.
    clock : callable
        Seconds, monotonic.

    Examples
    --------
    >>> now = iter([100, 103, 113, 114, 115])
    >>> watch = Stopwatch(limit_s=10, jobs=2, clock=lambda: next(now))
    >>> watch.go_on_from(7)
    >>> watch.leaving_out(lambda: False)  # a pause from 103 to 113
    False
    >>> watch.seconds, watch.over  # at 114: 4 seconds of two jobs; at 115
    (9.0, False)
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
        """What the job has trained so far."""
        return self._before + (self._clock() - self._began) / self._jobs

    @property
    def over(self) -> bool:
        """Whether that is as much as it may."""
        return self.limit_s is not None and self.seconds >= self.limit_s

    def go_on_from(self, seconds: float) -> None:
        """Add what a checkpoint tells; of jobs that are trained as one, the greatest counts."""
        self._before = max(self._before, seconds)

    def leaving_out(self, look: Callable[[], bool]) -> bool:
        """Return what a look finds; a job pauses within it, and that is no training."""
        since = self._clock()
        found = look()
        self._began += self._clock() - since
        return found
