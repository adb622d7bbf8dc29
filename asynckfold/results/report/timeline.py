"""Which job ran on which core when: the rows of the timeline, and the facts of its bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from asynckfold.results.report import sentences as say
from asynckfold.results.report.attempts import Bar
from asynckfold.results.report.summary import Summary
from asynckfold.system.units import named_node


def together(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Group the jobs that began and ended at the same time: those of a fusion group."""
    groups: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        last = groups[-1][-1] if groups else None
        slack = 0.05 * (bar.end - bar.start)
        if last and abs(bar.start - last.start) <= slack and abs(bar.end - last.end) <= slack:
            groups[-1].append(bar)
        else:
            groups.append([bar])
    return groups


def facts_of(group: Sequence[Bar], metric: str) -> str:
    """Return the facts of a bar, a line each."""
    first = group[0]
    lines = [
        bar.job + (f": {metric} {say.number(bar.score)}" if math.isfinite(bar.score) else "")
        for bar in group[:5]
    ]
    lines += [f"and {len(group) - 5} more"] * (len(group) > 5)
    outcomes = ", ".join(dict.fromkeys(bar.outcome for bar in group))
    spent = say.duration(first.end - first.start)
    lines += [f"{spent} on {say.ran_on(first)}; {outcomes}, attempt {first.attempt}"]
    lines += [
        f"predicted {say.duration(first.expected)}; peak memory "
        f"{say.gibibytes(first.peak_memory)}, reserved {say.gibibytes(first.memory)}"
    ]
    lines += [f"waited {wait}" for wait in first.waits]
    return "\n".join([*lines, *([first.error[:200]] if first.error else [])])


def lanes_of(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by GPU, then by core."""
    return [*_gpu_lanes(bars), *_lanes(bars)]


def timeline_title(summary: Summary, longest: float) -> str:
    """Say how long the jobs took, and which share of the cores they held."""
    lanes = _lanes(summary.bars)
    jobs = len({bar.job for bar in summary.bars})
    rows, busy = len(lanes), math.fsum(_covered(bars) for _, bars in lanes)
    share = busy / (longest * rows) if longest else math.nan
    known = summary.packing
    if known is not None and known.cores is not None and known.held is not None:
        rows, longest, share = known.cores, known.makespan, known.held
    return (
        f"{say.plural(jobs, 'job')} on {say.plural(rows, 'core')} in "
        f"{say.duration(longest)}; jobs held {say.percent(share)} of the core time"
    )


def _covered(bars: Sequence[Bar]) -> float:
    """Return the seconds covered by bars; those of a fusion group overlap.

    >>> from dataclasses import replace
    >>> bar = Bar("a", "A", 1, (0,), "cpu", 1.0, 3.0, "ok", "", 2.0, None, None, ())
    >>> _covered([bar, bar, replace(bar, start=2.0, end=5.0), replace(bar, start=7.0, end=8.0)])
    5.0
    """
    total, end = 0.0, -math.inf
    for bar in sorted(bars, key=lambda bar: bar.start):
        total += max(0.0, bar.end - max(bar.start, end))
        end = max(end, bar.end)
    return total


def _lanes(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by node and core; unpinned ones go to the first free row of their node."""
    cores: dict[tuple[str, int], list[Bar]] = {}
    rows: dict[str, list[list[Bar]]] = {}
    for bar in bars:
        for piece in _pieces(bar):
            for core in piece.cores:
                cores.setdefault((bar.node, core), []).append(piece)
        if not bar.cores:
            there = rows.setdefault(bar.node, [])
            free = next((row for row in there if row[-1].end <= bar.start), None)
            if free is None:
                there.append(free := [])
            free.append(bar)
    is_cluster = len({node for node, _ in cores} | {*rows}) > 1
    lanes = [(node, f"core {core}", cores[node, core]) for node, core in sorted(cores)]
    for node in sorted(rows):
        lanes += [(node, f"unpinned {at}", row) for at, row in enumerate(rows[node], 1)]
    return [
        (f"{named_node(node)}, {label}" if is_cluster else label, row) for node, label, row in lanes
    ]


def _gpu_lanes(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by node and GPU; one on several GPUs is in the lane of each."""
    lanes: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        if bar.device != "cpu":
            for name in bar.device.partition(":")[2].split(","):
                lanes.setdefault((bar.node, name), []).append(bar)
    is_cluster = len({bar.node for bar in bars}) > 1
    return [
        (
            f"{named_node(node)}, GPU {number}" if is_cluster else f"GPU {number}",
            lanes[node, number],
        )
        for node, number in sorted(lanes, key=lambda lane: (lane[0], len(lane[1]), lane[1]))
    ]


def _pieces(bar: Bar) -> list[Bar]:
    """Split an attempt at changes of its cores."""
    starts = [(bar.start, bar.cores), *bar.changes]
    ends = [*(at for at, _ in bar.changes), bar.end]
    return [
        replace(bar, start=start, end=end, cores=cores, changes=())
        for (start, cores), end in zip(starts, ends, strict=True)
    ]
