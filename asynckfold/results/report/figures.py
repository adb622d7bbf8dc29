"""The figures of a report as plain data, which the page and matplotlib draw alike.

::

    Summary ─► panels of lines, bars of seconds, ─┬─► inline   SVG of the page
               rows of the timeline               └─► charts   PNG files and `CVResults.plot`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from asynckfold.results.report import sentences as say
from asynckfold.results.report.attempts import Bar, CpuUse, GpuUse
from asynckfold.results.report.candidate_rows import CandidateRow, Curve, LossOverTime
from asynckfold.results.report.predictions import Points
from asynckfold.results.report.sentences import number, percent
from asynckfold.results.report.summary import Summary
from asynckfold.results.report.svg import COLOURS, Scale
from asynckfold.system.units import duration, named_node

CANDIDATES, MODELS = 24, 16
"""Candidates in a panel of curves, and models with separate bars."""
HEIGHT = 150
MEASURES = {"valid_loss": "valid loss", "accuracy": "accuracy", "train_loss": "train loss"}
WHOLE = "whole sweep"
EDGE = ((0.0, 0.0), (1.0, 1.0))
UNIT = Scale(0.0, 1.0)


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    name: str  # of its candidate; empty without one
    place: int  # of its candidate in the ranking, which gives the colour
    points: Points
    said: Sequence[str] = ()  # tooltip of each point
    band: Points = ()  # lowest and highest value at each point
    dashed: bool = False
    joined: bool = True  # whether a line joins the points


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes."""

    title: str
    lines: Sequence[Line]
    x: Scale
    y: Scale
    under: str  # label of the x axis
    height: int = HEIGHT  # pixels


def axis_of(values: Sequence[float]) -> Scale:
    """Return the axis of losses: logarithmic if they span a wide range."""
    known = [value for value in values if math.isfinite(value)]
    log = bool(known) and min(known) > 0 and max(known) > 20 * min(known)
    return Scale.over(known, log=log)


def places_of(summary: Summary) -> dict[str, int]:
    """Return the place of each candidate in the ranking."""
    return {row.name: place for place, row in enumerate(summary.candidates)}


# Learning curves


def curves(summary: Summary) -> list[Panel]:
    """Return losses, accuracy and learning rate over the epochs: mean over the folds, and range."""
    places = places_of(summary)
    rows = [(places[row.name], row) for row in summary.candidates if row.curves][:CANDIDATES]
    panels = [
        _measure(title, measure, rows)
        for measure, title in MEASURES.items()
        if any(curve_of(row, measure) for _, row in rows)
    ]
    return [*panels, _measure("learning rate", "lr", rows, 60)] if panels else []


def overlaid(
    runs: tuple[Summary, Summary], names: tuple[str, str], candidates: Sequence[str]
) -> list[Panel]:
    """Return the curves of some candidates of two runs, the first one's dashed.

    A colour is a candidate, or a run if there is only one candidate.
    """
    both: dict[str, list[Panel]] = {}
    for number_of_run, (run, name) in enumerate(zip(runs, names, strict=True)):
        rows = [row for row in run.candidates if row.curves and row.name in candidates]
        for panel in curves(replace(run, candidates=tuple(rows))):
            lines = []
            for line in panel.lines:
                label, place = line.name, candidates.index(line.name)
                if len(candidates) == 1:
                    label, place = name, number_of_run
                said = [f"{name}: {text}" for text in line.said]
                drawn = replace(line, name=label, place=place, said=said)
                lines.append(replace(drawn, dashed=number_of_run == 0))
            both.setdefault(panel.title, []).append(replace(panel, lines=lines))
    return list(map(_joined, both.values()))


def _joined(panels: Sequence[Panel]) -> Panel:
    """Return the lines of panels over axes that hold all of them."""
    x, y = (
        Scale.over([end for scale in axis for end in (scale.low, scale.high)], whole=axis[0].whole)
        for axis in ([panel.x for panel in panels], [panel.y for panel in panels])
    )
    log = any(panel.y.log for panel in panels) and y.low > 0
    lines = [line for panel in panels for line in panel.lines]
    return replace(panels[0], lines=lines, x=x, y=replace(y, log=log))


def curve_of(row: CandidateRow, measure: str) -> Curve | None:
    """Return a measure of a candidate over its epochs."""
    return next((curve for curve in row.curves if curve.measure == measure), None)


def _measure(
    title: str, measure: str, rows: Sequence[tuple[int, CandidateRow]], height: int = HEIGHT
) -> Panel:
    known = [(place, row, curve) for place, row in rows if (curve := curve_of(row, measure))]
    # One diverged candidate must not flatten all the others.
    complete = [curve for _, row, curve in known if row.complete] or [item[2] for item in known]
    longest = max((len(curve.mean) for _, _, curve in known), default=1)
    return Panel(
        title,
        [_epoch_line(place, row.name, title, curve) for place, row, curve in known],
        Scale.over(range(1, longest + 1), whole=True),
        axis_of([value for curve in complete for line in curve.folds for value in line]),
        "epoch",
        height,
    )


def _epoch_line(place: int, name: str, title: str, curve: Curve) -> Line:
    points, said, band = [], [], []
    for epoch, mean in enumerate(curve.mean, 1):
        values = [line[epoch - 1] for line in curve.folds if len(line) >= epoch]
        known = [value for value in values if math.isfinite(value)] or [math.nan]
        low, high = min(known), max(known)
        points.append((float(epoch), mean))
        band.append((low, high))
        between = f", folds {number(low)} to {number(high)}" if low < high else ""
        said.append(f"{name}, epoch {epoch}: {title} {number(mean)}{between}")
    return Line(name, place, tuple(points), said, tuple(band))


# Over time


def comparable_losses(summary: Summary) -> list[LossOverTime]:
    """Return the candidates that both trained, best first; a disturbed serial loop is left out."""
    disturbed = bool(summary.speedup and summary.speedup.disturbance)
    places = places_of(summary)
    pairs = [pair for pair in summary.loss_over_time if pair.serial and pair.packed]
    pairs = sorted(pairs, key=lambda pair: places[pair.candidate])[: len(COLOURS)]
    return [replace(pair, serial=()) if disturbed else pair for pair in pairs]


def loss_over_time(pairs: Sequence[LossOverTime], places: Mapping[str, int]) -> Panel | None:
    """Return the training loss over seconds, packed and in the serial loop."""
    drawn = [
        (pair.candidate, kind, points)
        for pair in pairs
        for kind, points in (("packed", pair.packed), ("serial", pair.serial))
        if points
    ]
    if not drawn:
        return None
    divisor, unit = say.time_unit(max(points[-1][0] for _, _, points in drawn))
    lines = [
        Line(
            name,
            places[name],
            tuple((seconds / divisor, loss) for seconds, loss in points),
            [
                f"{name}, {kind}: training loss {number(loss)} after {duration(seconds)}"
                for seconds, loss in points
            ],
            dashed=kind == "serial",
        )
        for name, kind, points in drawn
    ]
    return Panel(
        "mean training loss; solid: packed"
        + ("; dashed: serial loop" if any(line.dashed for line in lines) else ""),
        lines,
        Scale.over([0.0, *(at for line in lines for at, _ in line.points)]),
        axis_of([loss for line in lines for _, loss in line.points]),
        f"{unit} that all folds of a candidate took",
    )


def over_time(uses: Sequence[CpuUse | GpuUse]) -> list[Panel]:
    """Return the cores in use in each phase, or how busy each GPU was, over time."""
    longest = max((use.seconds[-1] for use in uses), default=0.0)
    divisor, unit = say.time_unit(longest)
    x, panels = Scale.over([0.0, longest / divisor]), []
    for use in uses:
        moments = [at / divisor for at in use.seconds]
        if isinstance(use, GpuUse):
            title, values, y = (
                f"GPU {use.index}: busy {percent(use.mean)} of the time",
                use.used,
                UNIT,
            )
            said = [f"GPU {use.index} busy {percent(share)} of the time" for share in values]
            others, begun = [], "the sweep"
        else:
            title = f"{use.phase}: {say.cpu_use(use.mean_own, use.mean_used, use.cores)}"
            values, y = use.own, Scale.over([0.0, float(use.cores), *use.used])
            pairs = zip(use.own, use.used, strict=True)
            said = [say.cpu_use(by_run, used, use.cores) for by_run, used in pairs]
            others = [Line("", 1, tuple(zip(moments, use.used, strict=True)), dashed=True)]
            begun = "the phase"
        tips = [f"after {duration(at)}: {text}" for at, text in zip(use.seconds, said, strict=True)]
        points, band = zip(moments, values, strict=True), tuple((0.0, value) for value in values)
        lines = [Line("", 0, tuple(points), tips, band), *others]
        panels.append(Panel(title, lines, x, y, f"{unit} since {begun} began"))
    return panels


# How sure the candidates are


def probabilities(summary: Summary) -> Iterator[Panel]:
    """Yield ROC and precision-recall curves of two classes, and the calibration of the first."""
    places = places_of(summary)

    def panel(title: str, lines: list[Line], under: str, edge: Points) -> Panel:
        lines.append(Line("", len(COLOURS), edge, dashed=True))
        return Panel(title, lines, UNIT, UNIT, under, 240)

    two = summary.two_classes
    if two is not None:
        roc, precision = [], []
        for curves in two.curves:
            name, place = curves.candidate, places[curves.candidate]
            said = [
                f"{name}: finds {percent(up)} of {two.positive}, with {percent(across)} of the "
                f"others; area {curves.roc_area:.4f}"
                for across, up in curves.roc
            ]
            roc.append(Line(name, place, curves.roc, said))
            said = [
                f"{name}: precision {percent(up)} at recall {percent(across)}; average "
                f"{curves.average_precision:.4f}"
                for across, up in curves.precision_recall
            ]
            precision.append(Line(name, place, curves.precision_recall, said))
        yield panel("ROC: true positive rate", roc, "false positive rate", EDGE)
        yield panel("Precision", precision, "recall", ((0.0, two.share), (1.0, two.share)))
    sure = summary.calibration
    if sure is not None:
        points = tuple(zip(sure.confidence, sure.accuracy, strict=True))
        said = [
            f"{sure.candidate}: {percent(up)} of {say.plural(count, 'prediction')} right, made "
            f"with a mean probability of {percent(across)}"
            for (across, up), count in zip(points, sure.counts, strict=True)
        ]
        lines = [Line(sure.candidate, places[sure.candidate], points, said)]
        title, under = "Reliability: share that is right", "probability of the predicted class"
        yield panel(title, lines, under, EDGE)


# Predicted against true numbers


def predicted_numbers(summary: Summary) -> Panel | None:
    """Return held-out samples of the best candidate; on the dashed line they are equal."""
    predictions = summary.predictions
    if predictions is None:
        return None
    points = tuple(zip(predictions.true, predictions.predicted, strict=True))
    said = [f"true {number(true)}, predicted {number(guess)}" for true, guess in points]
    scale = Scale.over([*predictions.true, *predictions.predicted])
    equal = ((scale.low, scale.low), (scale.high, scale.high))
    error = math.hypot(*(true - guess for true, guess in points)) / math.sqrt(len(points))
    return Panel(
        f"{predictions.candidate}: predicted numbers, root mean squared error {number(error)}",
        [Line("", 0, points, said, joined=False), Line("", len(COLOURS), equal, dashed=True)],
        scale,
        scale,
        "true",
        320,
    )


# Parameters of a grid


@dataclass(frozen=True)
class Axis:
    """One axis of parallel coordinates: its values, and their heights from 0 to 1."""

    title: str
    ticks: Sequence[tuple[str, float]]


def parallel(summary: Summary) -> tuple[list[Axis], list[Line]]:
    """Return an axis for each parameter and the score, and a line for each ranked candidate."""
    grid, metric, rows = summary.grid, summary.metric, summary.ranked
    if grid is None or summary.effects is None:
        return [], []
    axes, heights = [], []
    for item in grid.parameters:
        step = 1 / (len(item.values) - 1)
        heights.append({value: place * step for place, value in enumerate(item.values)})
        few = item.values if len(item.values) <= 8 else (item.values[0], item.values[-1])
        axes.append(Axis(item.title, [(value, heights[-1][value]) for value in few]))
    scale = Scale.over(row.mean[metric] for row in rows)
    axes.append(Axis(metric, [(number(value), scale(value)) for value in (scale.low, scale.high)]))
    lines = []
    for place, row in enumerate(rows):
        values = [height[value] for height, value in zip(heights, grid.values(row), strict=True)]
        points = tuple((float(at), y) for at, y in enumerate([*values, scale(row.mean[metric])]))
        said = [f"{row.name}: {metric} {number(row.mean[metric])}"] * len(points)
        lines.append(Line(row.name, place, points, said))
    return axes, lines


# Against the serial loop


@dataclass(frozen=True)
class SecondsBar:
    """Seconds of a model or of the whole sweep."""

    kind: str  # "serial", "packed" or "ideal"
    seconds: float
    words: str
    dashed: bool = False  # whether they were not measured


def seconds_bars(
    models: Mapping[str, tuple[float, float]],
    whole: tuple[float, float],
    kind: str = "measured",
    ideal: float | None = None,
) -> dict[str, list[SecondsBar]]:
    """Return bars of the first models and of the whole sweep, which a single model is.

    `models` and `whole` are serial and packed seconds; `kind` is that of the serial ones.
    """
    rows = dict(list(models.items())[:MODELS])
    rows |= {WHOLE: whole} if len(models) != 1 else {}
    return {name: list(_bars(*pair, kind, ideal)) for name, pair in rows.items()}


def _bars(serial: float, packed: float, kind: str, ideal: float | None) -> Iterator[SecondsBar]:
    is_measured = kind == "measured"
    about = "" if is_measured else "about "
    words = f"{about}{duration(serial)} serial ({kind})"
    yield SecondsBar("serial", serial, words, not is_measured)
    ratio = f", {serial / packed:.2f}× as fast" if is_measured else ""
    yield SecondsBar("packed", packed, f"{duration(packed)} packed{ratio}")
    if ideal is not None:
        least = serial / ideal
        words = f"{duration(least)} ideal: one job per core, {ideal:g}× as fast"
        yield SecondsBar("ideal", least, words, True)


def speedup_bars(summary: Summary) -> dict[str, list[SecondsBar]]:
    """Return the seconds of each model and of the whole sweep; empty if they are not known."""
    speedup = summary.speedup
    if speedup is None or speedup.why_not:
        return {}
    is_measured = speedup.ratio is not None
    pairs: dict[str, tuple[float, float]] = {}
    for row in summary.candidates:
        serial = row.serial_seconds if is_measured else row.estimated_serial_seconds
        known = [0.0 if math.isnan(it) else it for it in (serial, row.packed_seconds)]
        before = pairs.get(row.model, (0.0, 0.0))
        pairs[row.model] = before[0] + known[0], before[1] + known[1]
    models = {name: pair for name, pair in pairs.items() if min(pair) > 0}
    serial_seconds = speedup.serial_seconds if is_measured else speedup.estimated_serial_seconds
    whole = serial_seconds or 0.0, speedup.packed_seconds
    return seconds_bars(models, whole, speedup.kind, say.ideal(summary) if is_measured else None)


# The timeline


@dataclass(frozen=True)
class Span:
    """An attempt at a job, or those at the jobs of a fusion group, in units of the timeline."""

    start: float
    end: float
    place: int  # of its candidate in the ranking
    ended_well: bool
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Timeline:
    """Which job ran on which GPU or core when."""

    title: str
    under: str  # label of the x axis
    length: float
    lanes: Sequence[tuple[str, Sequence[Span]]]


def timeline(summary: Summary) -> Timeline | None:
    """Return a row for each GPU and core; None if no job was started."""
    bars, packing = summary.bars, summary.packing
    if not bars:
        return None
    first, last = min(bar.start for bar in bars), max(bar.end for bar in bars)
    divisor, unit = say.time_unit(last - first)
    places = places_of(summary)

    def span(group: list[Bar]) -> Span:
        start, end = ((at - first) / divisor for at in (group[0].start, group[-1].end))
        place, well = places[group[0].candidate], all(bar.ended_well for bar in group)
        return Span(start, end, place, well, group)

    title = f"{say.plural(len({bar.job for bar in bars}), 'job')} in {duration(last - first)}"
    if packing is not None and packing.cores is not None and packing.held is not None:
        title = (
            f"{say.plural(len({bar.job for bar in bars}), 'job')} on "
            f"{say.plural(packing.cores, 'core')} in {duration(packing.makespan)}; "
            f"jobs held {percent(packing.held)} of the core time"
        )
    return Timeline(
        title,
        f"{unit} since the first job began",
        max((last - first) / divisor, 1e-3),
        [(label, list(map(span, _together(lane)))) for label, lane in _lanes(bars)],
    )


def _together(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Group the jobs that began and ended at the same time: those of a fusion group."""
    groups: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        last = groups[-1][-1] if groups else None
        slack = 0.05 * (bar.end - bar.start)
        if last and abs(bar.start - last.start) <= slack and abs(bar.end - last.end) <= slack:
            groups[-1].append(bar)
        else:
            groups.append([bar])
    return groups


def facts_of(group: Sequence[Bar], metric: str) -> str:
    """Return the facts of a bar, a line each."""
    first = group[0]
    lines = [
        bar.job + (f": {metric} {say.number(bar.score)}" if math.isfinite(bar.score) else "")
        for bar in group[:5]
    ]
    lines += [f"and {len(group) - 5} more"] * (len(group) > 5)
    outcomes = ", ".join(dict.fromkeys(bar.outcome for bar in group))
    spent = duration(first.end - first.start)
    lines += [f"{spent} on {say.ran_on(first)}; {outcomes}, attempt {first.attempt}"]
    lines += [
        f"predicted {duration(first.expected)}; peak memory "
        f"{say.gibibytes(first.peak_memory)}, reserved {say.gibibytes(first.memory)}"
    ]
    lines += [f"waited {wait}" for wait in first.waits]
    return "\n".join([*lines, *([first.error[:200]] if first.error else [])])


def _lanes(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by GPU and by core; unpinned ones go to the first free row of their node."""
    lanes: dict[tuple[int, str, int], list[Bar]] = {}
    for bar in bars:
        if bar.device != "cpu":
            number = int(bar.device.partition(":")[2] or 0)
            lanes.setdefault((0, bar.node, number), []).append(bar)
        for piece in _pieces(bar):
            for core in piece.cores:
                lanes.setdefault((1, bar.node, core), []).append(piece)
        if not bar.cores:
            rows = (lanes.setdefault((2, bar.node, at), []) for at in count(1))
            next(row for row in rows if not row or row[-1].end <= bar.start).append(bar)
    is_cluster = len({bar.node for bar in bars}) > 1
    labelled = []
    for kind, node, number in sorted(lanes):
        label = f"{('GPU', 'core', 'unpinned')[kind]} {number}"
        where = f"{named_node(node)}, " if is_cluster else ""
        labelled.append((f"{where}{label}", lanes[kind, node, number]))
    return labelled


def _pieces(bar: Bar) -> list[Bar]:
    """Split an attempt at changes of its cores."""
    if not bar.changes:
        return [bar]
    starts = [(bar.start, bar.cores), *bar.changes]
    ends = [*(at for at, _ in bar.changes), bar.end]
    return [
        replace(bar, start=start, end=end, cores=cores, changes=())
        for (start, cores), end in zip(starts, ends, strict=True)
    ]
