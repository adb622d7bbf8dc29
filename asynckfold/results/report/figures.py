"""The figures of a report as plain data, which the page and matplotlib draw alike.

::

    Summary ─► panels of lines, bars of seconds, ─┬─► inline   SVG of the page
               rows of the timeline               └─► charts   PNG files and `CVResults.plot`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from asynckfold.results.report import sentences as say
from asynckfold.results.report.attempts import Bar, CpuUse, GpuUse
from asynckfold.results.report.candidate_rows import CandidateRow, Curve, LossOverTime
from asynckfold.results.report.predictions import Points, Predictions
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
    lines = [
        Line(
            pair.candidate,
            places[pair.candidate],
            points,
            [
                f"{pair.candidate}, {kind}: training loss {number(loss)} after {duration(seconds)}"
                for seconds, loss in points
            ],
            dashed=kind == "serial",
        )
        for pair in pairs
        for kind, points in (("packed", pair.packed), ("serial", pair.serial))
        if points
    ]
    if not lines:
        return None
    divisor, unit = say.time_unit(max(line.points[-1][0] for line in lines))
    lines = [
        replace(line, points=tuple((at / divisor, loss) for at, loss in line.points))
        for line in lines
    ]
    return Panel(
        "mean training loss; solid: packed"
        + ("; dashed: serial loop" if any(line.dashed for line in lines) else ""),
        lines,
        Scale.over([0.0, *(at for line in lines for at, _ in line.points)]),
        axis_of([loss for line in lines for _, loss in line.points]),
        f"{unit} that all folds of a candidate took",
    )


def cpu_use(uses: Sequence[CpuUse]) -> list[Panel]:
    """Return the cores in use over time, of the serial loop and of the packed run."""
    if not uses:
        return []
    divisor, unit = say.time_unit(max(use.seconds[-1] for use in uses))
    x = Scale.over([0.0, *(at / divisor for use in uses for at in use.seconds)])
    return [_phase(use, x, divisor, unit) for use in uses]


def _phase(use: CpuUse, x: Scale, divisor: float, unit: str) -> Panel:
    moments = [at / divisor for at in use.seconds]
    said = [
        f"after {duration(at)}: {say.cpu_use(by_run, used, use.cores)}"
        for at, by_run, used in zip(use.seconds, use.own, use.used, strict=True)
    ]
    points = tuple(zip(moments, use.own, strict=True))
    return Panel(
        f"{use.phase}: {say.cpu_use(use.mean_own, use.mean_used, use.cores)}",
        [
            Line("", 0, points, said, tuple((0.0, value) for value in use.own)),
            Line("", 1, tuple(zip(moments, use.used, strict=True)), dashed=True),
        ],
        x,
        Scale.over([0.0, float(use.cores), *use.used]),
        f"{unit} since the phase began",
    )


def gpu_use(uses: Sequence[GpuUse]) -> list[Panel]:
    """Return how busy each GPU was over time."""
    if not uses:
        return []
    divisor, unit = say.time_unit(max(use.seconds[-1] for use in uses))
    x = Scale.over([0.0, *(at / divisor for use in uses for at in use.seconds)])
    panels = []
    for use in uses:
        points = tuple(
            (at / divisor, share) for at, share in zip(use.seconds, use.used, strict=True)
        )
        said = [
            f"after {duration(at)}: GPU {use.index} busy {percent(share)} of the time"
            for at, share in zip(use.seconds, use.used, strict=True)
        ]
        line = Line("", 0, points, said, tuple((0.0, share) for share in use.used))
        title = f"GPU {use.index}: busy {percent(use.mean)} of the time"
        panels.append(Panel(title, [line], x, UNIT, f"{unit} since the sweep began"))
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


def root_mean_squared_error(predictions: Predictions) -> float:
    """Return the error over the points."""
    pairs = zip(predictions.true, predictions.predicted, strict=True)
    return math.hypot(*(a - b for a, b in pairs)) / math.sqrt(len(predictions.true))


# Against the serial loop


@dataclass(frozen=True)
class SpeedupBars:
    """(serial, packed) seconds of the first `MODELS` models, and of the whole sweep."""

    rows: Mapping[str, tuple[float, float]]
    kind: str  # of the serial seconds, "measured" or "estimated"
    ideal: float | None = None  # speedup of one job on each core; None if not known
    models: int = 0  # those without bars included

    @classmethod
    def of(
        cls,
        models: Mapping[str, tuple[float, float]],
        whole: tuple[float, float],
        kind: str = "measured",
        ideal: float | None = None,
    ) -> SpeedupBars:
        """Return the bars of models; a single one is the whole sweep."""
        rows = dict(list(models.items())[:MODELS])
        return cls(rows if len(models) == 1 else {**rows, WHOLE: whole}, kind, ideal, len(models))

    @property
    def is_measured(self) -> bool:
        """Whether the serial loop was run in full."""
        return self.kind == "measured"


def speedup_bars(summary: Summary) -> SpeedupBars | None:
    """Return the seconds of each model and of the whole sweep; None if they are not known."""
    speedup = summary.speedup
    if speedup is None or speedup.why_not:
        return None
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
    ideal = say.ideal(summary) if speedup.kind == "measured" else None
    return SpeedupBars.of(models, whole, speedup.kind, ideal)


# The timeline


def together(bars: Sequence[Bar]) -> list[list[Bar]]:
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


def lanes_of(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by GPU, then by core."""
    return [*_gpu_lanes(bars), *_lanes(bars)]


def timeline_title(summary: Summary, longest: float) -> str:
    """Say how long the jobs took, and which share of the cores they held."""
    lanes = _lanes(summary.bars)
    jobs = len({bar.job for bar in summary.bars})
    rows, busy = len(lanes), math.fsum(_covered(bars) for _, bars in lanes)
    share = busy / (longest * rows) if longest else math.nan
    known = summary.packing
    if known is not None and known.cores is not None and known.held is not None:
        rows, longest, share = known.cores, known.makespan, known.held
    return (
        f"{say.plural(jobs, 'job')} on {say.plural(rows, 'core')} in "
        f"{duration(longest)}; jobs held {say.percent(share)} of the core time"
    )


def _covered(bars: Sequence[Bar]) -> float:
    """Return the seconds covered by bars; those of a fusion group overlap.

    >>> from dataclasses import replace
    >>> bar = Bar("a", "A", 1, (0,), "cpu", 1.0, 3.0, "ok", "", 2.0, None, None, ())
    >>> _covered([bar, bar, replace(bar, start=2.0, end=5.0), replace(bar, start=7.0, end=8.0)])
    5.0
    """
    total, end = 0.0, -math.inf
    for bar in sorted(bars, key=lambda bar: bar.start):
        total += max(0.0, bar.end - max(bar.start, end))
        end = max(end, bar.end)
    return total


def _lanes(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by node and core; unpinned ones go to the first free row of their node."""
    cores: dict[tuple[str, int], list[Bar]] = {}
    rows: dict[str, list[list[Bar]]] = {}
    for bar in bars:
        for piece in _pieces(bar):
            for core in piece.cores:
                cores.setdefault((bar.node, core), []).append(piece)
        if not bar.cores:
            there = rows.setdefault(bar.node, [])
            free = next((row for row in there if row[-1].end <= bar.start), None)
            if free is None:
                there.append(free := [])
            free.append(bar)
    is_cluster = len({node for node, _ in cores} | {*rows}) > 1
    lanes = [(node, f"core {core}", cores[node, core]) for node, core in sorted(cores)]
    for node in sorted(rows):
        lanes += [(node, f"unpinned {at}", row) for at, row in enumerate(rows[node], 1)]
    return [
        (f"{named_node(node)}, {label}" if is_cluster else label, row) for node, label, row in lanes
    ]


def _gpu_lanes(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by node and GPU."""
    lanes: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        if bar.device != "cpu":
            lanes.setdefault((bar.node, bar.device.partition(":")[2]), []).append(bar)
    is_cluster = len({bar.node for bar in bars}) > 1
    return [
        (
            f"{named_node(node)}, GPU {number}" if is_cluster else f"GPU {number}",
            lanes[node, number],
        )
        for node, number in sorted(lanes, key=lambda lane: (lane[0], len(lane[1]), lane[1]))
    ]


def _pieces(bar: Bar) -> list[Bar]:
    """Split an attempt at changes of its cores."""
    starts = [(bar.start, bar.cores), *bar.changes]
    ends = [*(at for at, _ in bar.changes), bar.end]
    return [
        replace(bar, start=start, end=end, cores=cores, changes=())
        for (start, cores), end in zip(starts, ends, strict=True)
    ]
