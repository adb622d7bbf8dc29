"""The figures of a report as PNG; the only place of matplotlib.

Figures are drawn by matplotlib's object interface on an Agg canvas: no display, no pyplot, nothing
left behind. Whatever style the caller has set, matplotlib's own defaults apply here, and mathtext
is off, so that a model called ``$\\frac{`` is written as it is.

=========== ====================================================================
`scores`    the score of each candidate on each fold
`curves`    learning curves: losses and accuracy over the epochs
`race`      training loss over time, of several processes and of one
`classes`   accuracy of each class; the confusion matrix of the best candidate
`use`       cores in use over time, serial and packed
`gantt`     which job ran on which core when
`speedup`   serial against packed seconds
`style`     what all figures share: colours, style, text, `Chart`
=========== ====================================================================
"""

from __future__ import annotations

from collections.abc import Callable

from asynckfold.results.report.charts.classes import draw_classes, draw_confusion
from asynckfold.results.report.charts.curves import draw_curves
from asynckfold.results.report.charts.race import draw_race
from asynckfold.results.report.charts.scores import draw_scores
from asynckfold.results.report.charts.speedup import draw_speedup
from asynckfold.results.report.charts.style import Chart, plotted
from asynckfold.results.report.charts.timeline import draw_gantt
from asynckfold.results.report.charts.use import draw_use
from asynckfold.results.report.summary import Summary

__all__ = ["Chart", "draw", "draw_scores", "plotted"]


def draw(summary: Summary) -> tuple[Chart, ...]:
    """Draw every figure that the run has numbers for."""
    makers: tuple[Callable[[Summary], Chart | None], ...] = (
        draw_scores,
        draw_curves,
        draw_race,
        draw_classes,
        draw_confusion,
        draw_use,
        draw_gantt,
        draw_speedup,
    )
    drawn = (make(summary) for make in makers)
    return tuple(chart for chart in drawn if chart is not None)
