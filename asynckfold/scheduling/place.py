"""Who runs next: choose the pending jobs that start now, and their node, cores and GPUs.

::

    Backlog: pending jobs         Reservations: running jobs    Load: the nodes right now
      GPUs, then longest first      cores, memory, GPUs           cores that nobody else uses,
         │                             │                          free memory, GPUs
         │                             └──────────┬───────────────────┘
         │                                        ▼
         │                           Capacity of each node = idle − reserved
         ▼                                        │
      next job ──────────────────────► does it fit on a node, as a whole?
         ▲                              │                    │
         │                              yes                  no
         │                              ▼                    │
         ├── capacity shrinks ◄── Placement: the node with   │
         │                        the most room, its idlest  │
         │                        cores, least crowded GPUs  │
         └── a shorter job may pass ◄────────────────────────┘

    nothing running, nothing placed ──► the longest job whose device has room starts anyway
    Load.blocked (too little free memory) ──► nothing starts on that node

A pure function: the sweep calls it at every tick, the simulator in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from asynckfold.jobs.placement import Gpu, Load, Placement, Request
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.reservations import (
    Capacity,
    Cluster,
    Reservations,
    emptiest,
    may_hold,
    placed,
)


def place(
    pending: Sequence[Request] | Backlog, running: Sequence[Placement] | Reservations, load: Load
) -> list[Placement]:
    """Choose what starts now.

    Longest expected job first (Graham 1969), ties by job id, so that the order of `pending` does
    not matter. Cores of running jobs are reserved; of the others only idle ones are taken. A job
    that does not fit lets shorter ones pass. At least one job runs: if nothing runs and nothing
    fits, the longest job whose device exists starts anyway, unless `load.blocked`, but never on a
    GPU whose memory others hold.

    On several nodes each rule holds for each node: a job, whatever its processes, and a fusion
    group are on one node as a whole. It is the node with the most free cores, or with the least
    crowded GPU, ties as `load` lists them. One job at least runs in the cluster.

    A job that must run alone starts on a node where nothing runs and no other job can start;
    nothing starts beside it there.

    GPU jobs come first, since a GPU must not wait for a core. A GPU job takes its cores and the GPU
    with the least share of its time taken by this run, then the least used, then the one with the
    most memory left; a GPU that others keep busy is left alone. A job starts beside others while
    their shares add up to less than `FULL_SHARE`; one whose share is as large, on an empty GPU.

    Parameters
    ----------
    pending : sequence of Request, or Backlog
        Jobs without a result that are not running. A `Backlog` keeps calls cheap for many jobs.
    running : sequence of Placement, or Reservations
        What runs now, also on nodes that `load` does not list any more. `Reservations` keep calls
        cheap for many calls.
    load : Load
        The machine now, or the nodes of the cluster.

    Returns
    -------
    list of Placement
        To be started, in this order.

    Examples
    --------
    >>> load = Load(cores=(0, 1), idle=(0, 1), free_memory=1)
    >>> [placement.cores for placement in place([Request("a", 2), Request("b", 3)], [], load)]
    [(0,), (1,)]
    >>> place([Request("a", 2), Request("b", 3)], [], load)[0].jobs
    ('b',)
    >>> load = Load((0,), (0,), 1, node="x", peers=(Load((0, 1), (0, 1), 1, node="y"),))
    >>> [(item.node, item.cores) for item in place([Request("a", 2), Request("b", 3)], [], load)]
    [('y', (0,)), ('x', (0,))]
    """
    reservations = running if isinstance(running, Reservations) else Reservations(running)
    nodes = reservations.capacities(load)
    # While jobs run, usually no core is idle: then the backlog is not read at all.
    if reservations and not nodes:
        return []
    backlog = pending if isinstance(pending, Backlog) else Backlog(pending)
    placements: list[Placement] = []
    if nodes:
        room = Cluster(nodes)
        placements = [room.take(request) for request in backlog.in_turn(room)]
    if not placements and not reservations:
        # The longest job whose device has room, though it does not fit.
        able = [node for node in load.nodes if not node.blocked]
        placements = _forced(backlog, able, spare_busy=True) or _forced(
            backlog, able, spare_busy=False
        )
    if empty := [node for node in nodes if not node.jobs]:
        # What was forced has not reduced the capacity of its node.
        forced = {placement.node: placement.jobs for placement in placements}
        placements += _alone(backlog, empty, forced)
    return placements


def _alone(
    backlog: Backlog, empty: Sequence[Capacity], forced: Mapping[str, tuple[str, ...]]
) -> list[Placement]:
    """Place jobs that must run alone on nodes where nothing runs and nothing has been placed."""
    for node in empty:
        node.alone = True
    cluster = Cluster([node for node in empty if node.node not in forced])
    return [
        cluster.take(request)
        for request in backlog.in_turn(cluster)
        if (request.jobs or (request.job_id,)) not in forced.values()
    ]


def _forced(backlog: Backlog, nodes: Sequence[Load], spare_busy: bool) -> list[Placement]:
    def roomy(node: Load, like: Request) -> list[Gpu]:
        gpus = (gpu for gpu in node.gpus if not (spare_busy and gpu.busy))
        return [gpu for gpu in gpus if may_hold(gpu, like)]

    def able(like: Request) -> list[Load]:
        return [node for node in nodes if not like.gpu or roomy(node, like)]

    request = backlog.first(lambda like: bool(able(like)))
    if request is None:
        return []
    node = min(able(request), key=partial(_shortage, request))
    order = (*node.idle, *(core for core in node.cores if core not in node.idle))
    gpu = min(roomy(node, request), key=emptiest) if request.gpu else None
    return [placed(request, order, gpu, node.node)]


def _shortage(request: Request, node: Load) -> tuple[int, int, int]:
    """Order nodes by what a request lacks there: cores, memory, idle cores."""
    return (
        max(0, request.threads - len(node.cores)),
        max(0, request.memory - node.free_memory),
        max(0, request.threads - len(node.idle)),
    )
