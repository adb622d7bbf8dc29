"""The verb ``simulate``: place a large random sweep on one machine or a cluster in virtual time."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from asynckfold.cli.output import Output
from asynckfold.cli.text_charts import spark
from asynckfold.errors import refuse
from asynckfold.scheduling.random_sweep import (
    FAILURES,
    OTHERS_SHARE,
    EitherSweep,
    draw_either,
    draw_scenario,
)
from asynckfold.scheduling.simulate import DONE, Bounds, Simulation
from asynckfold.system.units import duration

PARTS = 60
"""Intervals of the makespan in the line of CPU use."""

EITHER_JOBS = 60
"""Jobs of the second sweep, whose candidates may run on cores or on GPUs."""


def simulate(parsed: argparse.Namespace, out: Output) -> int:
    """Place a random sweep on virtual nodes; print makespan and lower bound."""
    refuse(parsed.problems)
    found = _simulated(parsed, parsed.nodes)
    either = None
    if parsed.gpus and parsed.nodes == 1:
        either = draw_either(EITHER_JOBS, parsed.cores, parsed.gpus, parsed.seed)
    clusters = [*_clusters(parsed, found)]
    out.data({**_numbers(parsed, found), **_cluster_numbers(clusters), **_either_numbers(either)})
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for subject, sentence in (*_lines(parsed, found), *_either_lines(parsed, either)):
        table.add_row(Text(subject, style="dim"), Text(sentence))
    out.say(table)
    if clusters:
        out.say(_cluster_table(clusters))
    return 0


def _simulated(parsed: argparse.Namespace, nodes: int) -> Simulation:
    drawn = draw_scenario(
        parsed.jobs, parsed.cores, parsed.gpus, parsed.seed, nodes, parsed.data_seconds
    )
    return drawn.simulate()


def _clusters(parsed: argparse.Namespace, largest: Simulation) -> Iterator[Simulation]:
    """Yield the same sweep on 1, 2, 4 … nodes, up to those of the largest; none for one node."""
    nodes = 1
    while nodes < parsed.nodes:
        yield _simulated(parsed, nodes)
        nodes *= 2
    if parsed.nodes > 1:
        yield largest


def _cluster_numbers(clusters: Sequence[Simulation]) -> dict[str, Any]:
    rows = [
        {
            "nodes": found.machine.nodes,
            "makespan": found.makespan,
            "lower_bound": found.lower_bound,
            "ratio": found.ratio,
            "use": found.use,
        }
        for found in clusters
    ]
    return {"by_nodes": rows} if rows else {}


def _cluster_table(clusters: Sequence[Simulation]) -> Table:
    """Return the table of the same sweep on more and more nodes."""
    table = Table("nodes", "makespan", "lower bound", "ratio", "use", box=None, pad_edge=False)
    for found in clusters:
        times = duration(found.makespan), duration(found.lower_bound)
        table.add_row(f"{found.machine.nodes:,}", *times, f"{found.ratio:.4f}", f"{found.use:.1%}")
    return table


def _numbers(parsed: argparse.Namespace, found: Simulation) -> dict[str, Any]:
    """Return the object of ``--json``. The same seed gives the same, except the real seconds."""
    return {
        "jobs": parsed.jobs,
        "cores": parsed.cores,
        "gpus": parsed.gpus,
        "nodes": parsed.nodes,
        "data_seconds": parsed.data_seconds,
        "seed": parsed.seed,
        "makespan": found.makespan,
        "lower_bound": found.lower_bound,
        "bounds": {
            "core_seconds_per_core": found.bounds.cores,
            "gpu_seconds_per_gpu": found.bounds.gpus,
            "longest_job": found.bounds.longest,
        },
        "ratio": found.ratio,
        "use": found.use,
        "use_over_time": found.use_over(PARTS),
        "attempts": dict(sorted(Counter(span.outcome for span in found.spans).items())),
        "decisions": len(found.spans),
        "place_seconds": found.place_seconds,
        "decisions_per_second": _rate(found),
    }


def _lines(parsed: argparse.Namespace, found: Simulation) -> list[tuple[str, str]]:
    again = sum(span.outcome != DONE for span in found.spans)
    return [
        (
            "sweep",
            f"{parsed.jobs:,} jobs on {_machine(parsed)}, seed {parsed.seed}; others on "
            f"{OTHERS_SHARE:.0%} of the cores, {FAILURES:.0%} of the jobs fail once "
            f"({again:,} did)",
        ),
        ("makespan", f"{duration(found.makespan)}, an estimate of the simulator"),
        ("lower bound", f"{duration(found.lower_bound)}: {_why(found.bounds)}"),
        ("ratio", f"{found.ratio:.4f}"),
        ("use", f"{found.use:.1%} of all cores, held by jobs"),
        ("over time", spark(found.use_over(PARTS))),
        (
            "decisions",
            f"{len(found.spans):,} in {found.place_seconds:.1f} real seconds: "
            f"{_rate(found):,.0f} a second",
        ),
    ]


def _machine(parsed: argparse.Namespace) -> str:
    machine = f"{parsed.cores:,} cores and {parsed.gpus:,} GPUs"
    if parsed.nodes == 1:
        return machine
    data = duration(parsed.data_seconds)
    return f"{parsed.nodes:,} nodes of {machine}, the data on one more of them every {data}"


def _either_numbers(either: EitherSweep | None) -> dict[str, Any]:
    if either is None:
        return {}
    return {
        "cores_or_gpus": {
            "jobs": len(either.jobs),
            "kinds": dict(either.kinds),
            "makespan": either.simulation.makespan,
            "lower_bound": either.simulation.lower_bound,
            "ratio": either.simulation.ratio,
            "all_on_one_kind": dict(either.alone),
        }
    }


def _either_lines(
    parsed: argparse.Namespace, either: EitherSweep | None
) -> Iterator[tuple[str, str]]:
    if either is None:
        return
    found, on_gpus = either.simulation, [*either.kinds.values()].count("cuda")
    yield (
        "cores or GPUs",
        f"{len(either.jobs)} jobs of {len(either.kinds)} candidates, {on_gpus} of them on GPUs, "
        f"one of the {parsed.gpus:,} GPUs busy with others' work: {duration(found.makespan)}, "
        f"{found.ratio:.4f} × the lower bound; without others {duration(either.alone['cpu'])} with "
        f"all on cores, {duration(either.alone['cuda'])} with all on GPUs",
    )


def _why(bounds: Bounds) -> str:
    parts = {
        "core-seconds / cores": bounds.cores,
        "GPU-seconds / GPUs": bounds.gpus,
        "the longest job": bounds.longest,
    }
    found = ", ".join(f"{name} {duration(value)}" for name, value in parts.items())
    return f"the largest of {found}"


def _rate(found: Simulation) -> float:
    return len(found.spans) / found.place_seconds
