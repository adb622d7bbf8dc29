"""Which workers hang, and what is done about it: a pure rule over a clock and their heartbeats.

::

    quiet for its limit ─► STACKS ── 0.25 s ─► KILL ── 5 s, still there ─► LOST
            ▲                 │
            └── a sign of life; a pause that it was asked for; or this process itself slept:
                all are given time anew

A worker is quiet while its heartbeat does not change. Its limit is the given `stall_timeout`, ten
times as much while it is aside (a start, the first batch, which may compile, a checkpoint).
``"auto"`` knows nothing of the batches to come, and is generous: to find a hang minutes later costs
one core these minutes, to kill a healthy worker costs a job. It takes the longest of 5 minutes (50
aside; Dask gives its workers 5 as well), 20 times the mean time of a batch of this very attempt,
and twice the longest that this attempt was quiet before. The mean needs no list of times, and
unlike a median of what is seen at each look it is exact where batches are shorter than the time
between two looks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from asynckfold.system.heartbeat import is_aside

AUTO_SECONDS = 300.0
"""The least limit that ``"auto"`` sets."""

ASIDE_FACTOR = 10
"""How much longer a start, a first batch or a checkpoint may take."""

MEAN_FACTOR, LONGEST_FACTOR = 20, 2

GAP_SECONDS, GAP_SHARE = 1.0, 0.1
"""Time between two looks that is this process's own sleep (stopped by Ctrl-Z, a laptop that was
shut, a frozen container): more than four ticks of the sweep, and of a long limit more than a tenth,
so that a disk that makes each tick slow does not put off a verdict for ever."""

STACKS_SECONDS = 0.25
"""What a worker gets to write its stacks: it takes a millisecond, unless the process is stopped."""

KILL_SECONDS = 5.0
"""After that time a process that was killed is stuck in the kernel."""

Key = TypeVar("Key", bound=Hashable)


class Step(Enum):
    """What is to be done with a worker that hangs, in this order."""

    STACKS = "ask for its stacks"
    KILL = "kill it"
    LOST = "go on without it"


@dataclass(frozen=True)
class Verdict(Generic[Key]):
    """One step against one worker, which was quiet for so many seconds."""

    key: Key
    step: Step
    quiet: float


@dataclass
class _Seen:
    """One worker as it was at the last look; its attempt was first seen at ``began``."""

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

    def wait_anew(self, passed: float, now: float) -> None:
        """Leave out the time in which this process slept, or the worker was asked to."""
        self.began += passed
        self.stepped = now
        if self.step in (None, Step.STACKS):
            self.step, self.since = None, now

    @property
    def mean(self) -> float:
        """Seconds of a batch so far, the start of the attempt included; 0 before the first."""
        return (self.since - self.began) / max(1, self.heartbeat // 2 - self.first // 2)


class Stalls(Generic[Key]):
    """Watches workers by key; a new key is a new attempt.

    Parameters
    ----------
    timeout : float, "auto" or None
        Seconds without a finished batch after which a worker hangs; None: never.
    """

    def __init__(self, timeout: float | str | None) -> None:
        self._timeout = timeout
        self._seen: dict[Key, _Seen] = {}
        self._looked: float | None = None

    def look(
        self, now: float, heartbeats: Mapping[Key, int], paused: Collection[Key] = ()
    ) -> list[Verdict[Key]]:
        """Return what is to be done now, each step against a worker once.

        Parameters
        ----------
        now : float
            Seconds of a monotonic clock.
        heartbeats : Mapping
            The value of the heartbeat of each worker that works; those left out are forgotten.
        paused : collection
            Those that pause because they were asked to: that time does not count.
        """
        if self._timeout is None:
            return []
        passed, self._looked = now - (now if self._looked is None else self._looked), now
        self._seen = {key: seen for key, seen in self._seen.items() if key in heartbeats}
        verdicts = []
        for key, heartbeat in heartbeats.items():
            seen = self._seen.setdefault(key, _Seen(heartbeat, heartbeat, now, now))
            if key in paused or passed > max(GAP_SECONDS, GAP_SHARE * self.limit(key)):
                seen.wait_anew(passed, now)
            if heartbeat != seen.heartbeat:
                seen.moved(heartbeat, now)
            step = self._next_step(key, seen, now)
            if step is not None:
                seen.step, seen.stepped = step, now
                verdicts.append(Verdict(key, step, now - seen.since))
        return verdicts

    def limit(self, key: Key) -> float:
        """Return the seconds that a worker may be quiet now."""
        seen = self._seen[key]
        factor = ASIDE_FACTOR if is_aside(seen.heartbeat) else 1
        if isinstance(self._timeout, (int, float)):
            return self._timeout * factor
        return max(AUTO_SECONDS * factor, MEAN_FACTOR * seen.mean, LONGEST_FACTOR * seen.longest)

    def _next_step(self, key: Key, seen: _Seen, now: float) -> Step | None:
        waited = now - seen.stepped
        if seen.step is None:
            return Step.STACKS if now - seen.since >= self.limit(key) else None
        if seen.step is Step.STACKS:
            return Step.KILL if waited >= STACKS_SECONDS else None
        return Step.LOST if seen.step is Step.KILL and waited >= KILL_SECONDS else None
