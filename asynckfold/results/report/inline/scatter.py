"""Predicted against true numbers, as inline SVG."""

from __future__ import annotations

import math

from markupsafe import Markup

from asynckfold.results.report.inline import svg
from asynckfold.results.report.predictions import Predictions
from asynckfold.results.report.sentences import number
from asynckfold.results.report.summary import Summary

LEFT, RIGHT, TOP, HEIGHT = 0.1, 0.02, 12, 320


def root_mean_squared_error(found: Predictions) -> float:
    """Return the error over the points."""
    pairs = zip(found.true, found.predicted, strict=True)
    return math.hypot(*(a - b for a, b in pairs)) / math.sqrt(len(found.true))


def scatter_svg(summary: Summary) -> Markup | None:
    """Draw held-out samples of the best candidate; on the dashed line they are equal."""
    found = summary.predictions
    if found is None:
        return None
    scale = svg.Scale.over([*found.true, *found.predicted])
    bottom = TOP + HEIGHT
    parts = []
    for tick in scale.ticks(5):
        across, up = _place(scale, tick, tick)
        ends = {"x1": svg.percent(LEFT), "x2": "100%", "y1": up, "y2": up}
        parts.append(svg.element("line", **ends, stroke=svg.GRID))
        parts.append(svg.rule(across, TOP, bottom))
        parts.append(svg.text(f"{tick:.4g}", across, bottom + 15, "middle", class_="faint"))
        parts.append(svg.text(f"{tick:.4g}", 0, up + 4, class_="faint"))
    ends = {"x1": svg.percent(LEFT), "x2": svg.percent(1 - RIGHT), "y1": bottom, "y2": TOP}
    parts.append(svg.element("line", **ends, stroke=svg.FAINT, stroke_dasharray="4 3"))
    for true, predicted in zip(found.true, found.predicted, strict=True):
        across, up = _place(scale, true, predicted)
        said = svg.element("title", f"true {number(true)}, predicted {number(predicted)}")
        point = {"cx": svg.percent(across), "cy": up, "r": 3}
        look = {"fill": svg.colour(0), "fill_opacity": 0.5}
        parts.append(svg.element("circle", said, **point, **look))
    parts.append(svg.text("true", 0.5, bottom + 31, "middle", class_="faint"))
    parts.append(svg.text("predicted", 0, 8, class_="faint"))
    error = root_mean_squared_error(found)
    label = f"Predicted against true numbers of {found.candidate}: "
    return svg.figure(
        bottom + 36, f"{label}root mean squared error {number(error)} over the points", *parts
    )


def _place(scale: svg.Scale, true: float, predicted: float) -> tuple[float, float]:
    return LEFT + (1 - LEFT - RIGHT) * scale(true), TOP + HEIGHT * (1 - scale(predicted))
