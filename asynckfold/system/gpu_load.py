"""Which GPUs other processes keep busy: smoothed and with hysteresis, as for cores."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from asynckfold.jobs.placement import Gpu
from asynckfold.system.cpu_load import CoreState, next_state
from asynckfold.system.gpus import GpuReading
from asynckfold.system.hysteresis import BusyCores, with_hysteresis

SETTLE_SECONDS = 2.0
"""The driver reports the use of up to a second ago: so long an ended job may still be seen."""


class GpuLoad:
    """The GPUs that are left to others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[int, CoreState] = {}
        self._held_at: dict[int, float] = {}
        self._busy: BusyCores | None = None

    def marked(self, reading: GpuReading, held: Collection[int]) -> tuple[Gpu, ...]:
        """Return the GPUs, those that others keep busy marked; own jobs run on the `held` ones."""
        now = self._clock()
        for gpu in reading.gpus:
            if gpu.index in held:
                self._held_at[gpu.index] = now
            share = reading.others.get(gpu.index)
            if share is None and now - self._held_at.get(gpu.index, -SETTLE_SECONDS) < (
                SETTLE_SECONDS
            ):
                continue  # who uses it cannot be told: its last state stays
            before = self._states.get(gpu.index)
            window = 0.0 if before is None else now - before.known_at
            share = gpu.use if share is None else share
            self._states[gpu.index] = next_state(before, share, window, now)
        busy = frozenset(index for index, state in self._states.items() if state.busy)
        self._busy = with_hysteresis(self._busy, busy, now)
        return tuple(replace(gpu, busy=gpu.index in self._busy.busy) for gpu in reading.gpus)
