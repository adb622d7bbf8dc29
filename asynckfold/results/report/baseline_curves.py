"""Training loss over time, and accuracy of each class, of the packed run and of the serial loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from asynckfold.jobs.plan import Job
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.sanitize import shown
from asynckfold.results.speedup import AgainstSerial

Line = tuple[tuple[float, float], ...]
"""(seconds, mean training loss over the folds) at the end of each epoch."""


@dataclass(frozen=True)
class LossOverTime:
    """Training loss of one candidate against the seconds that its folds have cost.

    Serial: the folds one after another, until the last has finished the epoch. Packed: the
    candidate's share of the run's wall time (see `AgainstSerial`), dealt out to epochs as its jobs
    spent theirs. Evaluations included.
    """

    candidate: str
    packed: Line
    serial: Line  # empty where the serial loop was not run in full


def loss_over_time(found: Outcome, times: Mapping[str, AgainstSerial]) -> tuple[LossOverTime, ...]:
    """Return a pair of lines for each candidate with epochs, over the jobs that both trained."""
    recorded = found.baseline.epochs if found.baseline else {}
    lines = []
    for name, jobs in _by_candidate(found).items():
        both = [job for job in jobs if recorded.get(job.id)] or jobs
        ours = [_line(found, job) for job in both]
        theirs = [recorded[job.id] for job in both if recorded.get(job.id)]
        spent = math.fsum(line[-1][0] for line in (_line(found, job) for job in jobs))
        scale = times[name].packed_seconds / spent if spent else math.nan
        packed = tuple((seconds * scale, loss) for seconds, loss in _together(ours))
        lines.append(LossOverTime(shown(jobs[0]).candidate, packed, _together(theirs)))
    return tuple(lines)


def _by_candidate(found: Outcome) -> dict[str, list[Job]]:
    jobs: dict[str, list[Job]] = {}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if result is not None and result.epochs:
            jobs.setdefault(job.candidate, []).append(job)
    return jobs


def _line(found: Outcome, job: Job) -> Line:
    epochs = found.results[job.id].epochs
    ends = accumulate(item.seconds for item in epochs)
    return tuple(zip(ends, (item.train_loss for item in epochs), strict=True))


def _together(lines: Sequence[Sequence[Sequence[float]]]) -> Line:
    """Return the sum of the seconds and the mean of the losses, up to the end of the shortest.

    >>> _together([[(1.0, 0.5), (2.0, 0.25)], [(3.0, 1.5)]])
    ((4.0, 1.0),)
    """
    if not lines:
        return ()
    length = min(map(len, lines))
    table = np.array([line[:length] for line in lines])
    seconds, losses = table[..., 0].sum(axis=0), table[..., 1].mean(axis=0)
    return tuple(zip(seconds.tolist(), losses.tolist(), strict=True))


def serial_class_accuracy(found: Outcome) -> dict[str, tuple[float, ...]]:
    """Return the recall of each class in the serial loop by candidate; NaN without samples."""
    counts = found.baseline.class_counts if found.baseline else {}
    tables: dict[str, list[Sequence[Sequence[int]]]] = {}
    for job in found.plan.jobs:
        if counts.get(job.id):
            tables.setdefault(job.candidate, []).append([tuple(pair) for pair in counts[job.id]])
    return {
        name: tuple(
            right / of if of else math.nan for right, of in np.array(tables).sum(axis=0).tolist()
        )
        for name, tables in tables.items()
    }
