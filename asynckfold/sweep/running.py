"""What runs now: each placement with the cores that it holds, its tasks, and how far it is.

::

    RunningJobs ── add, pop: with the reservations, so that no core is reserved twice
                ── holding job → (future, Running)
                ── moved_to: other cores; noted in the store
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from asynckfold.engines.engine import Answer
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.scheduling.preemption import HeldCores
from asynckfold.scheduling.reservations import Reservations


@dataclass(frozen=True)
class Running:
    """A placement that runs, its tasks, when it started in run seconds, and jobs that ended.

    In a row it started when the job before ended. It can be moved once a worker has begun one of
    its jobs: that pins itself before it says so.
    """

    placement: Placement
    tasks: list[Task]
    at: float
    ended: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    paused: bool = False

    @property
    def held(self) -> HeldCores:
        """What it holds, as those see it that make room."""
        return HeldCores(self.placement.cores, self.paused)

    @property
    def can_move(self) -> bool:
        """Whether its worker has it in hand, and can be pinned to other cores as one process."""
        placement = self.placement
        single = placement.trainer not in SEVERAL
        return bool(self.begun and placement.cores) and single


class RunningJobs:
    """The placements that run, by the future of their answer, and what they book.

    Parameters
    ----------
    note_cores : callable
        Notes that an attempt (job id, number) goes on with other cores.
    """

    def __init__(self, note_cores: Callable[[str, int, tuple[int, ...]], None]) -> None:
        self._note_cores = note_cores
        self._running: dict[Future[Answer], Running] = {}
        self.reservations = Reservations()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, future: object) -> bool:
        return future in self._running

    def __iter__(self) -> Iterator[Running]:
        """Return what runs."""
        return iter(self._running.values())

    def __getitem__(self, future: Future[Answer]) -> Running:
        return self._running[future]

    def __setitem__(self, future: Future[Answer], running: Running) -> None:
        """Put in place what was changed; what it reserves is the same."""
        self._running[future] = running

    def items(self) -> list[tuple[Future[Answer], Running]]:
        """Return what runs, with its futures."""
        return list(self._running.items())

    def add(self, future: Future[Answer], running: Running) -> None:
        """Take up a placement, which was reserved when it was decided on."""
        self._running[future] = running

    def pop(self, future: Future[Answer]) -> Running:
        """Let a placement go, and free what it reserved."""
        running = self._running.pop(future)
        self.reservations.remove(running.placement)
        return running

    def holding(self, job_id: str) -> tuple[Future[Answer], Running] | None:
        """Return what a job belongs to, if it runs."""
        for future, running in self._running.items():
            if job_id in running.placement.jobs:
                return future, running
        return None

    def moved_to(self, running: Running, cores: tuple[int, ...]) -> Running:
        """Let a placement hold these cores and no others."""
        placement = replace(running.placement, cores=cores)
        self.reservations.remove(running.placement)
        self.reservations.add(placement)
        if cores != running.placement.cores:
            for task in running.tasks:
                self._note_cores(task.job.id, task.attempt, cores)
        return replace(running, placement=placement)
