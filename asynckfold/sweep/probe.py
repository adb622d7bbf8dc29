"""Probes, run as placements of the sweep's engine: several side by side, each on its own cores.

On a GPU they share one. The first step there takes seconds, in which nothing would be side by side:
each probe pauses after it until all have got so far.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from asynckfold.engines.engine import Answer, Engine
from asynckfold.errors import UnpackError, WorkerDiedError
from asynckfold.jobs.cost import Timing
from asynckfold.jobs.messages import Started
from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, Placement
from asynckfold.jobs.plan import Plan
from asynckfold.scheduling.reservations import emptiest, usable
from asynckfold.sweep.loop import Inbox
from asynckfold.sweep.single_task import TICK_SECONDS, room
from asynckfold.system.signals import Interruption

MEETING_SECONDS = 60.0
"""How long probes on a GPU wait for each other: to open a GPU and compile kernels takes seconds."""


@dataclass(frozen=True, eq=False)
class Prober:
    """Times a model on an engine.

    `memory` are the expected bytes of a job by model, `gpu_memory` those of earlier probes: no more
    probes run at once than fit.
    """

    engine: Engine
    plan: Plan
    memory: Mapping[str, int]
    signals: Interruption
    max_wait: float | None = None
    inbox: Inbox = field(default_factory=queue.SimpleQueue)
    gpu_memory: dict[str, int] = field(default_factory=dict)

    def __call__(self, model: str, threads: int, copies: int, together: int = 1) -> list[Timing]:
        """Probe a model with `threads`, up to `copies` times side by side, on idle cores first.

        Each probe trains a fusion group of `together` jobs. The timings are fewer than copies if
        fewer fit, and none if the GPU is gone.
        """
        jobs = [job.id for job in self.plan.jobs if job.model == model][:together]
        on_gpu = self.plan.device == "cuda"
        load = room(self.engine, self.max_wait, self.signals, on_gpu)
        if on_gpu and not load.gpus:
            return []
        order = (*load.idle, *(core for core in load.cores if core not in load.idle))
        fitting = load.free_memory // max(1, together * self.memory.get(model, 0))
        count, gpu = max(1, min(copies, len(order) // threads, fitting)), None
        if on_gpu:
            gpu = min(load.gpus, key=lambda gpu: (gpu.busy, *emptiest(gpu)))
            size = together * self.gpu_memory.get(model, 0) + GPU_CONTEXT_BYTES
            count = max(1, min(count, usable(gpu) // size))
        placements = [
            Placement(
                tuple(jobs),
                order[start : start + threads],
                threads,
                None if gpu is None else gpu.index,
                trainer="probe",
                gpu_uuid="" if gpu is None else gpu.uuid,
                node=load.node,
            )
            for start in range(0, count * threads, threads)
        ]
        futures = [self.engine.submit(placement, []) for placement in placements]
        met = not on_gpu or count == 1 or self._meet(futures, placements)
        while wait(futures, timeout=TICK_SECONDS).not_done:
            self.signals.check()
            self.engine.load(placements)
        timings = [_timing(future) for future in futures]
        if together == 1:
            self.gpu_memory[model] = max(item.gpu_memory for item in timings)
        # Probes that did not meet were not side by side.
        return timings if met else timings[:1]

    def _meet(self, futures: Sequence[Future[Answer]], placements: Sequence[Placement]) -> bool:
        """Let probes wait for each other after their first step; return whether all met."""
        for future in futures:
            self.engine.shift(future, ())
        here: set[int] = set()
        others = []
        end = time.monotonic() + MEETING_SECONDS
        while len(here) < len(futures) and time.monotonic() < end:
            if any(future.done() for future in futures):
                break
            self.signals.check()
            self.engine.load(placements)
            try:
                event = self.inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, Started):
                here.add(event.pid)
            else:
                others.append(event)
        for event in others:
            self.inbox.put(event)
        for future, placement in zip(futures, placements, strict=True):
            self.engine.shift(future, placement.cores)
        return len(here) == len(futures)


def _timing(future: Future[Answer]) -> Timing:
    try:
        found: Timing = future.result().results[0]
    except (WorkerDiedError, UnpackError) as error:
        return Timing(failure=str(error))
    return found
