"""Several processes against one: training loss over wall-clock time, accuracy of each class.

One process is the serial baseline, where it was measured: the same job, as a user writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Epoch
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sanitize import clean

Line = tuple[tuple[float, float], ...]
"""Seconds since training began, and the mean training loss, at the end of each epoch."""


@dataclass(frozen=True)
class Race:
    """A candidate whose jobs were trained by several processes, and by one.

    Parameters
    ----------
    candidate : str
        Its name.
    processes : int
        Of a job.
    threads : int
        Of the one process.
    several, one : tuple of (float, float)
        Seconds and training loss at the end of each epoch, evaluation included; means over the
        folds.
    class_accuracy : tuple of float
        Of one process: share of each class that it recognised; NaN for a class without samples.
    """

    candidate: str
    processes: int
    threads: int
    several: Line
    one: Line
    class_accuracy: tuple[float, ...]


def races(found: CVResults) -> tuple[Race, ...]:
    """Return what is known of candidates with several processes a job; none without a baseline."""
    if found.baseline is None or not found.baseline.epochs:
        return ()
    jobs: dict[str, list[Job]] = {}
    for job in found.plan.jobs:
        jobs.setdefault(job.candidate, []).append(job)
    return tuple(race for group in jobs.values() if (race := _race(found, group)) is not None)


def _race(found: CVResults, jobs: Sequence[Job]) -> Race | None:
    baseline = found.baseline
    assert baseline is not None
    histories = {job.id: found.results[job.id].epochs for job in jobs if job.id in found.results}
    both = [job for job in jobs if histories.get(job.id) and baseline.epochs.get(job.id)]
    if not both:
        return None
    several = _mean([_line(histories[job.id]) for job in both])
    one = _mean([baseline.epochs[job.id] for job in both])
    first = jobs[0]
    counts = np.array([baseline.class_counts[job.id] for job in both]).sum(axis=0).tolist()
    return Race(
        candidate=f"{clean(first.model)}/{clean(first.lr_schedule)}",
        processes=found.plan.params.processes,
        threads=baseline.threads,
        several=several,
        one=one,
        class_accuracy=tuple(right / of if of else math.nan for right, of in counts),
    )


def _line(epochs: Sequence[Epoch]) -> Line:
    ends = accumulate(item.seconds for item in epochs)
    return tuple(zip(ends, (item.train_loss for item in epochs), strict=True))


def _mean(lines: Sequence[Sequence[Sequence[float]]]) -> Line:
    """Return the mean of lines, as far as all of them go.

    Examples
    --------
    >>> _mean([[(1.0, 0.5), (2.0, 0.25)], [(3.0, 1.5)]])
    ((2.0, 1.0),)
    """
    length = min(map(len, lines))
    means = np.mean([line[:length] for line in lines], axis=0)
    return tuple((seconds, loss) for seconds, loss in means.tolist())
