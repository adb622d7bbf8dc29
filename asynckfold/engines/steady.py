"""How often a run changes its mind about the cores that others use: a pure rule over a clock.

::

    others come to some cores ──► left to them at once ┐ each once a minute: whoever comes and
    others go from some cores ──► taken back at once ──┘ goes moves nothing more often than that

Load that comes and goes would otherwise start, hold, move and pause jobs at its own pace. Between
two changes of one kind the cores stay as they are, all of them: others who wander from core to core
find the core that was left to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_SECONDS = 60.0
"""Between two changes of one kind. A neighbour who stays is heeded for all the time that follows;
one who comes again and again costs no more than two changes a minute."""


@dataclass(frozen=True)
class Mind:
    """Which cores are left to others, and when some were last left to them and taken back."""

    busy: frozenset[int]
    left_at: float = -math.inf
    taken_at: float = -math.inf


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
    cores, left_at, taken_at = mind.busy, mind.left_at, mind.taken_at
    if not busy <= cores and now - left_at >= LEAST_SECONDS:
        cores, left_at = cores | busy, now
    if not cores <= busy and now - taken_at >= LEAST_SECONDS:
        cores, taken_at = cores & busy, now
    return Mind(cores, left_at, taken_at)
