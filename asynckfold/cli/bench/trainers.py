"""The gain of more cores for one model: each trainer on one and on all cores, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import nn

from asynckfold.cli.bench.images import normalised_images
from asynckfold.cli.bench.loops import BATCH, adam, cores, scratch_folder, sweep
from asynckfold.cli.bench.table import BenchTable, in_words, silent
from asynckfold.jobs.result import Result
from asynckfold.models import DBN, MLP, LeNet5, Pretraining

HEADER = (
    "model | trainer | processes | samples/s | speed against one | from | to | target | "
    "seconds to it | time against one | accuracy"
)

HELD_OUT = 0.2
"""Share of the samples on which accuracy is measured after each epoch."""

QUICK = {"turns": 1}


@dataclass(frozen=True)
class Work:
    """A model, the size in pixels of its images, and the accuracy to reach (``target``).

    At most ``samples`` are used.
    """

    name: str
    model: Callable[[], nn.Module]
    size: int
    epochs: int = 8
    target: float = 0.97
    samples: int = 12_000


dbn = partial(DBN, pretraining=Pretraining(epochs=2))
"""The deep belief network 784-500-500-10; each layer is pretrained for two epochs."""

WORKS = (
    Work("MLP 784-128-10", MLP, 28, epochs=12, target=0.93),
    Work("LeNet5", LeNet5, 32),
    Work("DBN 784-500-500-10", dbn, 28, target=0.94),
)
"""With targets that each reaches on so few samples of MNIST."""


@dataclass(frozen=True)
class Way:
    """A trainer; `accumulate` is hogwild's, `threads` are those of each process.

    Several independent `jobs` at once show the throughput of the cores without sharing.
    """

    trainer: str
    processes: int = 1
    accumulate: int = 1
    threads: int = 1
    jobs: int = 1

    @property
    def name(self) -> str:
        """Name in the table."""
        parts = {
            f"accumulate={self.accumulate}": self.accumulate,
            f"{self.jobs} jobs at once": self.jobs,
            f"{self.threads} threads": self.threads,
        }
        return ", ".join([self.trainer, *(text for text, count in parts.items() if count > 1)])


@dataclass(frozen=True)
class Outcome:
    """Samples per second, seconds to the target (None if not reached), final accuracy."""

    speed: float
    seconds: float | None
    accuracy: float


def ways() -> list[Way]:
    """Return what to compare: the plain trainer first."""
    count = cores()
    return [
        Way("plain"),
        *([Way("plain", threads=count), Way("plain", jobs=count)] if count > 1 else []),
        Way("hogwild", count),
        Way("hogwild", count, accumulate=4),
        Way("allreduce", count),
        Way("averaging", count),
        Way("parameter_server", count),
    ]


def table(
    works: Sequence[Work] = WORKS,
    turns: int = 5,
    *,
    data: Path | None = None,
    tell: Callable[[str], None] = silent,
) -> BenchTable:
    """Train each model in each way, in turns.

    Samples are MNIST in the folder `data`; scikit-learn's digits, enlarged to its shape, without
    it. ``tell`` receives the rows of each model when they are done.
    """
    rows: list[tuple[object, ...]] = []
    origin = ""
    for work in works:
        samples, origin = normalised_images(work.size, work.samples, data)
        found: dict[Way, list[Outcome]] = {way: [] for way in ways()}
        for _ in range(turns):
            for way, outcomes in found.items():
                outcomes.append(_trained(work, samples, way))
        rows += _rows(work, found)
        for row in rows[-len(found) :]:
            tell(in_words(HEADER, row))
    return BenchTable(
        "What more cores for one model bring",
        HEADER,
        tuple(rows),
        (
            "Each job pretrains a DBN before its epochs, which is in no number here.",
            f"{origin}; all ways train the same samples for the same epochs, Adam 1e-3, batches of "
            f"{BATCH} (a process's own; of allreduce, all processes' together).",
            f"Medians of {turns} turns; speed against one: against the plain trainer on one core "
            "in the same turn, with the least and the greatest.",
            f"Seconds are those of the epochs, with an evaluation on {HELD_OUT:.0%} of the samples "
            "after each, without the start of the workers.",
            "plain, … jobs at once: independent jobs, each on a core of its own, and their samples "
            "together: the throughput of these cores for processes that share nothing.",
            "–: the target was not reached in most turns. The accuracies of hogwild and "
            "parameter_server differ from run to run; the others give the same bits each time.",
        ),
    )


def _trained(work: Work, samples: tuple[Any, Any], way: Way) -> Outcome:
    results = results_of(
        work,
        samples,
        {"epochs": work.epochs, "accumulate": way.accumulate},
        jobs=way.jobs,
        trainer=way.trainer,
        processes=way.processes,
        threads_per_job=way.threads,
    )
    times = [list(accumulate(epoch.seconds for epoch in result.epochs)) for result in results]
    reached = [
        end
        for ends, result in zip(times, results, strict=True)
        for end, epoch in zip(ends, result.epochs, strict=True)
        if (epoch.accuracy or 0) >= work.target
    ]
    trained = trained_on(len(samples[0])) * work.epochs
    return Outcome(
        sum(trained / ends[-1] for ends in times),
        min(reached, default=None),
        max(result.scores["accuracy"] for result in results),
    )


def results_of(
    work: Work, samples: tuple[Any, Any], params: Mapping[str, Any], jobs: int = 1, **settings: Any
) -> list[Result]:
    """Train the model on the first samples, in one job or several alike, and score the rest."""
    count = len(samples[0])
    fold = np.arange(trained_on(count)), np.arange(trained_on(count), count)
    models, rules = {"model": work.model}, {f"rate {number}": "constant" for number in range(jobs)}
    quiet: dict[str, Any] = {"fuse": False, "devices": "cpu"}
    with scratch_folder() as folder:
        found = sweep(folder, [fold], samples, models, rules, adam, params, **quiet, **settings)
        return [found.results[job.id] for job in found.plan.jobs]


def trained_on(count: int) -> int:
    """Return the number of training samples, the first ones, among `count`."""
    return count - round(count * HELD_OUT)


def _rows(work: Work, found: Mapping[Way, Sequence[Outcome]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    first = next(iter(found.values()))
    for way, outcomes in found.items():
        # Within one turn: the speed of a machine changes from minute to minute.
        pairs = list(zip(first, outcomes, strict=True))
        speeds = [own.speed / one.speed for one, own in pairs]
        times = [
            one.seconds / own.seconds if one.seconds and own.seconds else 0 for one, own in pairs
        ]
        rows.append(
            (
                work.name,
                way.name,
                max(way.processes, way.jobs),
                median(item.speed for item in outcomes),
                median(speeds),
                min(speeds),
                max(speeds),
                work.target,
                median_time([item.seconds for item in outcomes]),
                median(times) or None,
                median(item.accuracy for item in outcomes),
            )
        )
    return rows


def median_time(values: Sequence[float | None]) -> float | None:
    """The median, with None later than everything."""
    found = median(float("inf") if value is None else value for value in values)
    return None if found == float("inf") else found
