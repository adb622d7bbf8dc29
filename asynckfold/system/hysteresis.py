"""Hysteresis for busy cores: at most two changes a minute; a pure rule over a clock.

A change is followed at once, in both directions. After the second one all cores keep their state
until the first is a minute old, so that load that comes and goes does not move jobs all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS, MOST_CHANGES = 60.0, 2


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
    recent = tuple(moment for moment in before.changes if now - moment < WINDOW_SECONDS)
    if busy == before.busy or len(recent) == MOST_CHANGES:
        return BusyCores(before.busy, recent)
    return BusyCores(busy, (*recent, now))
