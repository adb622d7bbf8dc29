"""How often a run changes its mind about the cores that others use: a pure rule over a clock.

::

    others come to some cores ──► left to them at once ┐ two changes a minute: whoever comes and
    others go from some cores ──► taken back at once ──┘ goes moves nothing more often than that

Load that comes and goes would otherwise start, hold, move and pause jobs at its own pace. After the
second change the cores stay as they are, all of them, until the first is a minute old.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 60.0
"""A neighbour who stays is heeded for all the time that follows; one who comes again and again
costs no more than `MOST_CHANGES` in so many seconds."""

MOST_CHANGES = 2


@dataclass(frozen=True)
class Mind:
    """Which cores are left to others, and when that was changed lately."""

    busy: frozenset[int]
    changes: tuple[float, ...] = ()


def reconsider(mind: Mind | None, busy: frozenset[int], now: float) -> Mind:
    """Return what is thought after a look at the cores.

    Parameters
    ----------
    mind : Mind or None
        What was thought before; None at the first look, which is no change.
    busy : frozenset of int
        The cores that others use now.
    now : float
        Seconds of a monotonic clock.

    Examples
    --------
    >>> nobody, others = frozenset(), frozenset({1})
    >>> mind = reconsider(reconsider(None, nobody, 0.0), others, 1.0)
    >>> sorted(mind.busy), sorted(reconsider(mind, nobody, 5.0).busy)
    ([1], [])
    >>> mind = reconsider(reconsider(mind, nobody, 5.0), others, 9.0)
    >>> sorted(mind.busy), sorted(reconsider(mind, others, 61.0).busy)
    ([], [1])
    """
    if mind is None:
        return Mind(busy)
    lately = tuple(moment for moment in mind.changes if now - moment < WINDOW_SECONDS)
    if busy == mind.busy or len(lately) == MOST_CHANGES:
        return Mind(mind.busy, lately)
    return Mind(busy, (*lately, now))
