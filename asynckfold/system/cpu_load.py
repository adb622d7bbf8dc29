"""Which cores other processes use: total use minus that of this run, smoothed over time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from asynckfold.system import background
from asynckfold.system.readers import UNREADABLE, CounterReaders

# The kernel counts CPU time in ticks of 10 ms: a shorter window is wrong by more than 5 %.
WINDOW_SECONDS = 0.2
# Enough to find an idle machine: of 200 readings beside a busy core, none called it idle.
EARLY_SECONDS = 0.04
# Time constant of the smoothing: a lasting load is seen after 0.4 s and forgotten after 1.9 s;
# a burst of 0.2 s (a shell, a save, a cron job) stays below BUSY_SHARE.
SMOOTHING_SECONDS = 1.0
# Beside a foreign share of 0.3 a job gets at most 0.7 of its core; a desktop or a daemon needs less
# than 0.15. The gap between the two is the hysteresis.
BUSY_SHARE, IDLE_SHARE = 0.3, 0.15
# How long the last state of a core is used when it cannot be read.
STALE_SECONDS = 5.0
# Interval between searches for children of workers, which cost 1 ms per 70 processes.
CHILDREN_SECONDS = 2.0
# Cores whose smoothed shares differ by less are equally idle.
_EQUAL_SHARE = 0.1


@dataclass(frozen=True)
class OwnUse:
    """CPU seconds of this run's process in one window (NaN: unknown); cores, likeliest first."""

    seconds: float
    cores: tuple[int, ...]
    pinned: bool


def foreign_shares(
    busy: Mapping[int, float], uses: Sequence[OwnUse], window: float
) -> dict[int, float]:
    """Return the share of each core that others used, 0 to 1; NaN if unknown.

    Pinned processes are subtracted first, from their cores only. Other processes are subtracted
    from the core they ran on last, and if that was not busy enough, from the others: the sum is
    right even for a process that moved.

    `busy` are the busy seconds of each core in the window; NaN if unknown.

    Examples
    --------
    >>> foreign_shares({0: 1.0, 1: 0.5}, [OwnUse(1.0, (0,), True)], 1.0)
    {0: 0.0, 1: 0.5}
    """
    left = dict(busy)
    for use in sorted(uses, key=lambda use: not use.pinned):
        if math.isnan(use.seconds):
            left |= {core: math.nan for core in use.cores if use.pinned and core in left}
        else:
            _subtract(left, use)
    return {core: _share(seconds, window) for core, seconds in left.items()}


def _share(seconds: float, window: float) -> float:
    """Return 0 to 1, or NaN, which `min` and `max` would turn into a number."""
    return seconds if math.isnan(seconds) else min(1.0, max(0.0, seconds / window))


def _subtract(left: dict[int, float], use: OwnUse) -> None:
    """Subtract a process' seconds from its cores: evenly if pinned, else in order."""
    cores = [core for core in use.cores if left.get(core, math.nan) > 0]
    rest = use.seconds
    if use.pinned:
        total = sum(left[core] for core in cores)
        part = min(1.0, rest / total) if total else 0.0
        left |= {core: left[core] * (1 - part) for core in cores}
        return
    for core in cores:
        taken = min(rest, left[core])
        left[core] -= taken
        rest -= taken


@dataclass(frozen=True)
class CoreState:
    """One core: smoothed foreign share, whether it is busy, time of the last reading."""

    share: float
    busy: bool
    known_at: float


def next_state(before: CoreState | None, share: float, window: float, now: float) -> CoreState:
    """Return the new state of a core after a window in which others used `share` of it.

    An exponential moving average, weighted by the length of the window, with two thresholds. An
    unknown share (NaN) keeps the old state for a while; then, or without one, the core is busy.

    Examples
    --------
    >>> state = next_state(None, 0.0, 1.0, now=1.0)
    >>> [next_state(state, 1.0, window, now=1 + window).busy for window in (0.2, 0.4)]
    [False, True]
    """
    if not math.isfinite(share):
        if before is None:
            return CoreState(1.0, True, -math.inf)
        stale = now - before.known_at > STALE_SECONDS
        return CoreState(1.0, True, before.known_at) if stale else before
    if before is None or before.known_at == -math.inf:
        return CoreState(share, share > BUSY_SHARE, now)
    weight = 1 - math.exp(-window / SMOOTHING_SECONDS)
    smooth = before.share + weight * (share - before.share)
    busy = smooth > (IDLE_SHARE if before.busy else BUSY_SHARE)
    return CoreState(smooth, busy, now)


CHANGE_SECONDS, MOST_CHANGES = 60.0, 2
"""At most two changes a minute. A change is followed at once, in both directions. After the second
one all cores keep their state until the first is a minute old, so that load that comes and goes
does not move jobs all the time."""


@dataclass(frozen=True)
class BusyCores:
    """The cores left to others, and the times of recent changes."""

    busy: frozenset[int]
    changes: tuple[float, ...] = ()


def with_hysteresis(before: BusyCores | None, busy: frozenset[int], now: float) -> BusyCores:
    """Return the new state, given the cores that others use now.

    Examples
    --------
    >>> state = None
    >>> for now, busy in [(0.0, ()), (1.0, (1,)), (5.0, ()), (9.0, (1,)), (61.0, (1,))]:
    ...     state = with_hysteresis(state, frozenset(busy), now)
    ...     print(now, sorted(state.busy))
    0.0 []
    1.0 [1]
    5.0 []
    9.0 []
    61.0 [1]
    """
    if before is None:
        return BusyCores(busy)
    recent = tuple(moment for moment in before.changes if now - moment < CHANGE_SECONDS)
    if busy == before.busy or len(recent) == MOST_CHANGES:
        return BusyCores(before.busy, recent)
    return BusyCores(busy, (*recent, now))


@dataclass(frozen=True)
class _Counters:
    """Counters at one moment, and the pinned cores of this run's processes."""

    at: float
    cores: Mapping[int, float]
    processes: Mapping[int, tuple[float, int]]
    pins: Mapping[int, tuple[int, ...]]


class LoadSampler:
    """Measures which cores others use; primed at construction."""

    def __init__(
        self,
        cores: Sequence[int],
        readers: CounterReaders | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cores = tuple(cores)
        self._readers = readers or CounterReaders()
        self._clock = clock
        self._parents: Mapping[int, int] = {}
        self._parents_at = -math.inf
        self._usage: tuple[float, float, tuple[float, ...]] = (0.0, 0.0, ())
        self._states = {core: next_state(None, math.nan, 0.0, 0.0) for core in self.cores}
        self._last = self._read(_this_process())

    def sample(self, workers: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Read the counters if the last reading is at least a window ago.

        The first reading may come earlier and counts only if no core is busy: a short sweep on an
        idle machine need not wait for a whole window.

        Parameters
        ----------
        workers : Mapping of int to tuple of int, optional
            Processes started by this run and their pinned cores, empty for none; their children
            count as theirs. The calling process and its `background` always count, its other
            children are not.
        """
        elapsed = self._clock() - self._last.at
        if elapsed < WINDOW_SECONDS:
            # Warm workers exist before a run and must not count as foreign later.
            self._register(workers or {})
            if elapsed < EARLY_SECONDS or self.known:
                return
        family = self._family(dict(workers or {}))
        last, now = self._last, self._read(family)
        window = now.at - last.at
        busy = {core: _delta(last.cores, now.cores, core) for core in self.cores}
        uses = [self._own_use(pid, pinned, last, now) for pid, pinned in family.items()]
        states = {
            core: next_state(self._states[core], share, window, now.at)
            for core, share in foreign_shares(busy, uses, window).items()
        }
        early = window < WINDOW_SECONDS
        if early and any(state.busy for state in states.values()):
            return
        self._states |= states
        # The first whole window includes an early reading.
        if not early:
            self._last = now
            self._usage = self._used(busy, uses, window)

    @property
    def known(self) -> bool:
        """Whether any core could be read so far."""
        return any(state.known_at > -math.inf for state in self._states.values())

    @property
    def busy(self) -> frozenset[int]:
        """Cores that others use."""
        return frozenset(core for core, state in self._states.items() if state.busy)

    @property
    def shares(self) -> dict[int, float]:
        """Smoothed share of each core that others use; 1 if unknown."""
        return {core: state.share for core, state in self._states.items()}

    @property
    def idlest(self) -> tuple[int, ...]:
        """All cores: idle ones first, equally idle ones by number."""

        def order(core: int) -> tuple[bool, int, int]:
            state = self._states[core]
            return (state.busy, round(state.share / _EQUAL_SHARE), core)

        return tuple(sorted(self.cores, key=order))

    def usage(self) -> tuple[float, float, tuple[float, ...]]:
        """Return the use in the last window, in cores: total, by this run, and by core (0 to 1).

        By core, it is empty until it is known.
        """
        return self._usage

    def _used(
        self, busy: Mapping[int, float], uses: Sequence[OwnUse], window: float
    ) -> tuple[float, float, tuple[float, ...]]:
        before = self._usage[2] or (math.nan,) * len(self.cores)
        cores = tuple(
            last if math.isnan(busy[core]) else min(1.0, busy[core] / window)
            for core, last in zip(self.cores, before, strict=True)
        )
        if any(map(math.isnan, cores)):
            return self._usage
        used = sum(use.seconds for use in uses if not math.isnan(use.seconds)) / window
        return sum(cores), min(used, sum(cores)), cores

    def _own_use(
        self, pid: int, pinned: tuple[int, ...], last: _Counters, now: _Counters
    ) -> OwnUse:
        reading = now.processes.get(pid)
        before = {key: value[0] for key, value in last.processes.items()}
        if pid not in before and self._age(pid) <= now.at - last.at:
            before[pid] = 0.0
        seconds = _delta(before, {} if reading is None else {pid: reading[0]}, pid)
        # A process pinned within the window may have used other cores before.
        moved = last.pins.get(pid, pinned) != pinned
        if reading is None or (pinned and not moved):
            return OwnUse(seconds, pinned, bool(pinned))
        others = sorted(
            (core for core in self.cores if core != reading[1]),
            key=lambda core: -_known(_delta(last.cores, now.cores, core)),
        )
        return OwnUse(seconds, (reading[1], *others), False)

    def _age(self, pid: int) -> float:
        try:
            return float(self._readers.age(pid))
        except UNREADABLE:
            return math.inf

    def _register(self, workers: Mapping[int, tuple[int, ...]]) -> None:
        """Record the use so far of workers that are new since the last reading."""
        new = {pid: pins for pid, pins in workers.items() if pid not in self._last.processes}
        if new:
            processes = {**self._last.processes, **self._processes(new)}
            pins = {**self._last.pins, **new}
            self._last = replace(self._last, processes=processes, pins=pins)

    def _family(self, workers: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Return the workers, their descendants with inherited cores, and this process."""
        if workers and self._clock() - self._parents_at >= CHILDREN_SECONDS:
            try:
                self._parents = dict(self._readers.descendants())
            except UNREADABLE:
                self._parents = {}  # their use then counts as foreign
            self._parents_at = self._clock()
        family = dict(workers)
        for pid in self._parents:
            ancestor = next((name for name in self._ancestors(pid) if name in workers), None)
            if ancestor is not None:
                family[pid] = workers[ancestor]
        return {**_this_process(), **family}

    def _ancestors(self, pid: int) -> Iterator[int]:
        """Yield the process, its parent, and so on, below this process."""
        for _ in range(len(self._parents)):
            yield pid
            pid = self._parents.get(pid, 0)

    def _read(self, pins: Mapping[int, tuple[int, ...]]) -> _Counters:
        try:
            seconds = self._readers.core_seconds()
            cores = {core: float(value) for core, value in seconds.items() if value >= 0}
        except UNREADABLE:
            cores = {}
        return _Counters(self._clock(), cores, self._processes(pins), dict(pins))

    def _processes(self, pids: Iterable[int]) -> dict[int, tuple[float, int]]:
        processes = {}
        for pid in pids:
            try:
                seconds, core = self._readers.process(pid)
                processes[pid] = (float(seconds), int(core))
            except UNREADABLE:
                continue  # ended or not ours to look at: unknown in this window
        return processes


def _this_process() -> dict[int, tuple[int, ...]]:
    return dict.fromkeys((os.getpid(), *background.running()), ())


def _delta(before: Mapping[int, float], after: Mapping[int, float], key: int) -> float:
    """Return the growth of a counter; NaN if it is unknown or went backwards."""
    growth = after.get(key, math.nan) - before.get(key, math.nan)
    return growth if math.isfinite(growth) and growth >= 0 else math.nan


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value
