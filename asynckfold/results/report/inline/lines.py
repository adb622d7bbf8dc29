"""Lines over epochs or seconds, as panels of inline SVG: curves, loss over time, CPU use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from asynckfold.results.report.attempts import CpuUse
from asynckfold.results.report.candidate_rows import CandidateRow, Curve
from asynckfold.results.report.inline import svg
from asynckfold.results.report.sentences import (
    cpu_use,
    duration,
    number,
    percent,
    plural,
    time_unit,
)
from asynckfold.results.report.summary import Summary

DRAWN, POINTS, MARKS = 24, 480, 80
"""Candidates in a panel, points of all its lines, and those that answer to the pointer."""
TOP, HEIGHT, AXIS = 14, 150, 36
LEFT, RIGHT = 0.1, 0.02
MEASURES = {"valid_loss": "valid loss", "accuracy": "accuracy", "train_loss": "train loss"}
LR = "lr"


@dataclass(frozen=True)
class PanelLine:
    """One line of a panel."""

    place: int  # of its candidate in the ranking, which gives the colour
    points: Sequence[tuple[float, float]]
    said: Sequence[str] = ()  # of each point, to whom points at it
    band: Sequence[tuple[float, float]] = ()  # lowest and highest value at each point
    dashed: bool = False

    def at(self, places: Sequence[int]) -> PanelLine:
        """Return the line with these of its points."""
        points = [self.points[place] for place in places]
        band = [self.band[place] for place in places] if self.band else ()
        return replace(self, points=points, said=(), band=band)


def panel(
    title: str,
    lines: Sequence[PanelLine],
    x: svg.Scale,
    y: svg.Scale,
    under: str,
    height: int = HEIGHT,
) -> Markup:
    """Draw lines over one pair of axes; labels of the y axis stand on its grid lines."""
    parts = [*_axes(x, y, under, height)]
    count = max(1, len(lines))
    points, marks = max(40, min(120, POINTS // count)), max(4, min(30, MARKS // count))
    parts += [_series(line, x, y, height, points, marks) for line in reversed(lines)]
    ends = [line.points[-1][1] for line in lines if line.points]
    label = f"{title}: {plural(len(lines), 'line')}"
    label += f", at the end {number(min(ends))} to {number(max(ends))}" if ends else ""
    drawn = svg.figure(TOP + height + AXIS, label, *parts)
    return svg.element("div", svg.element("p", title), drawn)


def _axes(x: svg.Scale, y: svg.Scale, under: str, height: int) -> Iterator[Markup]:
    for tick in y.ticks(4 if height >= HEIGHT else 2):
        level = TOP + height * (1 - y(tick))
        ends = {"x1": 0, "x2": "100%", "y1": level, "y2": level}
        yield svg.element("line", **ends, stroke=svg.GRID)
        yield svg.text(f"{tick:.4g}", 0, level - 3, class_="faint tick")
    for tick in x.ticks(5):
        share = _across(x(tick))
        anchor = "start" if share < 0.06 else "end" if share > 0.94 else "middle"
        yield svg.text(f"{tick:g}", share, TOP + height + 15, anchor, class_="faint")
    yield svg.text(under, 0.5, TOP + height + 31, "middle", class_="faint")


def _across(share: float) -> float:
    return LEFT + (1 - LEFT - RIGHT) * share


def _series(
    line: PanelLine, x: svg.Scale, y: svg.Scale, height: int, points: int, marks: int
) -> Markup:
    own = line.place < len(svg.COLOURS)
    thin = line.at(_spread(len(line.points), points))
    box: dict[str, object] = {"x": svg.percent(LEFT), "width": svg.percent(1 - LEFT - RIGHT)}
    box |= {"y": TOP, "height": height, "viewBox": "0 0 1000 1000"}
    shapes = []
    if thin.band and own:
        edges = [
            [(at, ends[side]) for (at, _), ends in zip(thin.points, thin.band, strict=True)]
            for side in (0, 1)
        ]
        outline = " ".join(_places([*edges[0], *reversed(edges[1])], x, y))
        shapes.append(
            svg.element("polygon", points=outline, fill="currentColor", fill_opacity=0.16)
        )
    look: dict[str, object] = {"fill": "none", "stroke": "currentColor"}
    look |= {"stroke_width": 2 if own else 1}
    look |= {"stroke_dasharray": "5 4"} if line.dashed else {}
    for piece in _pieces(thin.points):
        path = " ".join(_places(piece, x, y))
        shapes.append(
            svg.element("polyline", points=path, vector_effect="non-scaling-stroke", **look)
        )
    drawn = svg.element("svg", *shapes, **box, preserveAspectRatio="none")
    circles = list(_marks(line, x, y, height, marks)) if own else []
    series = {"data_series": line.place, "color": svg.colour(line.place)}
    return svg.element("g", drawn, *circles, **series)


def _marks(
    line: PanelLine, x: svg.Scale, y: svg.Scale, height: int, marks: int
) -> Iterator[Markup]:
    seen = len(line.points) <= marks
    for place in _spread(len(line.points), marks):
        at, value = line.points[place]
        if line.said and math.isfinite(value):
            where = {"cx": svg.percent(_across(x(at)))}
            where |= {"cy": f"{TOP + height * (1 - y(value)):.5g}", "r": "3" if seen else "5"}
            look = {"fill": "currentColor", "fill_opacity": "1" if seen else "0"}
            yield svg.element("circle", svg.element("title", line.said[place]), **where, **look)


def _spread(count: int, most: int) -> list[int]:
    """Return at most so many places of a list, its last among them.

    >>> _spread(3, 5), _spread(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return list(range(count))
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]


def _places(points: Sequence[tuple[float, float]], x: svg.Scale, y: svg.Scale) -> Iterator[str]:
    for at, value in points:
        if math.isfinite(value):
            yield f"{1000 * x(at):.0f},{1000 * (1 - y(value)):.0f}"


def _pieces(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Split a line where it has no value."""
    piece: list[tuple[float, float]] = []
    for point in [*points, (math.nan, math.nan)]:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []


def panels(*drawn: Markup) -> Markup:
    """Lay panels side by side, where there is room."""
    return svg.element("div", *drawn, class_="panels")


# Learning curves


def curves(summary: Summary) -> Markup | None:
    """Draw losses, accuracy and learning rate over the epochs: mean over the folds, and range."""
    found = {row.name: place for place, row in enumerate(summary.candidates) if row.curves}
    rows = [row for row in summary.candidates if row.curves][:DRAWN]
    drawn = [
        _measure(words, measure, [(found[row.name], row) for row in rows])
        for measure, words in MEASURES.items()
        if any(_curve(row, measure) for row in rows)
    ]
    if not drawn:
        return None
    rate = _measure("learning rate", LR, [(found[row.name], row) for row in rows], 60)
    return Markup().join(
        [panels(*drawn, rate), svg.legend({row.name: found[row.name] for row in rows})]
    )


def _curve(row: CandidateRow, measure: str) -> Curve | None:
    return next((curve for curve in row.curves if curve.measure == measure), None)


def _measure(
    title: str, measure: str, rows: Sequence[tuple[int, CandidateRow]], height: int = HEIGHT
) -> Markup:
    known = [(place, row, curve) for place, row in rows if (curve := _curve(row, measure))]
    lines = [_epoch_line(place, row.name, title, curve) for place, row, curve in known]
    # One diverged candidate must not flatten all the others.
    complete = [curve for _, row, curve in known if row.complete] or [item[2] for item in known]
    values = [value for curve in complete for line in curve.folds for value in line]
    longest = max((len(curve.mean) for _, _, curve in known), default=1)
    return panel(
        title,
        lines,
        svg.Scale.over(range(1, longest + 1), whole=True),
        _axis(values),
        "epoch",
        height,
    )


def _axis(values: Sequence[float]) -> svg.Scale:
    known = [value for value in values if math.isfinite(value)]
    log = bool(known) and min(known) > 0 and max(known) > 20 * min(known)
    return svg.Scale.over(known, log=log)


def _epoch_line(place: int, name: str, title: str, curve: Curve) -> PanelLine:
    points, said, band = [], [], []
    for epoch, mean in enumerate(curve.mean, 1):
        values = [line[epoch - 1] for line in curve.folds if len(line) >= epoch]
        known = [value for value in values if math.isfinite(value)] or [math.nan]
        low, high = min(known), max(known)
        points.append((float(epoch), mean))
        band.append((low, high))
        between = f", folds {number(low)} to {number(high)}" if low < high else ""
        said.append(f"{name}, epoch {epoch}: {title} {number(mean)}{between}")
    return PanelLine(place, points, said, band)


# Loss over time


def loss_over_time(summary: Summary) -> Markup | None:
    """Draw the training loss over seconds, packed and in the serial loop."""
    disturbed = bool(summary.speedup and summary.speedup.disturbance)
    places = {row.name: place for place, row in enumerate(summary.candidates)}
    pairs = [pair for pair in summary.loss_over_time if pair.serial and pair.packed]
    pairs = sorted(pairs, key=lambda pair: places[pair.candidate])[: len(svg.COLOURS)]
    lines = []
    for pair in pairs:
        both = [("packed", pair.packed), ("serial", () if disturbed else pair.serial)]
        for kind, points in both:
            said = [
                f"{pair.candidate}, {kind}: training loss {number(loss)} after {duration(seconds)}"
                for seconds, loss in points
            ]
            if points:
                place = places[pair.candidate]
                lines.append(PanelLine(place, points, said, dashed=kind == "serial"))
    if not lines:
        return None
    divisor, unit = time_unit(max(line.points[-1][0] for line in lines))
    lines = [
        PanelLine(
            line.place,
            [(at / divisor, loss) for at, loss in line.points],
            line.said,
            (),
            line.dashed,
        )
        for line in lines
    ]
    x = svg.Scale.over([0.0, *(at for line in lines for at, _ in line.points)])
    y = _axis([loss for line in lines for _, loss in line.points])
    title = "mean training loss; solid: packed" + ("" if disturbed else "; dashed: serial loop")
    drawn = panel(title, lines, x, y, f"{unit} that all folds of a candidate took")
    named = {pair.candidate: places[pair.candidate] for pair in pairs}
    return Markup().join([panels(drawn), svg.legend(named)])


# CPU use


def cpu(summary: Summary) -> Markup | None:
    """Draw the cores in use over time, of the serial loop and of the packed run."""
    if not summary.use:
        return None
    divisor, unit = time_unit(max(use.seconds[-1] for use in summary.use))
    x = svg.Scale.over([0.0, *(at / divisor for use in summary.use for at in use.seconds)])
    return panels(*(_phase(use, x, divisor, unit) for use in summary.use))


def _phase(use: CpuUse, x: svg.Scale, divisor: float, unit: str) -> Markup:
    moments = [at / divisor for at in use.seconds]
    own = PanelLine(
        0,
        list(zip(moments, use.own, strict=True)),
        [f"after {duration(at)}: {cpu_use(a, b, use.cores)}" for at, a, b in _use_points(use)],
        [(0.0, value) for value in use.own],
    )
    everyone = PanelLine(1, list(zip(moments, use.used, strict=True)), dashed=True)
    mean = use.mean_own if math.isfinite(use.mean_own) else 0.0
    title = f"{use.phase}: {cpu_use(mean, use.mean_used, use.cores)}"
    y = svg.Scale.over([0.0, float(use.cores), *use.used])
    return panel(title, [own, everyone], x, y, f"{unit} since the phase began")


def gpus(summary: Summary) -> Markup | None:
    """Draw how busy each GPU was over time."""
    if not summary.gpu_use:
        return None
    divisor, unit = time_unit(max(use.seconds[-1] for use in summary.gpu_use))
    x = svg.Scale.over([0.0, *(at / divisor for use in summary.gpu_use for at in use.seconds)])
    drawn = []
    for use in summary.gpu_use:
        points = [(at / divisor, share) for at, share in zip(use.seconds, use.used, strict=True)]
        said = [
            f"after {duration(at)}: GPU {use.index} busy {percent(share)} of the time"
            for at, share in zip(use.seconds, use.used, strict=True)
        ]
        line = PanelLine(0, points, said, [(0.0, share) for share in use.used])
        title = f"GPU {use.index}: busy {percent(use.mean)} of the time"
        drawn.append(panel(title, [line], x, svg.Scale(0.0, 1.0), f"{unit} since the sweep began"))
    return panels(*drawn)


def _use_points(use: CpuUse) -> Iterator[tuple[float, float, float]]:
    return zip(use.seconds, use.own, use.used, strict=True)
