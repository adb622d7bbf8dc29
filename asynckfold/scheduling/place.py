"""Who runs next: choose the pending jobs that start now, and their cores and GPUs.

::

    Backlog: pending jobs         Reservations: running jobs    Load: the machine right now
      GPUs, then longest first      cores, memory, GPUs           cores that nobody else uses,
         │                             │                          free memory, GPUs
         │                             └──────────┬───────────────────┘
         │                                        ▼
         │                           Capacity = idle − reserved
         ▼                                        │
      next job ──────────────────────► does it fit into the capacity?
         ▲                              │                    │
         │                              yes                  no
         │                              ▼                    │
         ├── capacity shrinks ◄── Placement: idlest cores,   │
         │                        least crowded GPUs         │
         └── a shorter job may pass ◄────────────────────────┘

    nothing running, nothing placed ──► the longest job whose device has room starts anyway
    Load.blocked (too little free memory) ──► nothing starts

A pure function: the sweep calls it at every tick, the simulator in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence

from asynckfold.jobs.placement import Gpu, Load, Placement, Request
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.reservations import Reservations, emptiest, may_hold, placed


def place(
    pending: Sequence[Request] | Backlog, running: Sequence[Placement] | Reservations, load: Load
) -> list[Placement]:
    """Choose what starts now.

    Longest expected job first (Graham 1969), ties by job id, so that the order of `pending` does
    not matter. Cores of running jobs are reserved; of the others only idle ones are taken. A job
    that does not fit lets shorter ones pass. At least one job runs: if nothing runs and nothing
    fits, the longest job whose device exists starts anyway, unless `load.blocked`, but never on a
    GPU whose memory others hold.

    A job that must run alone starts when nothing runs and no other job can start; nothing starts
    beside it.

    GPU jobs come first, since a GPU must not wait for a core. A GPU job takes its cores and the GPU
    with the fewest own jobs, then the least used, then the one with the most memory left; a GPU
    that others keep busy is left alone. A GPU is shared by at most the smallest `jobs_per_gpu` of
    its jobs. A job of several GPUs gets all of them at once, or waits.

    Parameters
    ----------
    pending : sequence of Request, or Backlog
        Jobs without a result that are not running. A `Backlog` keeps calls cheap for many jobs.
    running : sequence of Placement, or Reservations
        What runs now. `Reservations` keep calls cheap for many calls.
    load : Load
        The machine now.

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
    """
    if load.blocked:
        return []
    reservations = running if isinstance(running, Reservations) else Reservations(running)
    capacity = reservations.capacity(load)
    found: list[Placement] = []
    # While jobs run, usually no core is idle: then the backlog is not read at all.
    if capacity.cores:
        found = [capacity.take(request) for request in _backlog(pending).in_turn(capacity)]
    return found if found or running else _force(_backlog(pending), load)


def _backlog(pending: Sequence[Request] | Backlog) -> Backlog:
    return pending if isinstance(pending, Backlog) else Backlog(pending)


def _force(backlog: Backlog, load: Load) -> list[Placement]:
    def roomy(gpus: Sequence[Gpu], like: Request) -> list[Gpu]:
        return [gpu for gpu in gpus if may_hold(gpu, like)]

    def first(gpus: Sequence[Gpu]) -> Request | None:
        return backlog.first(lambda like: not like.gpu or len(roomy(gpus, like)) >= like.gpus)

    idle = [gpu for gpu in load.gpus if not gpu.busy]
    request = first(idle) or first(load.gpus)
    if request is None:
        return []
    order = (*load.idle, *(core for core in load.cores if core not in load.idle))
    if not request.gpu:
        return [placed(request, order)]
    fitting = roomy(idle, request)
    if len(fitting) < request.gpus:
        fitting = roomy(load.gpus, request)
    return [placed(request, order, sorted(fitting, key=emptiest)[: request.gpus])]
