"""Every figure of the page by its name."""

from __future__ import annotations

from markupsafe import Markup

from asynckfold.results.report.inline import lines
from asynckfold.results.report.inline.forest import ForestRow, forest_svg
from asynckfold.results.report.inline.probabilities import probabilities_svg
from asynckfold.results.report.inline.scatter import scatter_svg
from asynckfold.results.report.inline.speedup import speedup_svg
from asynckfold.results.report.inline.timeline import timeline_svg
from asynckfold.results.report.summary import Summary


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
