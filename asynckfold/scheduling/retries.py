"""What becomes of a job whose attempt did not end in a result: a table and a pure function.

======  =======================  ==================================================================
class   an attempt ends as       and then
======  =======================  ==================================================================
user    error                    the job has failed: the same code would raise again
infra   died, hang, device_lost  again from its last good checkpoint, at most twice, after a pause
oom     oom                      again once, alone on the machine
io      io                       the sweep stops, running jobs save themselves, and it can go on
======  =======================  ==================================================================

No clock, no store, no processes: the sweep carries out what is decided here. A disk that refuses is
no matter of one job, and never comes to a decision on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_SECONDS = 0.5
"""Before the first retry of a job whose worker died: what killed it may have passed by then."""

PAUSE_FACTOR = 4.0
"""How much longer each further pause is."""


@dataclass(frozen=True)
class RetryClass:
    """Outcomes that are treated alike.

    Parameters
    ----------
    retries : int
        Attempts after the first one that ended so.
    pause_s : float
        Seconds before the first of them; each further pause is `PAUSE_FACTOR` times as long.
    alone : bool
        Whether the retry has the machine for itself.
    """

    retries: int = 0
    pause_s: float = 0.0
    alone: bool = False


USER = RetryClass()
INFRA = RetryClass(retries=2, pause_s=PAUSE_SECONDS)
OOM = RetryClass(retries=1, alone=True)

CLASS_OF = {"error": USER, "died": INFRA, "hang": INFRA, "device_lost": INFRA, "oom": OOM}
"""The retry class of each outcome."""


@dataclass(frozen=True)
class Retry:
    """A further attempt at a job.

    Parameters
    ----------
    after_s : float
        Seconds that it waits, in which other jobs pass.
    alone : bool
        Whether it has the machine for itself.
    """

    after_s: float
    alone: bool


def decide(history: Sequence[str], outcome: str) -> Retry | None:
    """Decide whether a job whose attempt has just ended with `outcome` is tried again.

    Each class has its own number of retries, so that a job which was short of memory once is not
    denied them after an unrelated death. A job that needed the machine for itself keeps it.

    Parameters
    ----------
    history : sequence of str
        Outcomes of the attempts before in this session, in order.
    outcome : str
        One of `CLASS_OF`.

    Returns
    -------
    Retry or None
        None: the job has failed.

    Examples
    --------
    >>> decide([], "died")
    Retry(after_s=0.5, alone=False)
    >>> decide(["died"], "hang")
    Retry(after_s=2.0, alone=False)
    >>> decide(["died", "hang"], "died") is decide([], "error") is None
    True
    >>> decide(["died"], "oom")
    Retry(after_s=0.0, alone=True)
    """
    found = CLASS_OF[outcome]
    earlier = [CLASS_OF[past] for past in history]
    alike = earlier.count(found)
    if alike >= found.retries:
        return None
    alone = found.alone or any(past.alone for past in earlier)
    return Retry(found.pause_s * PAUSE_FACTOR**alike, alone)
