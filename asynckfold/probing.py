"""Probes as the sweep's own placements: so many side by side, each on cores of its own."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from asynckfold.costs import Timing
from asynckfold.engines.engine import Answer, Engine
from asynckfold.errors import UnpackError, WorkerDiedError
from asynckfold.interruption import Interruption
from asynckfold.placement import Placement
from asynckfold.plan import Plan
from asynckfold.sweep import TICK_SECONDS, room


@dataclass(frozen=True, eq=False)
class Prober:
    """Times a model on an engine.

    Parameters
    ----------
    engine : Engine
        Whose workers hold the sweep.
    plan : Plan
        Its jobs.
    memory : Mapping of str to int
        Expected bytes of a job by model: no more probes at once than fit.
    signals : Interruption
        Looked at meanwhile.
    max_wait : float or None
        Seconds to wait where nothing may start.
    """

    engine: Engine
    plan: Plan
    memory: Mapping[str, int]
    signals: Interruption
    max_wait: float | None = None

    def __call__(self, model: str, threads: int, copies: int) -> list[Timing]:
        """Probe a model with `threads`, up to `copies` times at once; idle cores come first."""
        job = next(job for job in self.plan.jobs if job.model == model)
        load = room(self.engine, self.max_wait, self.signals)
        order = (*load.idle, *(core for core in load.cores if core not in load.idle))
        fitting = load.free_memory // max(1, self.memory.get(model, 0))
        count = max(1, min(copies, len(order) // threads, fitting))
        placements = [
            Placement((job.id,), order[start : start + threads], threads, trainer="probe")
            for start in range(0, count * threads, threads)
        ]
        futures = [self.engine.submit(placement, []) for placement in placements]
        while wait(futures, timeout=TICK_SECONDS).not_done:
            self.signals.check()
            self.engine.load(placements)
        return [_timing(future) for future in futures]


def _timing(future: Future[Answer]) -> Timing:
    try:
        found: Timing = future.result().results[0]
    except (WorkerDiedError, UnpackError) as error:
        return Timing(failure=str(error))
    return found
