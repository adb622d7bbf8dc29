"""The figures of the page as inline SVG, without matplotlib, whose import takes a second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup

from asynckfold.results.report import figures, svg
from asynckfold.results.report import sentences as say
from asynckfold.results.report.candidate_rows import CandidateRow
from asynckfold.results.report.figures import (
    HEIGHT,
    Line,
    Panel,
    facts_of,
    lanes_of,
    places_of,
    timeline_title,
    together,
)
from asynckfold.results.report.sentences import interval, number, plural
from asynckfold.results.report.summary import Summary
from asynckfold.system.units import duration

FOREST = 12
"""Candidates in the forest plot."""
NAME_COLUMNS = 36
"""Width of a name in letters, which fits a phone of 390 px."""
ROW, AXIS, MARGIN = 44, 34, 0.02
POINTS, MARKS = 480, 80
"""Points of all lines of a panel, and those that answer to the pointer."""
TOP, LEFT, RIGHT = 14, 0.1, 0.02
LANES, LABELLED = 128, 16
"""Rows of the timeline, and the most of them that have room for a label."""


def inline(summary: Summary) -> dict[str, Markup]:
    """Draw the figures of the page as SVG, by name; those without numbers are left out."""
    places = places_of(summary)
    losses = figures.comparable_losses(summary)
    loss = figures.loss_over_time(losses, places)
    with_curves = [row.name for row in summary.candidates if row.curves][: figures.CANDIDATES]
    probabilities = list(figures.probabilities(summary))
    sure = [line.name for panel in probabilities for line in panel.lines if line.name]
    drawn = {
        "forest": forest(summary.candidates, summary.metric, summary.fold_names),
        "curves": _panels(figures.curves(summary), with_curves, places),
        "loss_vs_time": _panels([loss] if loss else [], [it.candidate for it in losses], places),
        "predictions": _scatter(summary),
        "probabilities": _panels(probabilities, sure, places),
        "timeline": timeline(summary),
        "cpu_usage": _panels(figures.cpu_use(summary.use)),
        "gpu_usage": _panels(figures.gpu_use(summary.gpu_use)),
        "speedup": _speedup(summary),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


# The forest plot


def forest(rows: Sequence[CandidateRow], metric: str, fold_names: Sequence[str]) -> Markup | None:
    """Draw mean, 95 % interval and fold scores of the first candidates that have a score."""
    known = [(place, row) for place, row in enumerate(rows) if math.isfinite(row.mean[metric])]
    drawn = known[:FOREST]
    if not drawn:
        return None
    scale = _forest_scale([row for _, row in drawn], metric)
    bottom = ROW * len(drawn) + 6
    parts = list(_forest_axis(scale, bottom, metric))
    if len(rows) > 1 and _has_all_scores(drawn[0][1], metric):
        first = _across(scale, drawn[0][1].mean[metric])
        parts.append(svg.rule(first, 18, bottom, stroke=svg.FAINT, stroke_dasharray="3 3"))
    for line, (place, row) in enumerate(drawn):
        parts.append(_forest_row(row, metric, svg.colour(place), ROW * line, scale, fold_names))
    said = "; ".join(_in_words(row, metric) for _, row in drawn)
    label = f"{metric} of {plural(len(drawn), 'candidate')}. {said}"
    return svg.figure(bottom + AXIS, label, *parts)


def _has_all_scores(row: CandidateRow, metric: str) -> bool:
    return not any(math.isnan(score) for score in row.scores[metric])


def _in_words(row: CandidateRow, metric: str) -> str:
    known = sum(not math.isnan(score) for score in row.scores[metric])
    between = ""
    if not math.isnan(row.ci_low):
        between = f", 95 % interval {interval(row.ci_low, row.ci_high)}"
    return f"{row.name}: mean {number(row.mean[metric])} over {plural(known, 'fold')}{between}"


def _forest_scale(rows: Sequence[CandidateRow], metric: str) -> svg.Scale:
    """Return an axis for all scores; intervals that are much wider are cut off."""
    scores = [score for row in rows for score in (*row.scores[metric], row.mean[metric])]
    known = [score for score in scores if math.isfinite(score)]
    low, high = min(known), max(known)
    room = high - low
    ends = [end for row in rows for end in (row.ci_low, row.ci_high) if math.isfinite(end)]
    return svg.Scale.over(
        [low, high, *(min(max(end, low - room), high + room) for end in ends if room < math.inf)]
    )


def _across(scale: svg.Scale, value: float) -> float:
    return MARGIN + (1 - 2 * MARGIN) * scale(value)


def _forest_axis(scale: svg.Scale, bottom: float, metric: str) -> Iterator[Markup]:
    for tick in scale.ticks(5):
        x = _across(scale, tick)
        yield svg.rule(x, 18, bottom)
        yield svg.text(f"{tick:.6g}", x, bottom + 15, svg.anchor(x), class_="faint")
    yield svg.text(svg.fitted(metric, NAME_COLUMNS), 0.5, bottom + 31, "middle", class_="faint")


def _forest_row(
    row: CandidateRow,
    metric: str,
    colour: str,
    top: float,
    scale: svg.Scale,
    fold_names: Sequence[str],
) -> Markup:
    y = top + 32
    words = svg.element("title", _in_words(row, metric))
    marks = []
    if math.isfinite(row.ci_low) and math.isfinite(row.ci_high):
        ends = _across(scale, row.ci_low), _across(scale, row.ci_high)
        where = {"x1": svg.percent(ends[0]), "x2": svg.percent(ends[1]), "y1": y, "y2": y}
        marks.append(svg.element("line", **where, stroke="currentColor", stroke_width=2))
        # Without a cap, the interval goes on beyond the axis.
        for end, value in zip(ends, (row.ci_low, row.ci_high), strict=True):
            if scale.low <= value <= scale.high:
                marks.append(svg.rule(end, y - 5, y + 5, stroke="currentColor", stroke_width=2))
    for name, score in zip(fold_names, row.scores[metric], strict=False):
        if math.isfinite(score):
            point = {"cx": svg.percent(_across(scale, score)), "cy": y, "r": 4}
            said = svg.element("title", f"{row.name}, {name}: {number(score)}")
            look = {"fill": "currentColor", "fill_opacity": 0.4}
            marks.append(svg.element("circle", said, **point, **look))
    fill, edge = "currentColor", svg.PAPER
    if not _has_all_scores(row, metric):
        fill, edge = edge, fill
    diamond = svg.element("path", d="M0-7 7 0 0 7-7 0z", fill=fill, stroke=edge)
    place = {"x": svg.percent(_across(scale, row.mean[metric])), "y": y, "overflow": "visible"}
    marks.append(svg.element("svg", words, diamond, **place))
    name = svg.fitted(row.name, NAME_COLUMNS)
    return svg.element(
        "g",
        words,
        svg.text(name, 0, top + 18, font_weight="600", class_="tick"),
        svg.text(number(row.mean[metric]), 1, top + 18, "end", class_="tick"),
        svg.element("g", *marks, color=colour),
    )


# Panels of lines


def _panels(
    panels: Sequence[Panel], names: Iterable[str] = (), places: Mapping[str, int] | None = None
) -> Markup | None:
    """Return panels side by side, above their legend; None without panels."""
    if not panels:
        return None
    drawn = svg.element("div", *map(_panel, panels), class_="panels")
    legend = [svg.legend({name: places[name] for name in names})] if places else []
    return Markup().join([drawn, *legend])


def _panel(panel: Panel) -> Markup:
    """Draw lines over one pair of axes; labels of the y axis stand on its grid lines."""
    lines = panel.lines
    count = max(1, len(lines))
    points, marks = max(40, min(120, POINTS // count)), max(4, min(30, MARKS // count))
    parts = [*_axes(panel), *(_series(line, panel, points, marks) for line in reversed(lines))]
    ends = [line.points[-1][1] for line in lines if line.points]
    label = f"{panel.title}: {plural(len(lines), 'line')}"
    label += f", at the end {number(min(ends))} to {number(max(ends))}" if ends else ""
    drawn = svg.figure(TOP + panel.height + 36, label, *parts)
    return svg.element("div", svg.element("p", panel.title), drawn)


def _axes(panel: Panel) -> Iterator[Markup]:
    bottom = TOP + panel.height
    for tick in panel.y.ticks(4 if panel.height >= HEIGHT else 2):
        level = TOP + panel.height * (1 - panel.y(tick))
        ends = {"x1": 0, "x2": "100%", "y1": level, "y2": level}
        yield svg.element("line", **ends, stroke=svg.GRID)
        yield svg.text(f"{tick:.4g}", 0, level - 3, class_="faint tick")
    for tick in panel.x.ticks(5):
        share = LEFT + (1 - LEFT - RIGHT) * panel.x(tick)
        yield svg.text(f"{tick:g}", share, bottom + 15, svg.anchor(share), class_="faint")
    yield svg.text(panel.under, 0.5, bottom + 31, "middle", class_="faint")


def _series(line: Line, panel: Panel, points: int, marks: int) -> Markup:
    has_colour = line.place < len(svg.COLOURS)
    kept = _spread(len(line.points), points)
    thin = [line.points[place] for place in kept]
    box: dict[str, object] = {"x": svg.percent(LEFT), "width": svg.percent(1 - LEFT - RIGHT)}
    box |= {"y": TOP, "height": panel.height, "viewBox": "0 0 1000 1000"}
    shapes = []
    if line.band and has_colour:
        band = [(line.points[place][0], line.band[place]) for place in kept]
        edges = [[(at, ends[side]) for at, ends in band] for side in (0, 1)]
        outline = " ".join(_places([*edges[0], *reversed(edges[1])], panel))
        look: dict[str, object] = {"fill": "currentColor", "fill_opacity": 0.16}
        shapes.append(svg.element("polygon", points=outline, **look))
    look = {"fill": "none", "stroke": "currentColor", "stroke_width": 2 if has_colour else 1}
    look |= {"stroke_dasharray": "5 4"} if line.dashed else {}
    for piece in _pieces(thin):
        path = {"points": " ".join(_places(piece, panel)), "vector_effect": "non-scaling-stroke"}
        shapes.append(svg.element("polyline", **path, **look))
    drawn = svg.element("svg", *shapes, **box, preserveAspectRatio="none")
    circles = list(_marks(line, panel, marks)) if has_colour else []
    series = {"data_series": line.place, "color": svg.colour(line.place)}
    return svg.element("g", drawn, *circles, **series)


def _marks(line: Line, panel: Panel, marks: int) -> Iterator[Markup]:
    seen = len(line.points) <= marks
    for place in _spread(len(line.points), marks):
        at, value = line.points[place]
        if line.said and math.isfinite(value):
            where = {"cx": svg.percent(LEFT + (1 - LEFT - RIGHT) * panel.x(at))}
            level = TOP + panel.height * (1 - panel.y(value))
            where |= {"cy": f"{level:.5g}", "r": "3" if seen else "5"}
            look = {"fill": "currentColor", "fill_opacity": "1" if seen else "0"}
            yield svg.element("circle", svg.element("title", line.said[place]), **where, **look)


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced places of a list, the last included.

    >>> _spread(3, 5), _spread(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return list(range(count))
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]


def _places(points: Sequence[tuple[float, float]], panel: Panel) -> Iterator[str]:
    for at, value in points:
        if math.isfinite(value):
            yield f"{1000 * panel.x(at):.0f},{1000 * (1 - panel.y(value)):.0f}"


def _pieces(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Split a line where it has no value."""
    piece: list[tuple[float, float]] = []
    for point in [*points, (math.nan, math.nan)]:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []


# Predicted against true numbers


def _scatter(summary: Summary) -> Markup | None:
    """Draw held-out samples of the best candidate; on the dashed line they are equal."""
    predictions = summary.predictions
    if predictions is None:
        return None
    scale = svg.Scale.over([*predictions.true, *predictions.predicted])
    top, height = 12, 320
    bottom = top + height

    def place(true: float, predicted: float) -> tuple[float, float]:
        return LEFT + (1 - LEFT - RIGHT) * scale(true), top + height * (1 - scale(predicted))

    parts = []
    for tick in scale.ticks(5):
        across, up = place(tick, tick)
        ends = {"x1": svg.percent(LEFT), "x2": "100%", "y1": up, "y2": up}
        parts.append(svg.element("line", **ends, stroke=svg.GRID))
        parts.append(svg.rule(across, top, bottom))
        parts.append(svg.text(f"{tick:.4g}", across, bottom + 15, "middle", class_="faint"))
        parts.append(svg.text(f"{tick:.4g}", 0, up + 4, class_="faint"))
    ends = {"x1": svg.percent(LEFT), "x2": svg.percent(1 - RIGHT), "y1": bottom, "y2": top}
    parts.append(svg.element("line", **ends, stroke=svg.FAINT, stroke_dasharray="4 3"))
    for true, predicted in zip(predictions.true, predictions.predicted, strict=True):
        across, up = place(true, predicted)
        said = svg.element("title", f"true {number(true)}, predicted {number(predicted)}")
        point = {"cx": svg.percent(across), "cy": up, "r": 3}
        look = {"fill": svg.colour(0), "fill_opacity": 0.5}
        parts.append(svg.element("circle", said, **point, **look))
    parts.append(svg.text("true", 0.5, bottom + 31, "middle", class_="faint"))
    parts.append(svg.text("predicted", 0, 8, class_="faint"))
    error = number(figures.root_mean_squared_error(predictions))
    label = f"Predicted against true numbers of {predictions.candidate}: root mean squared error"
    return svg.figure(bottom + 36, f"{label} {error} over the points", *parts)


# Seconds of the serial loop and of the packed run


def _speedup(summary: Summary) -> Markup | None:
    """Draw the seconds; where they were measured, the ideal ones, too."""
    speedup = figures.speedup_bars(summary)
    if speedup is None:
        return None
    longest = max(map(max, speedup.rows.values())) or 1.0
    grey = svg.colour(len(svg.COLOURS))
    step = 62 if speedup.ideal is None else 80
    parts = []
    for line, (name, (serial, packed)) in enumerate(speedup.rows.items()):
        top = step * line
        parts.append(svg.text(svg.fitted(name, 40), 0, top + 14, font_weight="600"))
        ratio = f", {serial / packed:.2f}× as fast" if speedup.is_measured else ""
        about = "" if speedup.is_measured else "about "
        words = f"{about}{duration(serial)} serial ({speedup.kind})"
        bars = [
            (serial, grey, not speedup.is_measured, words),
            (packed, svg.colour(0), False, f"{duration(packed)} packed{ratio}"),
        ]
        if speedup.ideal is not None:
            ideal = serial / speedup.ideal
            words = f"{duration(ideal)} ideal: one job per core, {speedup.ideal}× as fast"
            bars.append((ideal, grey, True, words))
        for place, (seconds, colour, is_dashed, words) in enumerate(bars):
            y = top + 20 + 18 * place
            wide = max(0.4 * seconds / longest, 0.002)
            shape = {"fill": "none" if is_dashed else colour}
            shape |= {"stroke": colour, "stroke_dasharray": "3 2"} if is_dashed else {}
            where = {"x": 0, "y": y, "width": svg.percent(wide), "height": 14}
            parts.append(svg.element("rect", **where, **shape))
            parts.append(svg.text(words, wide, y + 11, dx=6))
    return svg.figure(step * len(speedup.rows), say.speed(summary), *parts)


# Which job ran on which core when


def timeline(summary: Summary) -> Markup | None:
    """Draw a bar for each attempt at a job; those of a fusion group are one bar."""
    if not summary.bars:
        return None
    lanes = lanes_of(summary.bars)
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
    title = timeline_title(summary, longest)
    divisor, unit = say.time_unit(longest)
    scale = svg.Scale(0, max(longest / divisor, 1e-3))
    places = places_of(summary)
    room = len(lanes) <= LABELLED
    step, thick, top = (38, 16, 20) if room else (8, 7, 6)
    bottom = top + step * min(len(lanes), LANES)
    parts = []
    for tick in scale.ticks(6):
        x = scale(tick)
        parts.append(svg.rule(x, 0, bottom))
        parts.append(svg.text(f"{tick:g}", x, bottom + 15, svg.anchor(x, 0.05), class_="faint"))
    under = f"{unit} since the first job began"
    parts.append(svg.text(under, 0.5, bottom + 31, "middle", class_="faint"))
    for line, (label, bars) in enumerate(lanes[:LANES]):
        y = top + step * line
        if room:
            parts.append(svg.text(label, 0, y - 5, class_="faint tick"))
        for group in together(bars):
            start, end = ((at - first) / divisor for at in (group[0].start, group[-1].end))
            where = {"x": svg.percent(scale(start)), "y": y, "height": thick}
            where |= {"width": svg.percent(max(scale(end) - scale(start), 0.001))}
            place = places[group[0].candidate]
            colour = svg.colour(place)
            good = all(bar.ended_well for bar in group)
            look: dict[str, object] = {"fill": colour, "stroke": svg.PAPER if good else colour}
            look |= {} if good else {"fill_opacity": 0.25, "stroke_dasharray": "3 2"}
            said = svg.element("title", facts_of(group, summary.metric))
            parts.append(svg.element("rect", said, **where, **look, data_series=place))
    drawn = svg.figure(bottom + 36, f"{title}. A bar per attempt at a job, a row per core.", *parts)
    held = {bar.candidate for bar in summary.bars}
    legend = svg.legend({name: place for name, place in places.items() if name in held})
    return Markup().join([svg.element("p", title), drawn, legend])
