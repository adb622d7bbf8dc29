"""Whether a failed attempt is retried: a table and a pure function.

======  =======================  ==================================================================
class   outcome                  consequence
======  =======================  ==================================================================
user    error                    the job fails: the same code would raise again
infra   died, hang, device_lost  at most two retries from the last good checkpoint, after a pause
oom     oom                      one retry, alone on the machine
gpu     gpu_oom                  one retry, alone on a GPU
io      io                       the sweep stops after running jobs saved themselves; resumable
======  =======================  ==================================================================

A disk failure concerns the whole sweep, not one job: ``io`` never reaches `decide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_SECONDS = 0.5
"""Pause before the first retry after a dead worker: its cause may be gone by then."""

PAUSE_FACTOR = 4.0
"""Each further pause is longer by this factor."""


@dataclass(frozen=True)
class RetryClass:
    """Outcomes that are treated alike.

    Parameters
    ----------
    retries : int
        Retries after the first failure of this class.
    pause_s : float
        Seconds before the first retry.
    alone, alone_on_gpu : bool
        Whether the retry runs alone on the machine, or on its GPU.
    """

    retries: int = 0
    pause_s: float = 0.0
    alone: bool = False
    alone_on_gpu: bool = False


USER = RetryClass()
INFRA = RetryClass(retries=2, pause_s=PAUSE_SECONDS)
OOM = RetryClass(retries=1, alone=True)
GPU_OOM = RetryClass(retries=1, alone_on_gpu=True)

CLASS_OF = {
    "error": USER,
    "died": INFRA,
    "hang": INFRA,
    "device_lost": INFRA,
    "oom": OOM,
    "gpu_oom": GPU_OOM,
}
"""The retry class of each outcome."""


@dataclass(frozen=True)
class Retry:
    """A retry of a job: after how many seconds, and whether it runs alone, and where."""

    after_s: float
    alone: bool = False  # on the machine
    alone_on_gpu: bool = False


def decide(history: Sequence[str], outcome: str) -> Retry | None:
    """Decide whether a job is retried after an attempt that ended with `outcome`.

    Each class counts its retries: an out-of-memory failure does not use up the retries of a
    dead worker. After one out-of-memory failure a job always runs alone, on the machine or on its
    GPU.

    `history` are the outcomes of the earlier attempts in this session, in order.

    Returns
    -------
    Retry or None
        None if the job has failed.

    Examples
    --------
    >>> decide([], "died")
    Retry(after_s=0.5, alone=False, alone_on_gpu=False)
    >>> decide(["died"], "hang")
    Retry(after_s=2.0, alone=False, alone_on_gpu=False)
    >>> decide(["died", "hang"], "died") is decide([], "error") is None
    True
    >>> decide(["died"], "oom")
    Retry(after_s=0.0, alone=True, alone_on_gpu=False)
    """
    failure = CLASS_OF[outcome]
    earlier = [CLASS_OF[past] for past in history]
    alike = earlier.count(failure)
    if alike >= failure.retries:
        return None
    every = [failure, *earlier]
    return Retry(
        failure.pause_s * PAUSE_FACTOR**alike,
        any(item.alone for item in every),
        any(item.alone_on_gpu for item in every),
    )
