"""Which running jobs move to other cores, pause and go on where others came: a pure function.

::

    others came to a job's cores ──► idle cores elsewhere? ──► it moves there
                                        └─ none ──► another job goes on? ──► it pauses
    cores became idle ──► it goes on there            └─ none ──► it goes on beside the others

What is decided here settles: on the same load nothing more changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from asynckfold.jobs.placement import Load


@dataclass(frozen=True)
class Held:
    """The cores of a job that runs, or those that it had when it paused."""

    cores: tuple[int, ...]
    paused: bool = False


Key = TypeVar("Key")


def yielded(
    running: Mapping[Key, Held], load: Load, fixed: Collection[int] = ()
) -> dict[Key, tuple[int, ...]]:
    """Return the cores of each job for which they change; none for one that pauses.

    Jobs that others disturb come first, then those that paused, each in the order given. A job goes
    on with as many cores as it had, so that no bit changes; at least one job always goes on.

    Parameters
    ----------
    running : Mapping of key to Held
        What can be moved, the oldest first.
    load : Load
        The machine now.
    fixed : collection of int
        Cores of what cannot be moved now, because it is just about to start; it may still fail to,
        so that it does not count as going on.

    Examples
    --------
    >>> load = Load(cores=(0, 1, 2), idle=(1, 2), free_memory=1)
    >>> yielded({"a": Held((0,)), "b": Held((1,))}, load)
    {'a': (2,)}
    >>> yielded({"a": Held((0,)), "b": Held((1,)), "c": Held((2,))}, load)
    {'a': ()}
    >>> yielded({"a": Held((0,), paused=True), "b": Held((1,))}, load)
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
        # Those of its own that are still idle, then the idlest.
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
