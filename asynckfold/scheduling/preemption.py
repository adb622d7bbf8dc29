"""Which running jobs move to other cores, pause or resume when other processes need their cores.

::

    other processes on a job's cores ──► other cores idle? ── yes ──► move
                                                └─ no ──► does another job go on? ── yes ──► pause
    paused job, cores idle ──► resume there                   └─ no ──► go on beside the others

A pure function with a fixed point: called again on the same load, it changes nothing.
A job never leaves its node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from asynckfold.jobs.placement import Load


@dataclass(frozen=True)
class HeldCores:
    """The cores of a running job, or of a paused one before its pause, and their node."""

    cores: tuple[int, ...]
    paused: bool = False
    node: str = ""


Key = TypeVar("Key")


def reassign_cores(
    running: Mapping[Key, HeldCores], load: Load, fixed: Iterable[HeldCores] = ()
) -> dict[Key, tuple[int, ...]]:
    """Return the new cores of each job that moves, pauses (no cores) or resumes, on its node.

    Disturbed jobs come first, then paused ones, each in the given order. A job keeps its node and
    its number of cores, so that no bit changes; at least one job goes on in the cluster. Jobs on
    nodes that `load` does not list are left as they are.

    Parameters
    ----------
    running : Mapping of key to HeldCores
        Jobs that can be moved, the oldest first.
    load : Load
        The machine now, or the nodes of the cluster.
    fixed : iterable of HeldCores
        Jobs that cannot be moved because they are just starting. They may still fail to start, so
        they do not count as jobs that go on.

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
    idle = {node.node: node.idle for node in load.nodes}
    seen = {key: held for key, held in running.items() if held.node in idle}
    calm = {
        key for key, held in seen.items() if not held.paused and {*held.cores} <= {*idle[held.node]}
    }
    taken = {
        (held.node, core) for held in (*(seen[key] for key in calm), *fixed) for core in held.cores
    }
    free = {
        name: [core for core in cores if (name, core) not in taken] for name, cores in idle.items()
    }
    moves: dict[Key, tuple[int, ...]] = {}
    left: list[Key] = []
    disturbed = (key for key in seen if key not in calm)
    for key in sorted(disturbed, key=lambda key: seen[key].paused):
        node, cores = seen[key].node, seen[key].cores
        # Those it has that are still idle, then the idlest.
        wanted = sorted(free[node], key=lambda core: core not in cores)[: len(cores)]
        if len(wanted) < len(cores):
            left.append(key)
            continue
        moves[key] = tuple(wanted)
        free[node] = [core for core in free[node] if core not in wanted]
    if not (calm or moves) and left:
        first = left.pop(0)
        moves |= {first: seen[first].cores} if seen[first].paused else {}
    return moves | {key: () for key in left if not seen[key].paused}
