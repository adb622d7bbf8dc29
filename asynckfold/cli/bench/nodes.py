"""One model on nodes of several tasks each: workers against time and speedup.

::

    clusters ─ in turns ─► NodeTraining ─► medians by cluster ─► tables ─► a model beyond the cores
                                                                   └──────────────┴─► pictures
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from asynckfold.cli.bench.images import normalised_images
from asynckfold.cli.bench.loops import BATCH, cores, fast_adam, threads
from asynckfold.cli.bench.node_training import EXCHANGE_STEPS, NodeTraining, beginning
from asynckfold.cli.bench.scaling import (
    FEWEST_COUNTS,
    Cluster,
    Scaling,
    Series,
    clusters,
    scaling,
    series_of,
)
from asynckfold.cli.bench.table import BenchTable, in_words, silent
from asynckfold.cli.bench.trainers import HELD_OUT, Outcome, Work, dbn, median_time, trained_on
from asynckfold.models import MLP
from asynckfold.results.report.charts import Drawing
from asynckfold.results.report.charts.scaling import ScalingLine, draw_scaling
from asynckfold.system.files import slug

HEADER = (
    "table | model | nodes | tasks a node | seconds | speedup | samples/s | seconds to goal | "
    "speedup to goal | accuracy | origin"
)

WORKS = (
    Work("MLP 784-128-10", MLP, 28, epochs=20, target=0.9, samples=6_000),
    Work("DBN 784-500-500-10", dbn, 28, epochs=8, target=0.9, samples=6_000),
)
QUICK = {"works": tuple(replace(work, epochs=4, samples=2_000) for work in WORKS), "turns": 1}

MEASURED, MODELLED = "measured", "model, not measured"
ONE = Cluster(1, 1)


@dataclass(frozen=True)
class Point:
    """Medians of what was measured on a cluster, or the model's seconds."""

    seconds: float
    to_goal: float | None = None
    accuracy: float | None = None
    origin: str = MODELLED


def table(
    works: Sequence[Work] = WORKS,
    turns: int = 3,
    *,
    data: Path | None = None,
    tell: Callable[[str], None] = silent,
) -> BenchTable:
    """Train each model on every division of the cores into nodes and tasks, in turns.

    Settings are those of `trainers.table`.
    """
    rows: list[tuple[object, ...]] = []
    laws: list[str] = []
    figures: dict[str, Drawing] = {}
    origin = ""
    tables = series_of(clusters(cores()))
    # Tasks are forked: this process must not start a thread pool.
    with threads(1):
        for work in works:
            samples, origin = normalised_images(work.size, work.samples, data)
            measured = _measured(work, samples, turns)
            lines: dict[str, list[ScalingLine]] = {}
            for series in tables:
                law = scaling({series.count(item): measured[item].seconds for item in series.found})
                points = {item: measured[item] for item in series.found}
                if law is not None:
                    laws.append(f"{series.name}, {work.name}: {law}")
                    points |= {item: Point(law.seconds(series.count(item))) for item in series.more}
                lines.setdefault(f"more {series.grows}", []).append(_line(series, points, law))
                for row in _rows(series, work, trained_on(len(samples[0])), points, measured[ONE]):
                    rows.append(row)
                    tell(in_words(HEADER, row))
            name = slug(work.name.replace(" ", "-").lower())
            figures[name] = draw_scaling(work.name, lines, measured[ONE].seconds)
    return BenchTable(
        "One model on nodes of several tasks",
        HEADER,
        tuple(rows),
        (
            f"{origin}; all train the same samples for the same epochs, Adam 1e-3, batches of "
            f"{BATCH} of each task. The pretraining of a DBN was done once before, and is not "
            "timed: all continue from the same weights.",
            "A task is a process with a core of its own, a node a group of them on this machine: "
            "within a node one model in shared memory (Hogwild), between nodes a parameter server "
            f"through the loopback, every {EXCHANGE_STEPS} batches. Real nodes have a network in "
            "between.",
            f"Medians of {turns} turns, one after another, from when all tasks are ready "
            "until the last one has finished. Speedups are against one task without a server. "
            f"Goal: an accuracy above {' or '.join(sorted({f'{w.target:.0%}' for w in works}))} on "
            f"the {HELD_OUT:.0%} of the samples that are held out; the model of the first node is "
            "copied during training, and scored afterwards.",
            "Tables share their measurements. –: not reached in most turns, or not modelled.",
            _model_note(laws, max(len(series.found) for series in tables)),
        ),
        figures=figures,
    )


def _measured(work: Work, samples: tuple[Any, Any], turns: int) -> dict[Cluster, Point]:
    begun = beginning(work, samples[0])
    fast_adam(begun)  # so that tasks need not import what the first optimizer imports
    found: dict[Cluster, list[Outcome]] = {cluster: [] for cluster in clusters(cores())}
    for _ in range(turns):
        for cluster, outcomes in found.items():
            outcomes.append(NodeTraining(work, begun, samples, cluster).run())
    trained = trained_on(len(samples[0])) * work.epochs
    return {
        cluster: Point(
            trained / median(item.speed for item in outcomes),
            median_time([item.seconds for item in outcomes]),
            median(item.accuracy for item in outcomes),
            MEASURED,
        )
        for cluster, outcomes in found.items()
    }


def _line(series: Series, points: Mapping[Cluster, Point], law: Scaling | None) -> ScalingLine:
    """Return a table as a line of the figure, by cores: one for each task."""
    seconds: dict[str, dict[int, float]] = {MEASURED: {}, MODELLED: {}}
    for cluster, point in points.items():
        seconds[point.origin][cluster.workers] = point.seconds
    curve = []
    if law is not None:
        cores_each = series.found[0].workers // series.count(series.found[0])
        most = max(map(series.count, points))
        curve = [(cores_each * n, law.seconds(n)) for n in np.geomspace(1, most, 60).tolist()]
    return ScalingLine(
        series.name, seconds[MEASURED], seconds[MODELLED], curve, str(law) if law else ""
    )


def _rows(
    series: Series, work: Work, count: int, points: Mapping[Cluster, Point], one: Point
) -> list[tuple[object, ...]]:
    return [
        (
            series.name,
            work.name,
            cluster.nodes,
            cluster.tasks,
            point.seconds,
            one.seconds / point.seconds,
            count * work.epochs / point.seconds,
            point.to_goal,
            one.to_goal / point.to_goal if one.to_goal and point.to_goal else None,
            point.accuracy,
            point.origin,
        )
        for cluster, point in points.items()
    ]


def _model_note(laws: Sequence[str], longest: int) -> str:
    """Return the note on modelled rows, or on why there are none."""
    if laws:
        return (
            f"{MODELLED}: seconds(n) = computation / n + communication × (n − 1) + rest, n the "
            "count that grows in the table, by non-negative least squares over its measured rows; "
            f"network and memory bandwidth of further cores are unknown. {'; '.join(laws)}"
        )
    return (
        "Nothing is extrapolated beyond the cores at hand: a model of three terms (computation, "
        f"communication, rest) needs {FEWEST_COUNTS} counts in a table to be tested, and the "
        f"longest has {longest}. Other amounts of work would add points, but none that shows how "
        "communication grows with the workers."
    )
