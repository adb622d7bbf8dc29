"""Jobs of several processes against the measured serial baseline, which trains in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Baseline, Epoch
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sanitize import shown

Line = tuple[tuple[float, float], ...]
"""(seconds since training began, mean training loss) at the end of each epoch, evaluation included;
means over the folds."""


@dataclass(frozen=True)
class Race:
    """A candidate trained by several processes per job, and by one."""

    candidate: str
    processes: int  # per job
    threads: int  # of the one process
    several: Line
    one: Line
    class_accuracy: tuple[float, ...]  # recall of each class by one process; NaN without samples


def races(found: CVResults) -> tuple[Race, ...]:
    """Return the candidates with several processes per job that the baseline trained too."""
    baseline = found.baseline
    if baseline is None or not baseline.epochs:
        return ()
    both: dict[str, list[Job]] = {}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if result and result.epochs and baseline.epochs.get(job.id):
            both.setdefault(job.candidate, []).append(job)
    return tuple(_race(found, baseline, jobs) for jobs in both.values())


def _race(found: CVResults, baseline: Baseline, jobs: Sequence[Job]) -> Race:
    counts = np.array([baseline.class_counts[job.id] for job in jobs]).sum(axis=0).tolist()
    return Race(
        candidate=shown(jobs[0]).candidate,
        processes=found.plan.params.processes,
        threads=baseline.threads,
        several=_mean([_line(found.results[job.id].epochs) for job in jobs]),
        one=_mean([baseline.epochs[job.id] for job in jobs]),
        class_accuracy=tuple(right / of if of else math.nan for right, of in counts),
    )


def _line(epochs: Sequence[Epoch]) -> Line:
    ends = accumulate(item.seconds for item in epochs)
    return tuple(zip(ends, (item.train_loss for item in epochs), strict=True))


def _mean(lines: Sequence[Sequence[Sequence[float]]]) -> Line:
    """Return the mean of lines, up to the end of the shortest.

    >>> _mean([[(1.0, 0.5), (2.0, 0.25)], [(3.0, 1.5)]])
    ((2.0, 1.0),)
    """
    length = min(map(len, lines))
    means = np.mean([line[:length] for line in lines], axis=0)
    return tuple((seconds, loss) for seconds, loss in means.tolist())
