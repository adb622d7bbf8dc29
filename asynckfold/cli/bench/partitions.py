"""Parameter averaging over parts of the samples that overlap or do not, up to a training loss.

::

    parts by processes and size ─ in turns ─► one run each, which ends at the loss ─► a row each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from asynckfold.cli.bench.images import normalised_images
from asynckfold.cli.bench.loops import BATCH, cores
from asynckfold.cli.bench.scaling import counts
from asynckfold.cli.bench.table import BenchTable, in_words, silent
from asynckfold.cli.bench.trainers import Work, median_time, results_of, trained_on
from asynckfold.models import MLP

HEADER = (
    "model | partition size | overlap % | processes | seconds | from | to | time against one | "
    "iterations | samples × iterations of a process | loss | accuracy"
)

WORK = Work("MLP 784-128-10", MLP, 28, epochs=40)
TARGET_LOSS = 0.1
QUICK = {"turns": 1}


@dataclass(frozen=True)
class Division:
    """Parts of equal `size`, one for each process."""

    processes: int
    size: int

    def overlap(self, count: int) -> float:
        """Return the share of `count` samples that lie in two parts."""
        return self.processes * self.size / count - 1


@dataclass(frozen=True)
class Outcome:
    """One run: `seconds` are None where it ended above the loss."""

    seconds: float | None
    iterations: int
    seen: int
    loss: float
    accuracy: float


def divisions(count: int, most: int) -> list[Division]:
    """Return the parts of `count` samples to compare on `most` cores: one process first.

    Examples
    --------
    >>> [(item.processes, item.size) for item in divisions(1000, 2)]
    [(1, 1000), (2, 500), (2, 750), (2, 1000)]
    """
    several = [number for number in counts(most) if number > 1]
    return [
        Division(1, count),
        *(
            Division(number, math.ceil(count * share / number))
            for number in several
            for share in (1, 1.5, 2)
        ),
    ]


def table(
    work: Work = WORK,
    turns: int = 5,
    *,
    target_loss: float = TARGET_LOSS,
    data: Path | None = None,
    tell: Callable[[str], None] = silent,
) -> BenchTable:
    """Train one model on each division of its samples, in turns.

    Settings are those of `trainers.table`; a run ends after the first epoch whose mean training
    loss is at most ``target_loss``.
    """
    samples, origin = normalised_images(work.size, work.samples, data)
    count = trained_on(len(samples[0]))
    found: dict[Division, list[Outcome]] = {item: [] for item in divisions(count, cores())}
    for _ in range(turns):
        for division, outcomes in found.items():
            outcomes.append(_trained(work, samples, division, target_loss))
    one = next(iter(found.values()))
    rows = [_row(work, count, division, one, own) for division, own in found.items()]
    for row in rows:
        tell(in_words(HEADER, row))
    return BenchTable(
        "Parameter averaging over parts that overlap",
        HEADER,
        tuple(rows),
        (
            f"{origin}, {count} training samples. Each process trains a clone on its part, Adam "
            f"1e-3, batches of {BATCH}; the clones are averaged after each iteration, which is one "
            "pass of every process over its part. Parts are drawn anew for each iteration.",
            "Overlap: samples that lie in the parts of two processes, as a share of all.",
            f"A run ends after the first iteration with a mean training loss of at most "
            f"{target_loss:g}, or after {work.epochs}; –: it ended above that loss.",
            f"Medians of {turns} turns, with the least and the greatest: seconds of the "
            "iterations, with an evaluation after each, without the start of the workers. Time "
            "against one: against one process in the same turn; more than 1 is faster. All other "
            "columns are the same in each turn.",
        ),
    )


def _trained(
    work: Work, samples: tuple[Any, Any], division: Division, target_loss: float
) -> Outcome:
    params = {
        "epochs": work.epochs,
        "partition_size": division.size,
        "epochs_per_round": 1,
        "target_loss": target_loss,
    }
    (result,) = results_of(
        work,
        samples,
        params,
        trainer="averaging",
        processes=division.processes,
        threads_per_job=1,
    )
    assert result.averaged is not None
    loss = result.epochs[-1].train_loss
    return Outcome(
        sum(epoch.seconds for epoch in result.epochs) if loss <= target_loss else None,
        len(result.epochs),
        max(result.averaged.samples),
        loss,
        result.scores["accuracy"],
    )


def _row(
    work: Work, count: int, division: Division, one: Sequence[Outcome], own: Sequence[Outcome]
) -> tuple[object, ...]:
    reached = [item.seconds for item in own if item.seconds]
    # Within one turn: the speed of a machine changes from minute to minute.
    ratios = [
        first.seconds / item.seconds
        for first, item in zip(one, own, strict=True)
        if first.seconds and item.seconds
    ]
    return (
        work.name,
        division.size,
        round(100 * division.overlap(count)),
        division.processes,
        median_time([item.seconds for item in own]),
        min(reached, default=None),
        max(reached, default=None),
        median(ratios) if ratios else None,
        own[0].iterations,
        own[0].seen,
        own[0].loss,
        own[0].accuracy,
    )
