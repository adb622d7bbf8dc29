"""What runs now: each placement with the cores that it holds, its tasks, and how far it is.

::

    RunningJobs ── add, pop: with the bookings, so that no core is booked twice
                ── holding job → (future, Running)
                ── rebook: other cores, or more of them for a while; noted in the store
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from asynckfold.engines.engine import Answer
from asynckfold.jobs.messages import Progress, Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.scheduling.elastic import Pace
from asynckfold.scheduling.place import Bookings
from asynckfold.scheduling.preemption import Held


@dataclass(frozen=True)
class Running:
    """A placement that runs, its tasks, when it started in run seconds, and jobs that ended.

    In a row it started when the job before ended. It can be moved once a worker has begun one of
    its jobs: that pins itself before it says so. Beyond the cores of its placement it may hold some
    that are lent to it, until its worker has given them back and goes on with those that it keeps;
    `given_back` says when that was asked for lately, and `asks` how often its worker was asked for
    another number of threads. `pace` is that of its job since the last change of threads, by the
    news of `paced`; `before`, seconds of a batch until then. It grows no more once it was slower
    with what was lent.
    """

    placement: Placement
    tasks: list[Task]
    at: float
    ended: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    paused: bool = False
    lent: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    given_back: tuple[float, ...] = ()
    asks: int = 0
    pace: Pace | None = None
    paced: str = ""
    before: float | None = None
    slower: bool = False

    @property
    def seconds(self) -> float | None:
        """Seconds of a batch with the threads that it has now, once they are known."""
        return None if self.pace is None else self.pace.seconds

    @property
    def held(self) -> Held:
        """What it holds, as those see it that make room."""
        return Held(self.placement.cores, self.paused)

    @property
    def whole(self) -> Placement:
        """The placement with all cores that it holds now."""
        if not self.lent:
            return self.placement
        return replace(self.placement, cores=(*self.placement.cores, *self.lent))

    @property
    def can_move(self) -> bool:
        """Whether its worker has it in hand, and can be pinned to other cores as one process."""
        placement = self.placement
        single = placement.trainer not in SEVERAL
        return bool(self.begun and placement.cores) and single and not self.lent

    @property
    def can_stretch(self) -> bool:
        """Whether more threads may help: not on a GPU, nor where memory was short before.

        Several processes of a job have one thread each, and a row of short ones is soon over.
        """
        placement = self.placement
        if not self.begun or placement.trainer in SEVERAL or placement.is_row:
            return False
        return bool(placement.cores) and placement.gpu is None and not placement.alone

    def is_disturbed(self, load: Load) -> bool:
        """Whether others use one of its cores."""
        return self.paused or not {*self.whole.cores} <= {*load.idle}

    def with_progress(self, item: Progress, now: float) -> Running:
        """Watch how fast it is: by the news of one of its jobs."""
        batches = (item.epoch - 1) * item.batches + item.batch
        if self.pace is None:
            return replace(self, pace=Pace(now, now, batches, batches), paced=item.job_id)
        if self.paced != item.job_id:
            return self
        return replace(self, pace=replace(self.pace, until=now, last=batches))

    def watched_anew(self, now: float) -> Running:
        """Watch its pace from now on."""
        known = self.pace
        return replace(self, pace=known and Pace(now, now, known.last, known.last))


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
        self.bookings = Bookings()

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
        """Put in place what was changed; what it books is the same."""
        self._running[future] = running

    def items(self) -> list[tuple[Future[Answer], Running]]:
        """Return what runs, with its futures."""
        return list(self._running.items())

    def add(self, future: Future[Answer], running: Running) -> None:
        """Take up a placement, which was booked when it was decided on."""
        self._running[future] = running

    def pop(self, future: Future[Answer]) -> Running:
        """Let a placement go, and free what it booked."""
        running = self._running.pop(future)
        self.bookings.remove(running.placement)
        return running

    def holding(self, job_id: str) -> tuple[Future[Answer], Running] | None:
        """Return what a job belongs to, if it runs."""
        for future, running in self._running.items():
            if job_id in running.placement.jobs:
                return future, running
        return None

    def rebooked(self, running: Running, cores: tuple[int, ...]) -> Running:
        """Let a placement hold these cores and no others, those beyond its threads lent."""
        count = len(running.placement.cores)
        placement = replace(running.placement, cores=cores[:count])
        self.bookings.remove(running.placement)
        self.bookings.add(placement)
        if cores != running.whole.cores:
            for task in running.tasks:
                self._note_cores(task.job.id, task.attempt, cores)
        return replace(running, placement=placement, lent=cores[count:])
