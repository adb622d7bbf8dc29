"""What pending jobs wait for, and how long; pure, the time is passed in.

Jobs that request the same resources wait for the same reason. So one account is kept for each kind
of request, and a job only stores the state of its account on arrival: the cost does not grow with
the number of pending jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from asynckfold.jobs.placement import Load, Request, Wait
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.reservations import NodeReservations, Reservations
from asynckfold.system.units import gibibytes, named_cores, named_node

SHORTEST_SECONDS = 0.05
"""Shorter waits are not reported."""


@dataclass(frozen=True)
class Obstacle:
    """Why pending jobs do not start.

    Parameters
    ----------
    kind : {"cores", "neighbours", "memory", "gpu", "alone", "turn"}
        Own jobs hold the cores; other processes use them; too little memory; no GPU; a job that
        must run alone is running; this job must run alone.
    text : str
        What is missing, with its numbers; completes "waits for".
    """

    kind: str
    text: str


def obstacle(request: Request, running: Reservations, load: Load) -> Obstacle:
    """Return why `place` has left a request pending.

    If several resources are missing: the first of running alone, cores, a GPU, memory. Of several
    nodes, the largest one tells, of those with a GPU if that is needed.

    Examples
    --------
    >>> from asynckfold.jobs.placement import Placement
    >>> running = Reservations([Placement(("a",), (0,)), Placement(("b",), (1,))])
    >>> obstacle(Request("c", 1.0), running, Load((0, 1), (0, 1), free_memory=1)).text
    'cores: 2 of 2 busy with own jobs'
    >>> obstacle(Request("c", 1.0), running, Load((0, 1, 2), (0, 1), 1)).text
    'other processes on core 2'
    >>> load = Load((0,), (), 1, node="x", peers=(Load((0, 1), (0, 1), 1, node="y"),))
    >>> running = Reservations([Placement(("a",), (0, 1), node="y")])
    >>> obstacle(Request("c", 1.0), running, load).text
    'cores: 2 of 2 busy with own jobs (y)'
    """
    if not load.peers:
        return _obstacle_on(request, running.on(load.node), load, "the machine")
    node = max(load.nodes, key=lambda node: (not request.gpu or bool(node.gpus), len(node.cores)))
    missing = _obstacle_on(request, running.on(node.node), node, "a node")
    return Obstacle(missing.kind, f"{missing.text} ({named_node(node.node)})")


def _obstacle_on(request: Request, running: NodeReservations, load: Load, whole: str) -> Obstacle:
    """Return what is missing on one node."""
    if load.blocked:
        return Obstacle("memory", f"memory: {load.blocked}")
    if running.alone:
        return Obstacle("alone", "a job that must run alone")
    if request.alone and running.jobs:
        others = f"{running.jobs} other {'job runs' if running.jobs == 1 else 'jobs run'}"
        return Obstacle("turn", f"{whole} to itself: {others}")
    cores, threads = len(load.cores), request.threads
    if threads > len(running.free_cores(load)):
        if threads <= cores - running.threads:
            taken = [core for core in load.cores if core not in load.idle]
            return Obstacle("neighbours", f"other processes on {named_cores(taken)}")
        wanted = "cores" if threads == 1 else f"{threads} cores"
        return Obstacle("cores", f"{wanted}: {running.threads} of {cores} busy with own jobs")
    capacity = running.capacity(replace(load, free_memory=sys.maxsize))
    if capacity is not None and capacity.fits(replace(request, alone=False)):
        free = gibibytes(max(0, load.free_memory - running.memory))
        return Obstacle("memory", f"memory: needs {gibibytes(request.memory)}, {free} free")
    return Obstacle("gpu", _gpu_text(request, load))


def blocked_everywhere(load: Load) -> str:
    """Return why not even one job may start on any node; empty: one may.

    >>> low = Load((0,), (0,), 1, blocked="1 MiB free", node="y")
    >>> blocked_everywhere(low), blocked_everywhere(Load((0,), (0,), 1, node="x", peers=(low,)))
    ('1 MiB free', '')
    """
    return load.blocked if all(node.blocked for node in load.nodes) else ""


def _gpu_text(request: Request, load: Load) -> str:
    if not load.gpus:
        return "a GPU: none is available"
    if busy := [str(gpu.index) for gpu in load.gpus if gpu.busy]:
        return f"a GPU: other processes keep GPU {', '.join(busy)} busy"
    room = f" with {gibibytes(request.gpu_memory)} free" if request.gpu_memory else ""
    return f"a GPU{room}: none of {len(load.gpus)} has room for another job"


Totals = Mapping[str, Wait]
"""Waits so far, by kind of obstacle."""


@dataclass
class _Account:
    """What requests of one kind wait for now, and how long each obstacle has lasted so far."""

    at: float
    now: Obstacle | None = None
    totals: Totals = field(default_factory=dict)

    def charge(self, now: float) -> None:
        """Charge the time since the last call to the obstacle of that time."""
        passed, self.at = now - self.at, now
        if self.now is not None and passed > 0:
            kind, text = self.now.kind, self.now.text
            before = self.totals[kind].seconds if kind in self.totals else 0.0
            # A new mapping: jobs that arrived earlier keep the old one.
            self.totals = {**self.totals, kind: Wait(before + passed, kind, text)}


@dataclass(frozen=True)
class _Arrival:
    """The state of the account when a job arrived, and its waits before that."""

    account: _Account
    totals: Totals
    before: tuple[Wait, ...]


class Waits:
    """How long, and for what, each pending job waits.

    Examples
    --------
    >>> from asynckfold.jobs.placement import Placement
    >>> request, running = Request("b", 1.0), Reservations([Placement(("a",), (0,))])
    >>> waits = Waits()
    >>> waits.arrive(request, now=0.0)
    >>> waits.look(Backlog([request]), running, Load((0,), (0,), 1), now=0.0)
    {Obstacle(kind='cores', text='cores: 1 of 1 busy with own jobs'): 1}
    >>> waits.start("b", now=3.0)
    (Wait(seconds=3.0, kind='cores', text='cores: 1 of 1 busy with own jobs'),)
    """

    def __init__(self) -> None:
        self._accounts: dict[Request, _Account] = {}
        self._arrivals: dict[str, _Arrival] = {}

    def arrive(self, request: Request, now: float, before: Sequence[Wait] = ()) -> None:
        """Register a pending job; `before` are its waits until now."""
        account = self._accounts.setdefault(_kind(request), _Account(now))
        account.charge(now)
        self._arrivals[request.job_id] = _Arrival(account, account.totals, tuple(before))

    def look(
        self, pending: Backlog, running: Reservations, load: Load, now: float
    ) -> dict[Obstacle, int]:
        """Find the current obstacles; return each with its number of jobs."""
        counts: dict[Obstacle, int] = {}
        for account in self._accounts.values():
            account.charge(now)
            account.now = None
        for like, count in pending.kinds():
            reason = obstacle(like, running, load)
            self._accounts[_kind(like)].now = reason
            counts[reason] = counts.get(reason, 0) + count
        return counts

    def start(self, job_id: str, now: float) -> tuple[Wait, ...]:
        """Return the waits of a job that starts now, the longest first."""
        arrival = self._arrivals.pop(job_id)
        arrival.account.charge(now)
        waits = [*arrival.before]
        for kind, total in arrival.account.totals.items():
            known = arrival.totals[kind].seconds if kind in arrival.totals else 0.0
            waits.append(replace(total, seconds=total.seconds - known))
        long_enough = (wait for wait in waits if wait.seconds >= SHORTEST_SECONDS)
        return tuple(sorted(long_enough, key=lambda wait: -wait.seconds))


def _kind(request: Request) -> Request:
    """The requested resources, without the job and its duration."""
    return replace(request, job_id="", seconds=0.0, jobs=(), trainer="plain", stage=0)
