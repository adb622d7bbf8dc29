"""Use of cores over time, of the packed run and of the serial baseline, and of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asynckfold.results.utilization import mean_use
from asynckfold.store import Sample

USE_POINTS = 400


@dataclass(frozen=True)
class CpuUse:
    """CPU use in one phase, thinned to at most `USE_POINTS` moments."""

    phase: str  # "serial" or "packed"
    seconds: tuple[float, ...]  # since the first sample
    used: tuple[float, ...]  # cores in use by all processes
    own: tuple[float, ...]  # cores in use by this run
    cores: int  # allowed
    mean_used: float  # over the time of the phase
    mean_own: float


@dataclass(frozen=True)
class GpuUse:
    """How busy one GPU was with all programs, thinned to at most `USE_POINTS` moments."""

    index: int
    seconds: tuple[float, ...]  # since the first sample
    used: tuple[float, ...]  # share of the time, 0 to 1
    mean: float


def gpu_uses(samples: Sequence[Sample]) -> tuple[GpuUse, ...]:
    """Return the use of each GPU that the run was allowed."""
    found = []
    for index in range(max((len(item.cores) for item in samples), default=0)):
        pairs = [
            (item.at, item.cores[index])
            for item in samples
            if index < len(item.cores) and item.cores[index] >= 0
        ]
        if pairs:
            table = np.array(pairs)
            groups = np.array_split(table, min(USE_POINTS, len(table)))
            at, used = np.array([group.mean(axis=0) for group in groups]).T.tolist()
            seconds = tuple(moment - float(table[0, 0]) for moment in at)
            # Samples become rarer, so each counts for the time since the one before.
            gaps = np.diff(table[:, 0], prepend=table[0, 0])
            mean = float(table[:, 1] @ gaps / gaps.sum()) if gaps.any() else float(table[0, 1])
            found.append(GpuUse(index, seconds, tuple(used), mean))
    return tuple(found)


def uses(samples: Sequence[Sample]) -> tuple[CpuUse, ...]:
    """Return the CPU use of each phase that was sampled, serial first."""
    phases = {phase: [x for x in samples if x.phase == phase] for phase in ("serial", "packed")}
    return tuple(
        _use(phase, found, mean_use(samples, phase)) for phase, found in phases.items() if found
    )


def _use(phase: str, samples: Sequence[Sample], means: tuple[float, float]) -> CpuUse:
    table = np.array([(item.at, item.used, item.own) for item in samples])
    groups = np.array_split(table, min(USE_POINTS, len(table)))
    at, used, own = np.array([group.mean(axis=0) for group in groups]).T.tolist()
    return CpuUse(
        phase=phase,
        seconds=tuple(moment - float(table[0, 0]) for moment in at),
        used=tuple(used),
        own=tuple(own),
        cores=max(len(item.cores) for item in samples),
        mean_used=means[0],
        mean_own=means[1],
    )
