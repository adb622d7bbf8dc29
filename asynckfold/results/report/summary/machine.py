"""The machine: cores in use over time, of the packed run and of the serial baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asynckfold.store import Sample

USE_POINTS = 400
PHASES = ("serial", "packed")


@dataclass(frozen=True)
class Use:
    """CPU use over one phase, thinned to at most `USE_POINTS` moments.

    Parameters
    ----------
    phase : {"packed", "serial"}
        What was running.
    seconds : tuple of float
        Since the first sample of the phase.
    used, own : tuple of float
        Cores' worth of use: by everyone, and by this run.
    cores : int
        Allowed cores.
    mean_used, mean_own : float
        Over all samples of the phase, cores' worth.
    """

    phase: str
    seconds: tuple[float, ...]
    used: tuple[float, ...]
    own: tuple[float, ...]
    cores: int
    mean_used: float
    mean_own: float


def uses(samples: Sequence[Sample]) -> tuple[Use, ...]:
    """Return the CPU use of each phase that was sampled, serial first."""
    phases = {phase: [item for item in samples if item.phase == phase] for phase in PHASES}
    return tuple(_use(phase, found) for phase, found in phases.items() if found)


def _use(phase: str, samples: Sequence[Sample]) -> Use:
    table = np.array([(item.at, item.used, item.own) for item in samples])
    groups = np.array_split(table, min(USE_POINTS, len(table)))
    thinned = np.array([group.mean(axis=0) for group in groups])
    seconds = thinned[:, 0] - table[0, 0]
    return Use(
        phase=phase,
        seconds=tuple(seconds.tolist()),
        used=tuple(thinned[:, 1].tolist()),
        own=tuple(thinned[:, 2].tolist()),
        cores=max(len(item.cores) for item in samples),
        mean_used=float(table[:, 1].mean()),
        mean_own=float(table[:, 2].mean()),
    )
