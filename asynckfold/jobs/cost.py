"""What a model costs: seconds of a step by threads, floating-point operations, bytes. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from asynckfold.jobs.trainer_params import TrainerParams

if TYPE_CHECKING:
    from asynckfold.jobs.folds import Fold


@dataclass(frozen=True)
class Work:
    """Training steps and evaluation batches of one job, over all its epochs."""

    steps: int
    evaluations: int


def work_of(fold: Fold, params: TrainerParams, batch_size: int) -> Work:
    """Return the work of a job that holds out `fold`.

    >>> import numpy as np
    >>> from asynckfold.jobs.folds import Fold
    >>> fold = Fold(0, 0, np.arange(100), np.arange(100, 150))
    >>> work_of(fold, TrainerParams(epochs=2, eval_batch_size=20), batch_size=32)
    Work(steps=8, evaluations=6)
    """
    return Work(
        params.epochs * math.ceil(params.seen(len(fold.fitted)) / batch_size),
        params.epochs * math.ceil(len(fold.valid) / params.eval_batch_size),
    )


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    >>> cost = Cost({1: 0.004, 2: 0.003}, {1: 0.002, 2: 0.001})
    >>> round(cost.seconds(Work(100, 10), threads=2), 6)
    0.31
    """

    # of a training step, by threads (1 included), all cores busy with this
    step_seconds: Mapping[int, float]
    eval_seconds: Mapping[int, float]  # of an evaluation batch, likewise
    flops: int = 0  # of a training step, forward and backward
    memory: int = 0  # bytes of a job beyond its process's baseline
    gpu_memory: int = 0
    gpu_seconds: float = 0.0  # of a training step in which the kernels of a GPU run
    # speed of all processes of a job over that of one; 0: as many times as there are processes
    processes_gain: float = 0.0

    def seconds(self, work: Work, threads: int) -> float:
        """Return the seconds of a job."""
        step, evaluation = at(self.step_seconds, threads), at(self.eval_seconds, threads)
        return work.steps * step + work.evaluations * evaluation

    def scaled(self, step_seconds: float) -> Cost:
        """Return this cost scaled to `step_seconds` of one thread, if that is positive."""
        if not 0 < step_seconds < math.inf:
            return self
        ratio = step_seconds / self.step_seconds[1]
        return replace(
            self,
            step_seconds={count: ratio * time for count, time in self.step_seconds.items()},
            eval_seconds={count: ratio * time for count, time in self.eval_seconds.items()},
        )

    def shared_by(self, processes: int) -> Cost:
        """Return the cost of jobs of `processes` processes with one thread each.

        The entry for that many threads then stands for that many processes.

        >>> round(Cost({1: 0.004}, {1: 0.002}).shared_by(2).seconds(Work(100, 10), threads=2), 6)
        0.21
        """
        if processes == 1:
            return self
        gain = self.processes_gain or processes
        step, evaluation = at(self.step_seconds, 1), at(self.eval_seconds, 1)
        return replace(
            self,
            step_seconds={1: step, processes: step / gain},
            eval_seconds={1: evaluation, processes: evaluation / processes},
            memory=self.memory * processes,
        )

    def fused(self, gain: float) -> Cost:
        """Return the cost within a fused group: steps `gain` times faster, evaluation unchanged.

        >>> Cost({1: 0.004}, {1: 0.002}).fused(2.0).seconds(Work(100, 10), threads=1)
        0.22
        """
        steps = {count: seconds / gain for count, seconds in self.step_seconds.items()}
        return replace(self, step_seconds=steps)


def at(seconds: Mapping[int, float], threads: int) -> float:
    """Interpolate seconds at a number of threads.

    Linear in 1 / threads (Amdahl 1967); beyond the largest known number, more threads bring
    nothing.

    >>> at({1: 8.0, 4: 2.0}, 2)
    4.0
    >>> at({1: 8.0, 4: 2.0}, 16)
    2.0
    """
    if threads in seconds:
        return seconds[threads]
    known = sorted(seconds)
    for fewer, more in pairwise(known):
        if fewer < threads < more:
            share = (1 / fewer - 1 / threads) / (1 / fewer - 1 / more)
            return seconds[fewer] + share * (seconds[more] - seconds[fewer])
    return seconds[known[-1]]
