"""Wall time: CPU use, and jobs by core."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asynckfold.results.report import sentences
from asynckfold.results.report.attempts import Bar, CpuUse
from asynckfold.results.report.charts import style
from asynckfold.results.report.inline import svg
from asynckfold.results.report.inline.timeline import gantt_title, lanes_of
from asynckfold.results.report.summary import Summary


@style.applied
def draw_use(summary: Summary) -> style.Drawing | None:
    """Draw the cores in use over time, of the serial loop and of the packed run."""
    return use_panels(summary.use) if summary.use else None


@style.applied
def use_panels(uses: Sequence[CpuUse]) -> style.Drawing:
    """Draw the cores in use over time, serial above packed, on one time axis."""
    found = {use.phase: use for use in uses}
    phase = "packed" if "packed" in found else "serial"
    title = f"CPU use{'' if phase == 'packed' else ', serial'}: {_cpu_use(found[phase])}"
    figure = style.new_figure(0.7 + 1.8 * len(found), title)
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(use.seconds[-1] for use in uses)
    divisor, unit = sentences.time_unit(longest)
    for axes, phase in zip(panels, sorted(found, reverse=True), strict=True):
        _draw_phase(axes, found[phase], divisor)
    panels[-1].set_xlabel(f"{unit} since the phase began")
    panels[-1].set_xlim(0, max(longest / divisor * 1.01, 1e-3))
    alt = "; ".join(f"{use.phase}: {_cpu_use(use)}" for use in uses)
    return style.Drawing(title, alt, figure)


def _cpu_use(use: CpuUse) -> str:
    if math.isnan(use.mean_own):
        return f"{use.mean_used:.2f} of {sentences.plural(use.cores, 'core')}"
    return sentences.cpu_use(use.mean_own, use.mean_used, use.cores)


def _draw_phase(axes: Axes, use: CpuUse, divisor: float) -> None:
    colour = svg.COLOURS[0] if use.phase == "packed" else style.FAINT
    axes.set_ylabel("cores")
    seconds = np.array(use.seconds) / divisor
    axes.fill_between(seconds, use.own, color=colour, alpha=0.35, linewidth=0, label="this run")
    style.draw_line(axes, seconds.tolist(), use.used, color=colour, linewidth=1.3, label="everyone")
    axes.axhline(use.cores, color=style.FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, max(use.cores, *use.used) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
    style.grid(axes, "y")
    key = "" if math.isnan(use.mean_own) else "; filled: this run, line: everyone"
    axes.set_title(f"{use.phase}: {_cpu_use(use)}{key}", loc="left")


@style.applied
def draw_gantt(summary: Summary, given: Axes | None = None) -> style.Drawing | None:
    """Draw which job ran on which core when."""
    if not summary.bars:
        return None
    lanes = lanes_of(summary.bars)
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
    title = gantt_title(summary, longest)
    place_of_legend, axes = style.panel(1.7 + 0.3 * min(len(lanes), 24), title, given)
    divisor, unit = sentences.time_unit(longest)
    colours = style.colours_of(row.name for row in summary.candidates)
    for place, (_, bars) in enumerate(lanes):
        _draw_lane(axes, place, bars, colours, first, divisor)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes])
    if len(lanes) > 48:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(longest / divisor * 1.01, 1e-3))
    axes.set_xlabel(f"{unit} since the first job began")
    axes.tick_params(axis="y", length=0)
    style.grid(axes, "x")
    ended_badly = any(bar.outcome not in ("ok", "running") for bar in summary.bars)
    axes.set_title("hatched: ended without a score" if ended_badly else "", loc="left")
    candidates = [bar.candidate for bar in summary.bars]
    style.name_candidates(place_of_legend, colours, candidates, lines=False)
    alt = "A bar per attempt at a job, a row per core."
    return style.Drawing(title, alt, style.drawn_on(axes))


def _draw_lane(
    axes: Axes, place: int, bars: Sequence[Bar], colours: dict[str, str], first: float, unit: float
) -> None:
    for good in (True, False):
        kept = [bar for bar in bars if (bar.outcome in ("ok", "running")) == good]
        spans = [((bar.start - first) / unit, (bar.end - bar.start) / unit) for bar in kept]
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
