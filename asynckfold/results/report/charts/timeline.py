"""The Gantt chart: which job ran on which core when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asynckfold.results.report import sentences
from asynckfold.results.report.charts.style import (
    Chart,
    chart_of,
    colours_of,
    name_candidates,
    new_figure,
    styled,
    time_unit,
)
from asynckfold.results.report.summary import Bar, Summary


@styled
def draw_gantt(summary: Summary) -> Chart | None:
    """Draw which job ran on which core when."""
    if not summary.bars:
        return None
    lanes = _lanes(summary.bars)
    title = _gantt_title(summary, lanes)
    figure = new_figure(1.7 + 0.3 * min(len(lanes), 24), title)
    axes = figure.subplots()
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
    divisor, unit = time_unit(longest)
    for place, (_, bars) in enumerate(lanes):
        _draw_lane(axes, place, bars, colours_of(summary), first, divisor)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes])
    if len(lanes) > 48:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(longest / divisor * 1.01, 1e-3))
    axes.set_xlabel(f"{unit} since the first job began")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    ended_badly = any(bar.outcome not in ("ok", "running") for bar in summary.bars)
    axes.set_title("hatched: ended without a score" if ended_badly else "", loc="left")
    name_candidates(figure, summary, [bar.candidate for bar in summary.bars], lines=False)
    return chart_of("gantt", title, "A bar per attempt at a job, a row per core.", figure)


def _gantt_title(summary: Summary, lanes: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    jobs = len({bar.job for bar in summary.bars})
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
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
    """Return the seconds in which there is a bar: jobs that are trained as one share theirs.

    Examples
    --------
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
    """Group attempts by core; those without a core of their own go to the first free row."""
    cores: dict[int, list[Bar]] = {}
    rows: list[list[Bar]] = []
    for bar in bars:
        for piece in _pieces(bar):
            for core in piece.cores:
                cores.setdefault(core, []).append(piece)
        if not bar.cores:
            free = next((row for row in rows if row[-1].end <= bar.start), None)
            if free is None:
                rows.append([bar])
            else:
                free.append(bar)
    pinned = [(f"core {core}", cores[core]) for core in sorted(cores)]
    return pinned + [(f"unpinned {number}", row) for number, row in enumerate(rows, 1)]


def _pieces(bar: Bar) -> list[Bar]:
    """Divide an attempt where it went on with other cores."""
    starts = [(bar.start, bar.cores), *bar.changes]
    ends = [*(at for at, _ in bar.changes), bar.end]
    return [
        replace(bar, start=start, end=end, cores=cores, changes=())
        for (start, cores), end in zip(starts, ends, strict=True)
    ]


def _draw_lane(
    axes: Axes,
    place: int,
    bars: Sequence[Bar],
    colours: dict[str, str],
    first: float,
    divisor: float,
) -> None:
    for good in (True, False):
        kept = [bar for bar in bars if (bar.outcome in ("ok", "running")) == good]
        spans = [((bar.start - first) / divisor, (bar.end - bar.start) / divisor) for bar in kept]
        drawn = axes.broken_barh(
            spans,
            (place - 0.36, 0.72),
            facecolors=[colours[bar.candidate] for bar in kept],
            edgecolors="white",
            linewidth=0.7,
            hatch=None if good else "////",
            alpha=1 if good else 0.6,
        )
        drawn.set_in_layout(False)
