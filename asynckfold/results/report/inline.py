"""The figures of the page as inline SVG, without matplotlib, whose import takes a second."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from asynckfold.results.report import figures, svg
from asynckfold.results.report import sentences as say
from asynckfold.results.report.candidate_rows import CandidateRow
from asynckfold.results.report.figures import HEIGHT, Line, Panel, places_of
from asynckfold.results.report.predictions import spread
from asynckfold.results.report.sentences import interval, number, plural
from asynckfold.results.report.summary import Summary
from asynckfold.system.plain_text import fitted, one_line, shorten

if TYPE_CHECKING:
    from asynckfold.results.compare import ScoreComparison
    from asynckfold.results.report.grid import Effect

FOREST = 12
"""Candidates in the forest plot."""
NAME_COLUMNS = 36
"""Width of a name in letters, which fits a phone of 390 px."""
ROW, AXIS, MARGIN = 44, 34, 0.02
POINTS, MARKS = 480, 80
"""Points of all lines of a panel, and those that answer to the pointer."""
TOP, LEFT, RIGHT = 14, 0.1, 0.02
LANES, LABELLED, BARS = 128, 16, 2000
"""Rows of the timeline, the most of them that have room for a label, and of bars with all facts."""


def inline(summary: Summary) -> dict[str, Markup]:
    """Draw the figures of the page as SVG, by name; those without numbers are left out."""
    loss = figures.loss_over_time(figures.comparable_losses(summary), places_of(summary))
    predicted = figures.predicted_numbers(summary)
    drawn = {
        "importance": _importance(summary),
        "effects": _effects(summary),
        "parallel": _parallel(summary),
        "forest": forest(summary.candidates, summary.metric, summary.fold_names),
        "curves": _panels(figures.curves(summary)),
        "loss_vs_time": _panels([loss] if loss else []),
        "predictions": _panels([predicted] if predicted else []),
        "probabilities": _panels(list(figures.probabilities(summary))),
        "timeline": _timeline(summary),
        "cpu_usage": _panels(figures.over_time(summary.use)),
        "gpu_usage": _panels(figures.over_time(summary.gpu_use)),
        "speedup": _speedup(summary),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def comparison(
    runs: tuple[Summary, Summary], scores: ScoreComparison, candidates: Sequence[str]
) -> dict[str, Markup]:
    """Draw two runs: differences fold by fold, and the curves of some candidates over each other.

    Those have a colour each, in both figures.
    """
    title = f"{scores.metric}, {scores.runs[1]} - {scores.runs[0]}"
    known, rows = {item.name: item for item in scores.candidates if item.by_fold}, []
    for row in runs[1].candidates:
        item = known.get(one_line(row.name))
        if item is not None:
            mean, low, high, _ = item.change(scores.runs[1])
            by_fold, means = {title: item.by_fold}, {title: mean}
            rows.append(replace(row, scores=by_fold, mean=means, ci_low=low, ci_high=high))
    drawn = {
        "differences": forest(rows, title, runs[1].fold_names, mark=0.0),
        "curves": _panels(figures.overlaid(runs, scores.runs, candidates)),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


# The forest plot


def forest(
    rows: Sequence[CandidateRow | Effect],
    metric: str,
    fold_names: Sequence[str],
    mark: float | None = None,
    scale: svg.Scale | None = None,
) -> Markup | None:
    """Draw mean, 95 % interval and fold scores of the first candidates that have a score.

    `mark` is the value at the dashed line, by default the first one's mean. With a `scale`, rows
    are values of a parameter, in one colour and without that line.
    """
    known = [(place, row) for place, row in enumerate(rows) if math.isfinite(row.mean[metric])]
    drawn = known[:FOREST]
    if not drawn:
        return None
    is_ranking = scale is None
    if is_ranking and mark is None and len(rows) > 1 and _has_all_scores(drawn[0][1], metric):
        mark = drawn[0][1].mean[metric]
    scale = scale or _forest_scale([row for _, row in drawn], metric, mark)
    bottom = ROW * len(drawn) + 6
    parts = list(_forest_axis(scale, bottom, metric))
    if mark is not None:
        x = _across(scale, mark)
        parts.append(svg.rule(x, 18, bottom, stroke=svg.FAINT, stroke_dasharray="3 3"))
    for line, (place, row) in enumerate(drawn):
        parts.append(
            _forest_row(row, metric, svg.colour(place * is_ranking), ROW * line, scale, fold_names)
        )
    said = "; ".join(_in_words(row, metric) for _, row in drawn)
    label = f"{metric} of {plural(len(drawn), 'candidate' if is_ranking else 'value')}. {said}"
    return svg.figure(bottom + AXIS, label, *parts)


def _has_all_scores(row: CandidateRow | Effect, metric: str) -> bool:
    return not any(math.isnan(score) for score in row.scores[metric])


def _in_words(row: CandidateRow | Effect, metric: str) -> str:
    known = sum(not math.isnan(score) for score in row.scores[metric])
    between = ""
    if not math.isnan(row.ci_low):
        between = f", 95 % interval {interval(row.ci_low, row.ci_high)}"
    return f"{row.name}: mean {number(row.mean[metric])} over {plural(known, 'fold')}{between}"


def _forest_scale(
    rows: Sequence[CandidateRow | Effect], metric: str, mark: float | None = None
) -> svg.Scale:
    """Return an axis for all scores; intervals that are much wider are cut off."""
    scores = [score for row in rows for score in (*row.scores[metric], row.mean[metric])]
    marks = [] if mark is None else [mark]
    known = [score for score in (*scores, *marks) if math.isfinite(score)]
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
    yield svg.text(shorten(metric, NAME_COLUMNS), 0.5, bottom + 31, "middle", class_="faint")


def _forest_row(
    row: CandidateRow | Effect,
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
    name = fitted(row.name, NAME_COLUMNS)
    return svg.element(
        "g",
        words,
        svg.text(name, 0, top + 18, font_weight="600", class_="tick"),
        svg.text(number(row.mean[metric]), 1, top + 18, "end", class_="tick"),
        svg.element("g", *marks, color=colour),
    )


# Parameters of a grid


def _importance(summary: Summary) -> Markup | None:
    """Draw a bar for each parameter."""
    importance = summary.effects.importance if summary.effects else {}
    if not importance:
        return None
    longest, parts = max(importance.values()) or 1.0, []
    for place, (name, loss) in enumerate(importance.items()):
        top, wide = 38 * place, max(0.85 * loss / longest, 0.002)
        parts.append(svg.text(fitted(name, 40), 0, top + 14, font_weight="600"))
        where = {"x": 0, "y": top + 19, "width": svg.percent(wide), "height": 12}
        parts.append(svg.element("rect", **where, fill=svg.colour(0)))
        parts.append(svg.text(f"{loss:.2f}", wide, top + 29, dx=6))
    return svg.figure(38 * len(importance), say.matters(summary), *parts)


def _effects(summary: Summary) -> Markup | None:
    """Draw mean, interval and folds of each value, all parameters on one scale."""
    if summary.effects is None:
        return None
    effects, metric = summary.effects.effects, summary.metric
    scale = _forest_scale([row for rows in effects.values() for row in rows], metric)
    panels = []
    for title, rows in effects.items():
        drawn = forest(rows, metric, summary.fold_names, scale=scale)
        if drawn is not None:
            panels.append(svg.element("div", svg.element("p", title), drawn))
    return svg.element("div", *panels, class_="panels")


def _parallel(summary: Summary) -> Markup | None:
    """Draw a line for each candidate across the axes of all parameters."""
    axes, lines = figures.parallel(summary)
    if not lines:
        return None
    panel = Panel("", lines, svg.Scale(0, len(axes) - 1), figures.UNIT, "", 220)
    bottom, texts, parts = TOP + panel.height, [], []
    # What fits between two axes on a phone.
    letters = max(3, NAME_COLUMNS // len(axes))
    for place, axis in enumerate(axes):
        x = LEFT + (1 - LEFT - RIGHT) * panel.x(place)
        parts.append(svg.rule(x, TOP, bottom))
        end = svg.anchor(x, 0.12)
        title = shorten(axis.title, min(14, letters))
        texts.append(svg.text(title, x, bottom + 20, end, font_weight="600"))
        for value, height in axis.ticks:
            # Beside the axis, and of the last one, at the edge, above the tick.
            level, is_last = TOP + panel.height * (1 - height), axis is axes[-1]
            at, dx, up = ("end", 0, 2) if is_last else ("start", 9, -4)
            words = shorten(value, min(9, letters))
            texts.append(svg.text(words, x, level - up, at, dx=dx, class_="faint tick"))
    parts += [_series(line, panel, 40, len(axes)) for line in reversed(lines)]
    label = f"{plural(len(lines), 'candidate')} over {', '.join(axis.title for axis in axes)}"
    drawn = svg.figure(bottom + 26, label, *parts, *texts)
    return Markup().join([drawn, svg.legend({line.name: line.place for line in lines})])


# Panels of lines


def _panels(panels: Sequence[Panel]) -> Markup | None:
    """Return panels side by side, above their legend; None without panels."""
    if not panels:
        return None
    drawn = svg.element("div", *map(_panel, panels), class_="panels")
    names = {line.name: line.place for panel in panels for line in panel.lines if line.name}
    return Markup().join([drawn, *([svg.legend(names)] if names else [])])


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
    kept = spread(len(line.points), points)
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
    for piece in _pieces(thin) if line.joined else ():
        path = {"points": " ".join(_places(piece, panel)), "vector_effect": "non-scaling-stroke"}
        shapes.append(svg.element("polyline", **path, **look))
    drawn = svg.element("svg", *shapes, **box, preserveAspectRatio="none")
    circles = list(_marks(line, panel, marks)) if has_colour else []
    series = {"data_series": line.place, "color": svg.colour(line.place)}
    return svg.element("g", drawn, *circles, **series)


def _marks(line: Line, panel: Panel, marks: int) -> Iterator[Markup]:
    marks = marks if line.joined else len(line.points)
    seen = len(line.points) <= marks
    for place in spread(len(line.points), marks):
        at, value = line.points[place]
        if line.said and math.isfinite(value):
            where = {"cx": svg.percent(LEFT + (1 - LEFT - RIGHT) * panel.x(at))}
            level = TOP + panel.height * (1 - panel.y(value))
            where |= {"cy": f"{level:.5g}", "r": "3" if seen else "5"}
            opacity = 0.5 if not line.joined else 1 if seen else 0
            look = {"fill": "currentColor", "fill_opacity": str(opacity)}
            yield svg.element("circle", svg.element("title", line.said[place]), **where, **look)


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


# Seconds of the serial loop and of the packed run


def _speedup(summary: Summary) -> Markup | None:
    """Draw the seconds; where they were measured, the ideal ones, too."""
    rows = figures.speedup_bars(summary)
    if not rows:
        return None
    longest = max(bar.seconds for bars in rows.values() for bar in bars) or 1.0
    parts, top = [], 0
    for name, bars in rows.items():
        parts.append(svg.text(shorten(name, 40), 0, top + 14, font_weight="600"))
        for place, bar in enumerate(bars):
            y, wide = top + 20 + 18 * place, max(0.4 * bar.seconds / longest, 0.002)
            colour = svg.colour(0 if bar.kind == "packed" else len(svg.COLOURS))
            look = {"fill": colour}
            if bar.dashed:
                look = {"fill": "none", "stroke": colour, "stroke_dasharray": "3 2"}
            where = {"x": 0, "y": y, "width": svg.percent(wide), "height": 14}
            parts.append(svg.element("rect", **where, **look))
            parts.append(svg.text(bar.words, wide, y + 11, dx=6))
        top += 26 + 18 * len(bars)
    return svg.figure(top, say.speed(summary), *parts)


# Which job ran on which core when


def _timeline(summary: Summary) -> Markup | None:
    """Draw a bar for each attempt at a job; those of a fusion group are one bar."""
    timeline = figures.timeline(summary)
    if timeline is None:
        return None
    scale, lanes = svg.Scale(0, timeline.length), timeline.lanes[:LANES]
    room, few = len(timeline.lanes) <= LABELLED, len(summary.bars) <= BARS
    step, thick, top = (38, 16, 20) if room else (8, 7, 6)
    bottom = top + step * len(lanes)
    parts = []
    for tick in scale.ticks(6):
        x = scale(tick)
        parts.append(svg.rule(x, 0, bottom))
        parts.append(svg.text(f"{tick:g}", x, bottom + 15, svg.anchor(x, 0.05), class_="faint"))
    parts.append(svg.text(timeline.under, 0.5, bottom + 31, "middle", class_="faint"))
    for line, (label, spans) in enumerate(lanes):
        y = top + step * line
        if room:
            parts.append(svg.text(label, 0, y - 5, class_="faint tick"))
        for span in spans:
            where = {"x": svg.percent(scale(span.start)), "y": y, "height": thick}
            where |= {"width": svg.percent(max(scale(span.end) - scale(span.start), 0.001))}
            colour = svg.colour(span.place)
            look: dict[str, object] = {"fill": colour, "stroke": svg.PAPER}
            if not span.ended_well:
                look |= {"stroke": colour, "fill_opacity": 0.25, "stroke_dasharray": "3 2"}
            facts = figures.facts_of(span.bars if few else span.bars[:1], summary.metric)
            said = svg.element("title", facts if few else facts.partition("\n")[0])
            parts.append(svg.element("rect", said, **where, **look, data_series=span.place))
    label = f"{timeline.title}. A bar per attempt at a job, a row per core."
    drawn = svg.figure(bottom + 36, label, *parts)
    held = {bar.candidate for bar in summary.bars}
    legend = svg.legend({name: at for name, at in places_of(summary).items() if name in held})
    return Markup().join([svg.element("p", timeline.title), drawn, legend])
