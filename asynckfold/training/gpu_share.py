"""The share of a job's time in which its GPU computes, from its first steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from operator import sub

from torch import Tensor

from asynckfold.jobs.messages import GpuShare
from asynckfold.training.training_run import StepTaker, Training

TIMED_STEPS = 10
"""Steps whose median counts: between some lie evaluations, checkpoints and pauses."""

Busy = Callable[[Callable[[], Tensor]], tuple[Tensor, float]]
"""Work → its result, and the seconds that a GPU computes for it, 0 if unknown. Events around it
would time launches."""


class ShareMeter:
    """Takes steps: times the first, reports the share once, and leaves its place.

    `busy` tells the seconds of the GPU, if the job has at least `least_seconds` left.
    """

    def __init__(self, step: StepTaker, busy: Busy, least_seconds: float = 0.0) -> None:
        self._step, self._busy, self._least_seconds = step, busy, least_seconds
        self._began: list[float] = []

    def __call__(self, training: Training) -> Tensor:
        """Take a step; return the loss, detached."""
        self._began.append(time.perf_counter())
        work = partial(self._step, training)
        if len(self._began) <= TIMED_STEPS:
            return work()
        training.graph = self._step
        step = statistics.median(map(sub, self._began[1:], self._began))
        if training.steps_left * step < self._least_seconds:
            return work()
        loss, seconds = self._busy(work)
        if seconds > 0:
            event = GpuShare(training.task.job.id, min(1.0, seconds / step))
            training.readings.append((lambda: True, lambda report: report(event)))
        return loss
