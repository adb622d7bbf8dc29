"""The figures of a report as PNG; the only place of matplotlib.

Figures use matplotlib's object interface on an Agg canvas: no display, no pyplot, no global state.
They ignore the caller's style. Mathtext is off, so a model called ``$\\frac{`` is drawn literally.
"""

from __future__ import annotations

from collections.abc import Callable

from asynckfold.results.report.charts.classes import draw_classes, draw_confusion
from asynckfold.results.report.charts.curves import draw_curves, draw_race
from asynckfold.results.report.charts.scores import draw_scores
from asynckfold.results.report.charts.style import Chart, plotted
from asynckfold.results.report.charts.timeline import draw_gantt, draw_speedup, draw_use
from asynckfold.results.report.summary import Summary

__all__ = ["Chart", "draw", "draw_scores", "plotted"]

_FIGURES: tuple[Callable[[Summary], Chart | None], ...] = (
    draw_scores,
    draw_curves,
    draw_race,
    draw_classes,
    draw_confusion,
    draw_use,
    draw_gantt,
    draw_speedup,
)


def draw(summary: Summary) -> tuple[Chart, ...]:
    """Draw every figure that the run has numbers for."""
    drawn = (make(summary) for make in _FIGURES)
    return tuple(chart for chart in drawn if chart is not None)
