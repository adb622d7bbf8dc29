"""Which workers hang, and what to do about it: a pure rule over a clock and heartbeats.

::

    silent for its limit ─► STACKS ── 0.25 s ─► KILL ── 5 s, still there ─► LOST
            ▲                  │
            └── heartbeat, requested pause, or a sleep of this process: the timer restarts

A worker is silent while its heartbeat does not change. Its limit is `stall_timeout`, and ten times
that in a long phase (start, first batch, which may compile, checkpoint). ``"auto"`` is generous: a
hang seen minutes late costs one core these minutes, a healthy worker killed costs a job. It is the
largest of 5 minutes (50 in a long phase; Dask also uses 5), 20 times the mean batch time of the
attempt, and twice its longest silence so far. The mean is exact even if batches are shorter than
the time between two calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from asynckfold.system.heartbeat import in_long_phase

AUTO_SECONDS = 300.0
"""Smallest limit of ``"auto"``."""

LONG_PHASE_FACTOR = 10
"""A start, a first batch or a checkpoint may take longer by this factor."""

MEAN_FACTOR, LONGEST_FACTOR = 20, 2

GAP_SECONDS, GAP_SHARE = 1.0, 0.1
"""A longer gap between two calls means that this process itself slept (Ctrl-Z, a closed laptop, a
frozen container): four ticks of the sweep, and a tenth of a long limit, so that a slow disk, which
makes each tick slow, cannot postpone a verdict for ever."""

STACKS_SECONDS = 0.25
"""Time to write the stacks: it takes a millisecond, unless the process is stopped."""

KILL_SECONDS = 5.0
"""A killed process that still exists after this time is stuck in the kernel."""


class Step(Enum):
    """What to do with a worker that hangs, in this order."""

    STACKS = "request its stacks"
    KILL = "kill it"
    LOST = "go on without it"


@dataclass(frozen=True)
class StallAction:
    """The next step against a worker, and the seconds of its silence."""

    key: Any
    step: Step
    silent_seconds: float


@dataclass
class _WorkerState:
    """The state of one worker at the last call; its attempt was first seen at ``began``."""

    heartbeat: int
    first: int
    began: float
    since: float
    longest: float = 0.0
    step: Step | None = None
    stepped: float = 0.0

    def moved(self, heartbeat: int, now: float) -> None:
        self.longest = max(self.longest, now - self.since)
        self.heartbeat, self.since = heartbeat, now
        if self.step is Step.STACKS:
            self.step = None

    def restart_timer(self, passed: float, now: float) -> None:
        """Restart the timer after a sleep of this process or a requested pause."""
        self.began += passed
        self.stepped = now
        if self.step in (None, Step.STACKS):
            self.step, self.since = None, now

    @property
    def mean(self) -> float:
        """Mean seconds per batch, including the start of the attempt; 0 before the first."""
        return (self.since - self.began) / max(1, self.heartbeat // 2 - self.first // 2)


class StallDetector:
    """Detects workers that hang; a new key is a new attempt.

    `timeout` seconds without a finished batch count as a hang; None: never.
    """

    def __init__(self, timeout: float | str | None) -> None:
        self._timeout = timeout
        self._seen: dict[Any, _WorkerState] = {}
        self._looked: float | None = None

    def look(
        self, now: float, heartbeats: Mapping[Any, int], paused: Collection[Any] = ()
    ) -> list[StallAction]:
        """Return the steps to take now; each step against a worker is returned once.

        Parameters
        ----------
        now : float
            Seconds of a monotonic clock.
        heartbeats : Mapping
            Heartbeat of each busy worker; workers that are left out are forgotten.
        paused : collection
            Workers in a requested pause, which does not count.
        """
        if self._timeout is None:
            return []
        passed, self._looked = now - (now if self._looked is None else self._looked), now
        self._seen = {key: seen for key, seen in self._seen.items() if key in heartbeats}
        verdicts = []
        for key, heartbeat in heartbeats.items():
            seen = self._seen.setdefault(key, _WorkerState(heartbeat, heartbeat, now, now))
            if key in paused or passed > max(GAP_SECONDS, GAP_SHARE * self.limit(key)):
                seen.restart_timer(passed, now)
            if heartbeat != seen.heartbeat:
                seen.moved(heartbeat, now)
            step = self._next_step(key, seen, now)
            if step is not None:
                seen.step, seen.stepped = step, now
                verdicts.append(StallAction(key, step, now - seen.since))
        return verdicts

    def limit(self, key: Any) -> float:
        """Return the seconds that a worker may be silent now."""
        seen = self._seen[key]
        factor = LONG_PHASE_FACTOR if in_long_phase(seen.heartbeat) else 1
        if isinstance(self._timeout, (int, float)):
            return self._timeout * factor
        return max(AUTO_SECONDS * factor, MEAN_FACTOR * seen.mean, LONGEST_FACTOR * seen.longest)

    def _next_step(self, key: Any, seen: _WorkerState, now: float) -> Step | None:
        waited = now - seen.stepped
        if seen.step is None:
            return Step.STACKS if now - seen.since >= self.limit(key) else None
        if seen.step is Step.STACKS:
            return Step.KILL if waited >= STACKS_SECONDS else None
        return Step.LOST if seen.step is Step.KILL and waited >= KILL_SECONDS else None
