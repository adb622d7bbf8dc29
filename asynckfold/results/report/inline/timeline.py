"""Which job ran on which core when, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from asynckfold.results.report import sentences
from asynckfold.results.report.attempts import Bar
from asynckfold.results.report.inline import svg
from asynckfold.results.report.sentences import time_unit
from asynckfold.results.report.summary import Summary
from asynckfold.system.units import named_node

LABELLED = 16
"""Cores with room for a label."""
LANES = 128


def timeline_svg(summary: Summary) -> Markup | None:
    """Draw which job ran on which core when; jobs of a fusion group are one bar."""
    if not summary.bars:
        return None
    lanes = lanes_of(summary.bars)
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
    title = gantt_title(summary, longest)
    divisor, unit = time_unit(longest)
    scale = svg.Scale(0, max(longest / divisor, 1e-3))
    places = {row.name: place for place, row in enumerate(summary.candidates)}
    room = len(lanes) <= LABELLED
    step, thick, top = (38, 16, 20) if room else (8, 7, 6)
    bottom = top + step * min(len(lanes), LANES)
    parts = []
    for tick in scale.ticks(6):
        anchor = "start" if scale(tick) < 0.05 else "end" if scale(tick) > 0.95 else "middle"
        parts.append(svg.rule(scale(tick), 0, bottom))
        parts.append(svg.text(f"{tick:g}", scale(tick), bottom + 15, anchor, class_="faint"))
    parts.append(
        svg.text(f"{unit} since the first job began", 0.5, bottom + 31, "middle", class_="faint")
    )
    for line, (label, bars) in enumerate(lanes[:LANES]):
        y = top + step * line
        if room:
            parts.append(svg.text(label, 0, y - 5, class_="faint tick"))
        for group in _together(bars):
            start, end = ((at - first) / divisor for at in (group[0].start, group[-1].end))
            where = {"x": svg.percent(scale(start)), "y": y, "height": thick}
            where |= {"width": svg.percent(max(scale(end) - scale(start), 0.001))}
            own = svg.colour(places[group[0].candidate])
            good = all(bar.outcome in ("ok", "running") for bar in group)
            look: dict[str, object] = {"fill": own, "stroke": svg.PAPER if good else own}
            look |= {} if good else {"fill_opacity": 0.25, "stroke_dasharray": "3 2"}
            said = svg.element("title", _said(group, summary.metric))
            parts.append(
                svg.element("rect", said, **where, **look, data_series=places[group[0].candidate])
            )
    drawn = svg.figure(bottom + 36, f"{title}. A bar per attempt at a job, a row per core.", *parts)
    held = {bar.candidate for bar in summary.bars}
    legend = svg.legend({name: place for name, place in places.items() if name in held})
    return Markup().join([svg.element("p", title), drawn, legend])


def _together(bars: Sequence[Bar]) -> list[list[Bar]]:
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


def _said(group: Sequence[Bar], metric: str) -> str:
    """Return the facts of a bar, a line each."""
    first = group[0]
    lines = [
        bar.job + (f": {metric} {sentences.number(bar.score)}" if math.isfinite(bar.score) else "")
        for bar in group[:5]
    ]
    lines += [f"and {len(group) - 5} more"] * (len(group) > 5)
    outcomes = ", ".join(dict.fromkeys(bar.outcome for bar in group))
    spent = sentences.duration(first.end - first.start)
    lines += [f"{spent} on {sentences.ran_on(first)}; {outcomes}, attempt {first.attempt}"]
    lines += [
        f"predicted {sentences.duration(first.expected)}; peak memory "
        f"{sentences.gibibytes(first.peak_memory)}, reserved {sentences.gibibytes(first.memory)}"
    ]
    lines += [f"waited {wait}" for wait in first.waits]
    return "\n".join([*lines, *([first.error[:200]] if first.error else [])])


def lanes_of(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by GPU, then by core."""
    return [*_gpu_lanes(bars), *_lanes(bars)]


def gantt_title(summary: Summary, longest: float) -> str:
    """Say how long the jobs took, and which share of the cores they held."""
    lanes = _lanes(summary.bars)
    jobs = len({bar.job for bar in summary.bars})
    rows, busy = len(lanes), math.fsum(_covered(bars) for _, bars in lanes)
    share = busy / (longest * rows) if longest else math.nan
    known = summary.packing
    if known is not None and known.cores is not None and known.held is not None:
        rows, longest, share = known.cores, known.makespan, known.held
    return (
        f"{sentences.plural(jobs, 'job')} on {sentences.plural(rows, 'core')} in "
        f"{sentences.duration(longest)}; jobs held {sentences.percent(share)} of the core time"
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
