"""The running placements: their tasks, their progress, and their reservations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from asynckfold.engines.engine import Answer
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.scheduling.preemption import HeldCores
from asynckfold.scheduling.reservations import Reservations


@dataclass(eq=False)
class RunningPlacement:
    """A running placement.

    Parameters
    ----------
    placement : Placement
        Where it runs now.
    tasks : list of Task
        One for each of its jobs.
    started : float
        Run seconds at its start; in a batch of short jobs, at the start of the present one.
    ended, begun : set of str
        Jobs that have a result, and jobs that a worker has started.
    paused : bool
        Whether it pauses because other processes use its cores.
    """

    placement: Placement
    tasks: list[Task]
    started: float
    ended: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    paused: bool = False

    @property
    def held(self) -> HeldCores:
        """Its cores, for `reassign_cores`."""
        return HeldCores(self.placement.cores, self.paused, self.placement.node)

    @property
    def can_move(self) -> bool:
        """Whether its worker can be pinned to other cores.

        Only after `Started`: the worker sets its affinity before it sends that.
        """
        single = self.placement.trainer not in SEVERAL
        return bool(self.begun and self.placement.cores) and single


class RunningJobs:
    """The running placements by their futures, and their reservations.

    `note_cores` records that an attempt (job id, number) moved to other cores.
    """

    def __init__(self, note_cores: Callable[[str, int, tuple[int, ...]], None]) -> None:
        self._note_cores = note_cores
        self._running: dict[Future[Answer], RunningPlacement] = {}
        self.reservations = Reservations()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, future: object) -> bool:
        return future in self._running

    def items(self) -> list[tuple[Future[Answer], RunningPlacement]]:
        """Return the running placements with their futures, the oldest first."""
        return list(self._running.items())

    def placements(self) -> list[Placement]:
        """Return the running placements, the oldest first."""
        return [item.placement for item in self._running.values()]

    def add(self, future: Future[Answer], running: RunningPlacement) -> None:
        """Register a running placement; its cores are already reserved."""
        self._running[future] = running

    def pop(self, future: Future[Answer]) -> RunningPlacement:
        """Remove a placement and free its reservation."""
        running = self._running.pop(future)
        self.reservations.remove(running.placement)
        return running

    def holding(self, job_id: str) -> RunningPlacement | None:
        """Return the running placement of a job, if there is one."""
        return next((it for it in self._running.values() if job_id in it.placement.jobs), None)

    def move(self, running: RunningPlacement, cores: tuple[int, ...]) -> None:
        """Let a placement go on with these cores; without any, it pauses and keeps its own."""
        running.paused = not cores
        if not cores or cores == running.placement.cores:
            return
        self.reservations.remove(running.placement)
        running.placement = replace(running.placement, cores=cores)
        self.reservations.add(running.placement)
        for task in running.tasks:
            self._note_cores(task.job.id, task.attempt, cores)
