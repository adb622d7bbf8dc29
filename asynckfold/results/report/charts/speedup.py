"""The figure of the speedup: serial against packed seconds."""

from __future__ import annotations

from asynckfold.results.report import sentences
from asynckfold.results.report.charts.style import (
    COLOURS,
    OTHERS,
    Chart,
    chart_of,
    new_figure,
    plotted,
    styled,
    time_unit,
)
from asynckfold.results.report.summary import Summary


@styled
def draw_speedup(summary: Summary) -> Chart | None:
    """Draw serial against packed seconds, where both are what they should be."""
    found = summary.speedup
    if found is None or found.why_not or found.serial_seconds is None:
        return None
    title = sentences.speed(summary)
    figure = new_figure(1.75, title)
    axes = figure.subplots()
    divisor, unit = time_unit(max(found.serial_seconds, found.packed_seconds))
    values = [found.serial_seconds / divisor, found.packed_seconds / divisor]
    bars = axes.barh([0, 1], values, height=0.62, color=[OTHERS, COLOURS[0]])
    if found.kind != "measured":
        bars[0].set_hatch("////")
        bars[0].set_edgecolor("white")
    axes.bar_label(
        bars,
        [sentences.duration(found.serial_seconds), sentences.duration(found.packed_seconds)],
        padding=5,
    )
    axes.set_yticks([0, 1], [f"serial ({plotted(found.kind)})", "packed"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, 1.16 * max(values))
    axes.set_xlabel(f"{unit} of wall time")
    axes.tick_params(axis="y", length=0)
    return chart_of("speedup", title, "Shorter is better.", figure)
