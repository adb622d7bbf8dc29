"""The forest plot: mean, 95 % interval and fold scores of each candidate, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from asynckfold.results.report.inline import svg
from asynckfold.results.report.sentences import interval, number, plural

SHOWN = 12
"""Candidates that are drawn."""
ROW, AXIS, MARGIN = 44, 34, 0.02
NAME_COLUMNS = 36
"""Width of a name in letters, which fits a phone of 390 px."""


@dataclass(frozen=True)
class ForestRow:
    """One candidate: scores by fold, their mean and its 95 % interval; NaN where there is none."""

    name: str
    scores: Sequence[float]
    mean: float
    low: float
    high: float


def forest_svg(
    rows: Sequence[ForestRow], metric: str, fold_names: Sequence[str], shown: int = SHOWN
) -> Markup | None:
    """Draw the first candidates that have a score; None without one.

    The SVG is safe to insert in any page. It is as wide as its place, and takes the variables
    ``--ink``, ``--faint``, ``--line``, ``--paper`` and ``--c0`` to ``--c7`` as colours.
    """
    drawn = [(place, row) for place, row in enumerate(rows) if math.isfinite(row.mean)][:shown]
    if not drawn:
        return None
    scale = _scale([row for _, row in drawn])
    bottom = ROW * len(drawn) + 6
    parts = list(_axis(scale, bottom, metric))
    if len(rows) > 1 and _is_complete(drawn[0][1]):
        first = _x(scale, drawn[0][1].mean)
        parts.append(svg.rule(first, 18, bottom, stroke=svg.FAINT, stroke_dasharray="3 3"))
    for line, (place, row) in enumerate(drawn):
        parts.append(_row(row, svg.colour(place), ROW * line, scale, fold_names))
    said = "; ".join(_words(row) for _, row in drawn)
    label = f"{metric} of {plural(len(drawn), 'candidate')}. {said}"
    return svg.figure(bottom + AXIS, label, *parts)


def _is_complete(row: ForestRow) -> bool:
    return not any(math.isnan(score) for score in row.scores)


def _words(row: ForestRow) -> str:
    known = sum(not math.isnan(score) for score in row.scores)
    between = "" if math.isnan(row.low) else f", 95 % interval {interval(row.low, row.high)}"
    return f"{row.name}: mean {number(row.mean)} over {plural(known, 'fold')}{between}"


def _scale(rows: Sequence[ForestRow]) -> svg.Scale:
    """Hold all scores, and intervals as far as they are not much wider than these."""
    scores = [score for row in rows for score in (*row.scores, row.mean) if math.isfinite(score)]
    low, high = min(scores), max(scores)
    room = high - low
    ends = [end for row in rows for end in (row.low, row.high) if math.isfinite(end)]
    return svg.Scale.over(
        [low, high, *(min(max(end, low - room), high + room) for end in ends if room < math.inf)]
    )


def _x(scale: svg.Scale, value: float) -> float:
    return MARGIN + (1 - 2 * MARGIN) * scale(value)


def _axis(scale: svg.Scale, bottom: float, metric: str) -> Iterator[Markup]:
    for tick in scale.ticks(5):
        x = _x(scale, tick)
        yield svg.rule(x, 18, bottom)
        anchor = "start" if x < 0.06 else "end" if x > 0.94 else "middle"
        yield svg.text(f"{tick:.6g}", x, bottom + 15, anchor, class_="faint")
    yield svg.text(svg.fitted(metric, NAME_COLUMNS), 0.5, bottom + 31, "middle", class_="faint")


def _row(
    row: ForestRow, colour: str, top: float, scale: svg.Scale, fold_names: Sequence[str]
) -> Markup:
    y = top + 32
    words = svg.element("title", _words(row))
    marks = []
    if math.isfinite(row.low) and math.isfinite(row.high):
        ends = _x(scale, row.low), _x(scale, row.high)
        where = {"x1": svg.percent(ends[0]), "x2": svg.percent(ends[1]), "y1": y, "y2": y}
        marks.append(svg.element("line", **where, stroke="currentColor", stroke_width=2))
        # Without a cap, the interval goes on beyond the axis.
        for end, value in zip(ends, (row.low, row.high), strict=True):
            if scale.low <= value <= scale.high:
                marks.append(svg.rule(end, y - 5, y + 5, stroke="currentColor", stroke_width=2))
    for name, score in zip(fold_names, row.scores, strict=False):
        if math.isfinite(score):
            point = {"cx": svg.percent(_x(scale, score)), "cy": y, "r": 4}
            said = svg.element("title", f"{row.name}, {name}: {number(score)}")
            marks.append(
                svg.element("circle", said, **point, fill="currentColor", fill_opacity=0.4)
            )
    fill, edge = ("currentColor", svg.PAPER) if _is_complete(row) else (svg.PAPER, "currentColor")
    diamond = svg.element("path", d="M0-7 7 0 0 7-7 0z", fill=fill, stroke=edge)
    place = {"x": svg.percent(_x(scale, row.mean)), "y": y, "overflow": "visible"}
    marks.append(svg.element("svg", words, diamond, **place))
    return svg.element(
        "g",
        words,
        svg.text(svg.fitted(row.name, NAME_COLUMNS), 0, top + 18, font_weight="600", class_="tick"),
        svg.text(number(row.mean), 1, top + 18, "end", class_="tick"),
        svg.element("g", *marks, color=colour),
    )
