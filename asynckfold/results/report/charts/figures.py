"""Every figure of a report by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from markupsafe import Markup

from asynckfold.results.report.charts import lines
from asynckfold.results.report.charts.classes import draw_classes, draw_confusion
from asynckfold.results.report.charts.curves import draw_curves
from asynckfold.results.report.charts.forest import ForestRow, forest_svg
from asynckfold.results.report.charts.probabilities import draw_probabilities, probabilities_svg
from asynckfold.results.report.charts.scatter import draw_predictions, scatter_svg
from asynckfold.results.report.charts.scores import draw_scores
from asynckfold.results.report.charts.serial_loop import draw_loss, draw_speedup, speedup_svg
from asynckfold.results.report.charts.style import Chart, Drawing, rendered
from asynckfold.results.report.charts.timeline import draw_gantt, draw_use, timeline_svg
from asynckfold.results.report.summary import Summary

FIGURES: Mapping[str, Callable[[Summary], Drawing | None]] = {
    "scores": draw_scores,
    "curves": draw_curves,
    "loss_vs_time": draw_loss,
    "class_accuracy": draw_classes,
    "confusion": draw_confusion,
    "probabilities": draw_probabilities,
    "predictions": draw_predictions,
    "cpu_usage": draw_use,
    "timeline": draw_gantt,
    "speedup": draw_speedup,
}
"""The figures, by name of file and of `CVResults.plot`; None without numbers to draw."""

ON_AXES: Mapping[str, Callable[..., Drawing | None]] = {
    "scores": draw_scores,
    "curves": draw_curves,
    "confusion": draw_confusion,
    "timeline": draw_gantt,
}
"""Those that the caller's axes can take."""


def draw(summary: Summary) -> tuple[Chart, ...]:
    """Draw every figure that the run has numbers for."""
    drawn = ((name, make(summary)) for name, make in FIGURES.items())
    return tuple(rendered(name, found) for name, found in drawn if found is not None)


def inline(summary: Summary) -> dict[str, Markup]:
    """Draw the figures of the page as SVG, by name."""
    made = {
        "forest": _forest(summary),
        "curves": lines.curves(summary),
        "loss_vs_time": lines.loss_over_time(summary),
        "predictions": scatter_svg(summary),
        "probabilities": probabilities_svg(summary),
        "timeline": timeline_svg(summary),
        "cpu_usage": lines.cpu(summary),
        "gpu_usage": lines.gpus(summary),
        "speedup": speedup_svg(summary),
    }
    return {name: drawn for name, drawn in made.items() if drawn is not None}


def _forest(summary: Summary) -> Markup | None:
    rows = [
        ForestRow(
            row.name, row.scores[summary.metric], row.mean[summary.metric], row.ci_low, row.ci_high
        )
        for row in summary.candidates
    ]
    return forest_svg(rows, summary.metric, summary.fold_names)
