"""What pending jobs wait for, and how long: pure, the time is passed in.

`scheduling.place` says what starts. What keeps a job from it follows from the same three values,
and is the same for all jobs that ask for the same; so one account a kind of request is kept, and a
job only remembers where the account stood when it came. That costs nothing more at 100,000 pending
jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from asynckfold.jobs.placement import Load, Request, Wait
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import Reservations, place
from asynckfold.system.units import gibibytes

SHORTEST_SECONDS = 0.05
"""What a job waited for shorter than this is not told."""

MOST_CORES = 8
"""Cores that are named one by one."""


@dataclass(frozen=True)
class Obstacle:
    """Why pending jobs do not start.

    Parameters
    ----------
    kind : {"cores", "neighbours", "memory", "gpu", "alone", "turn"}
        Own jobs hold the cores, or others do; memory or a GPU lacks; a job that must be alone runs,
        or the job itself must be alone and waits for its turn.
    text : str
        What is waited for, with its numbers: completes "waits for".
    """

    kind: str
    text: str


def obstacle(request: Request, running: Reservations, load: Load) -> Obstacle:
    """Say why a request does not start that `place` has left pending.

    Where several things lack, the first of: a turn alone, cores, a GPU, memory.

    Parameters
    ----------
    request : Request
        It is pending.
    running : Reservations
        What runs, what has just been placed included.
    load : Load
        That the placement saw.

    Examples
    --------
    >>> from asynckfold.jobs.placement import Placement
    >>> running = Reservations([Placement(("a",), (0,)), Placement(("b",), (1,))])
    >>> obstacle(Request("c", 1.0), running, Load((0, 1), (0, 1), free_memory=1)).text
    'cores: 2 of 2 busy with own jobs'
    >>> obstacle(Request("c", 1.0), Reservations(running), Load((0, 1, 2), (0, 1), 1)).text
    'neighbours on core 2'
    """
    if load.blocked:
        return Obstacle("memory", f"memory: {load.blocked}")
    if running.alone:
        return Obstacle("alone", "the end of a job that runs alone")
    if request.alone:
        others = f"{len(running)} {'other runs' if len(running) == 1 else 'others run'}"
        return Obstacle("turn", f"a turn alone: {others}")
    cores, threads = len(load.cores), request.threads
    if threads > len(running.free_cores(load)):
        if threads <= cores - running.threads:
            taken = [core for core in load.cores if core not in load.idle]
            return Obstacle("neighbours", f"neighbours on {named_cores(taken)}")
        wanted = "cores" if threads == 1 else f"{threads} cores"
        return Obstacle("cores", f"{wanted}: {running.threads} of {cores} busy with own jobs")
    if place([request], running, replace(load, free_memory=sys.maxsize)):
        free = gibibytes(max(0, load.free_memory - running.memory))
        return Obstacle("memory", f"memory: needs {gibibytes(request.memory)}, {free} free")
    return Obstacle("gpu", _gpu_text(request, load))


def _gpu_text(request: Request, load: Load) -> str:
    if not load.gpus:
        return "a GPU: none is there"
    room = f" with {gibibytes(request.gpu_memory)} free" if request.gpu_memory else ""
    return f"a GPU{room}: none of {len(load.gpus)} has room for a further job"


def named_cores(cores: Sequence[int]) -> str:
    """Return cores in words.

    >>> named_cores([1]), named_cores([0, 1]), named_cores(range(40))
    ('core 1', 'cores 0, 1', 'cores 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    shown = ", ".join(map(str, cores[:MOST_CORES]))
    more = f" and {len(cores) - MOST_CORES} more" if len(cores) > MOST_CORES else ""
    return f"{'core' if len(cores) == 1 else 'cores'} {shown}{more}"


Totals = Mapping[str, Wait]
"""By kind of obstacle."""


@dataclass
class _Account:
    """What requests of one kind wait for, and for how long each has been in the way so far."""

    at: float
    now: Obstacle | None = None
    totals: Totals = field(default_factory=dict)

    def charge(self, now: float) -> None:
        """Count the time since the last look for what was in the way then."""
        passed, self.at = now - self.at, now
        if self.now is not None and passed > 0:
            kind, text = self.now.kind, self.now.text
            before = self.totals[kind].seconds if kind in self.totals else 0.0
            # A new mapping: those who came earlier keep the old one.
            self.totals = {**self.totals, kind: Wait(before + passed, kind, text)}


@dataclass(frozen=True)
class _Arrival:
    """Where the account stood when a job came, and what it waited for elsewhere."""

    account: _Account
    totals: Totals
    before: tuple[Wait, ...]


class Waits:
    """Since when, and for what, each pending job waits.

    Examples
    --------
    >>> from asynckfold.jobs.placement import Placement
    >>> request, running = Request("b", 1.0), Reservations([Placement(("a",), (0,))])
    >>> waits = Waits()
    >>> waits.come(request, now=0.0)
    >>> waits.look(Backlog([request]), running, Load((0,), (0,), 1), now=0.0)
    {Obstacle(kind='cores', text='cores: 1 of 1 busy with own jobs'): 1}
    >>> waits.start("b", now=3.0)
    (Wait(seconds=3.0, kind='cores', text='cores: 1 of 1 busy with own jobs'),)
    """

    def __init__(self) -> None:
        self._accounts: dict[Request, _Account] = {}
        self._arrivals: dict[str, _Arrival] = {}

    def come(self, request: Request, now: float, before: Sequence[Wait] = ()) -> None:
        """A job is pending from now on; `before` is what it waited for until then."""
        account = self._accounts.setdefault(_kind(request), _Account(now))
        account.charge(now)
        self._arrivals[request.job_id] = _Arrival(account, account.totals, tuple(before))

    def look(
        self, pending: Backlog, running: Reservations, load: Load, now: float
    ) -> dict[Obstacle, int]:
        """Find out what is in the way from now on; return it, with the number of jobs."""
        found: dict[Obstacle, int] = {}
        for account in self._accounts.values():
            account.charge(now)
            account.now = None
        for like, count in pending.kinds():
            reason = obstacle(like, running, load)
            self._accounts[_kind(like)].now = reason
            found[reason] = found.get(reason, 0) + count
        return found

    def start(self, job_id: str, now: float) -> tuple[Wait, ...]:
        """Return what a job waited for that starts now, the longest first."""
        arrival = self._arrivals.pop(job_id)
        arrival.account.charge(now)
        waits = [*arrival.before]
        for kind, total in arrival.account.totals.items():
            known = arrival.totals[kind].seconds if kind in arrival.totals else 0.0
            waits.append(replace(total, seconds=total.seconds - known))
        told = (wait for wait in waits if wait.seconds >= SHORTEST_SECONDS)
        return tuple(sorted(told, key=lambda wait: -wait.seconds))


def _kind(request: Request) -> Request:
    """What a request asks for, whoever asks and however long it takes."""
    return replace(request, job_id="", seconds=0.0, jobs=(), trainer="plain")
