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


CLASS_OF = {
    "error": "user",
    "died": "infra",
    "hang": "infra",
    "device_lost": "infra",
    "oom": "oom",
    "gpu_oom": "gpu",
}
"""The class of each outcome."""

RETRIES = {"user": 0, "infra": 2, "oom": 1, "gpu": 1}
"""Retries after the first failure of a class."""


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
    if alike >= RETRIES[failure]:
        return None
    pause = PAUSE_SECONDS * PAUSE_FACTOR**alike if failure == "infra" else 0.0
    every = {failure, *earlier}
    return Retry(pause, "oom" in every, "gpu" in every)
