"""Idle cores lent to running jobs, and taken back where another job can start on them.

::

    stretch ── `elastic.stretched` decides ──► more cores at once, then more threads
                                          └──► fewer threads, and the cores when that is told
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from asynckfold.engines.engine import Answer, Engine
from asynckfold.jobs.messages import Progress, Remark, Resized
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.elastic import Elastic, stretched
from asynckfold.scheduling.place import Bookings
from asynckfold.scheduling.wait_reasons import named_cores
from asynckfold.sweep.running import Running, RunningJobs
from asynckfold.system.hysteresis import MOST_CHANGES, WINDOW_SECONDS


class Lender:
    """Lends cores to what runs.

    Parameters
    ----------
    running : RunningJobs
        To whom.
    engine : Engine
        Tells the workers.
    steps : callable
        Seconds of a step of a job with 1, 2, … threads.
    expected_end : callable
        When a placement ends, in run seconds, with the threads of the plan.
    clock : callable
        Seconds that never jump.
    tell : callable
        Receives what becomes of a job.
    """

    def __init__(
        self,
        running: RunningJobs,
        engine: Engine,
        steps: Callable[[str], Sequence[float]],
        expected_end: Callable[[Running], float],
        clock: Callable[[], float],
        tell: Callable[[Remark], None],
    ) -> None:
        self._running = running
        self._engine = engine
        self._steps = steps
        self._expected_end = expected_end
        self._clock = clock
        self._tell = tell

    def stretch(
        self,
        load: Load,
        placed: Sequence[Placement],
        soon: Sequence[Placement],
        yields: bool,
    ) -> None:
        """Lend idle cores to running jobs, and ask for those back on which others start soon.

        Parameters
        ----------
        load : Load
            The machine now.
        placed : sequence of Placement
            What starts now.
        soon : sequence of Placement
            What could start on cores that are lent.
        yields : bool
            Whether running jobs make room for others.
        """
        held = Bookings([*(item.whole for item in self._running), *placed, *soon])
        # Threads wait for each other: for the one whose core somebody else uses.
        load = replace(load, idle=tuple(core for core in load.idle if core not in load.others))
        free = [] if load.blocked else held.free_cores(load)
        wanted = {core for item in soon for core in item.cores}
        if not free and not any(item.lent for item in self._running):
            return
        if yields and any(item.is_disturbed(load) for item in self._running):
            # Those that must make room come first.
            free, wanted = [], {core for item in self._running for core in item.lent}
        last_first = sorted(self._running.items(), key=lambda pair: -self._expected_end(pair[1]))
        running = {
            future: self._elastic(item)
            for future, item in last_first
            if item.can_stretch and not item.keeps
        }
        for future, cores in stretched(running, load, free, wanted).items():
            item = replace(self._running[future], slower=running[future].slower)
            self._running[future] = self._asked(future, item, cores)

    def note_pace(self, item: Progress) -> None:
        """Note how fast a job is that may grow."""
        found = self._running.holding(item.job_id)
        if found is not None:
            future, running = found
            self._running[future] = running.with_progress(item, self._clock())

    def note_resized(self, item: Resized) -> None:
        """Free the cores that a worker has given back, and watch its pace from now on."""
        found = self._running.holding(item.job_id)
        if found is None or item.ask != found[1].asks:
            return
        future, running = found
        if running.keeps:
            self._engine.shift(future, running.keeps)
            self._tell(_resized(running, "shrunk", running.keeps))
            running = self._running.rebooked(running, running.keeps)
        else:
            running = replace(running, before=running.seconds)
        self._running[future] = replace(running, keeps=()).watched_anew(self._clock())

    def _asked(self, future: Future[Answer], item: Running, cores: tuple[int, ...]) -> Running:
        """Lend a job the cores that it has not yet, or ask it to keep only these."""
        asked = replace(item, asks=item.asks + 1)
        if len(cores) > len(item.whole.cores):
            self._engine.shift(future, cores, len(cores))
            self._tell(_resized(item, "grown", cores))
            return self._running.rebooked(asked, cores)
        self._engine.shift(future, item.whole.cores, len(cores))
        given_back = (*item.given_back, self._clock())[-MOST_CHANGES:]
        return replace(asked, keeps=cores, given_back=given_back)

    def _elastic(self, item: Running) -> Elastic:
        now = self._clock()
        lately = sum(now - moment < WINDOW_SECONDS for moment in item.given_back)
        seconds = item.seconds
        slower = bool(item.lent and seconds and item.before and seconds > item.before)
        return Elastic(
            item.whole.cores,
            item.placement.threads,
            self._steps(item.placement.jobs[0]),
            # What is not known before cannot be seen to become slower.
            seconds is None or lately == MOST_CHANGES,
            slower or item.slower,
        )


def _resized(item: Running, kind: str, cores: Sequence[int]) -> Remark:
    """What becomes of a job whose threads change: in the log of the run."""
    now, before = len(cores), len(item.whole.cores)
    text = (
        f"{now} {'thread' if now == 1 else 'threads'} on {named_cores(cores)}, before {before}: "
        + (
            "cores became free"
            if kind == "grown"
            else "with more it was slower"
            if item.slower
            else "others need the cores that it gave back"
        )
    )
    return Remark(item.placement.jobs[0], kind, text)
