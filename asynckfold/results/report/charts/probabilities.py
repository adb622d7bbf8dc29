"""How sure the candidates are: calibration, ROC and precision-recall curves."""

from __future__ import annotations

from matplotlib.axes import Axes

from asynckfold.results.report import sentences
from asynckfold.results.report.charts import style
from asynckfold.results.report.inline.probabilities import panels_of
from asynckfold.results.report.summary import Summary


@style.applied
def draw_probabilities(summary: Summary) -> style.Drawing | None:
    """Draw the curves of two classes, and the calibration of the first candidate."""
    panels = list(panels_of(summary))
    if not panels:
        return None
    title = sentences.calibrated(summary) or sentences.areas(summary)
    figure = style.new_figure(3.6, title)
    colours = style.colours_of(row.name for row in summary.candidates)
    axes: Axes
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.plot(*zip(*panel.edge, strict=True), color=style.FAINT, linestyle=(0, (4, 3)), lw=0.8)
        for name, points, _ in panel.curves:
            across, up = zip(*points, strict=True)
            style.draw_line(axes, across, up, color=colours[name], linewidth=1.6)
        axes.set_title(panel.title, loc="left")
        axes.set_xlabel(panel.under)
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        style.grid(axes, "y")
    drawn = [name for panel in panels for name, _, _ in panel.curves]
    style.name_candidates(figure, colours, drawn, lines=True)
    return style.Drawing(title, "Dashed: no skill, or perfect calibration.", figure)
