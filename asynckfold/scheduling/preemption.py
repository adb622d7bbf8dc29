"""Which running jobs move to other cores, pause or resume when other processes need their cores.

::

    other processes on a job's cores ──► other cores idle? ── yes ──► move
                                                └─ no ──► does another job go on? ── yes ──► pause
    paused job, cores idle ──► resume there                   └─ no ──► go on beside the others

A pure function with a fixed point: called again on the same load, it changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from asynckfold.jobs.placement import Load


@dataclass(frozen=True)
class HeldCores:
    """The cores of a running job, or of a paused one before its pause."""

    cores: tuple[int, ...]
    paused: bool = False


Key = TypeVar("Key")


def reassign_cores(
    running: Mapping[Key, HeldCores], load: Load, fixed: Collection[int] = ()
) -> dict[Key, tuple[int, ...]]:
    """Return the new cores of each job that moves, pauses (no cores) or resumes.

    Disturbed jobs come first, then paused ones, each in the given order. A job keeps its number of
    cores, so that no bit changes; at least one job goes on.

    Parameters
    ----------
    running : Mapping of key to HeldCores
        Jobs that can be moved, the oldest first.
    load : Load
        The machine now.
    fixed : collection of int
        Cores of jobs that cannot be moved because they are just starting. They may still fail to
        start, so they do not count as jobs that go on.

    Examples
    --------
    >>> load = Load(cores=(0, 1, 2), idle=(1, 2), free_memory=1)
    >>> reassign_cores({"a": HeldCores((0,)), "b": HeldCores((1,))}, load)
    {'a': (2,)}
    >>> reassign_cores({"a": HeldCores((0,)), "b": HeldCores((1,)), "c": HeldCores((2,))}, load)
    {'a': ()}
    >>> reassign_cores({"a": HeldCores((0,), paused=True), "b": HeldCores((1,))}, load)
    {'a': (2,)}
    """
    calm = {
        key for key, held in running.items() if not held.paused and {*held.cores} <= {*load.idle}
    }
    taken = {core for key in calm for core in running[key].cores}.union(fixed)
    free = [core for core in load.idle if core not in taken]
    found: dict[Key, tuple[int, ...]] = {}
    left: list[Key] = []
    disturbed = (key for key in running if key not in calm)
    for key in sorted(disturbed, key=lambda key: running[key].paused):
        cores = running[key].cores
        # Its own cores that are still idle, then the idlest.
        wanted = sorted(free, key=lambda core: core not in cores)[: len(cores)]
        if len(wanted) < len(cores):
            left.append(key)
            continue
        found[key] = tuple(wanted)
        free = [core for core in free if core not in wanted]
    if not (calm or found) and left:
        first = left.pop(0)
        found |= {first: running[first].cores} if running[first].paused else {}
    return found | {key: () for key in left if not running[key].paused}
