"""Every figure of a report by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asynckfold.results.report.charts.classes import draw_classes, draw_confusion
from asynckfold.results.report.charts.curves import draw_curves
from asynckfold.results.report.charts.probabilities import draw_probabilities
from asynckfold.results.report.charts.scatter import draw_predictions
from asynckfold.results.report.charts.scores import draw_scores
from asynckfold.results.report.charts.serial_loop import draw_loss, draw_speedup
from asynckfold.results.report.charts.style import Chart, Drawing, rendered
from asynckfold.results.report.charts.timeline import draw_gantt, draw_use
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
