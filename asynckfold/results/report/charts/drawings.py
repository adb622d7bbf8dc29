"""Every figure of a report by its name, drawn by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from asynckfold.errors import InputError
from asynckfold.results.report import figures
from asynckfold.results.report import sentences as say
from asynckfold.results.report.attempts import Bar, CpuUse
from asynckfold.results.report.candidate_rows import CandidateRow, LossOverTime
from asynckfold.results.report.charts import style
from asynckfold.results.report.charts.classes import draw_classes, draw_confusion
from asynckfold.results.report.figures import Panel, SpeedupBars, lanes_of, timeline_title
from asynckfold.results.report.sentences import number
from asynckfold.results.report.summary import Summary
from asynckfold.results.report.svg import COLOURS
from asynckfold.results.verdict import listed
from asynckfold.system.units import duration

SERIAL, PACKED = "#8d95a1", COLOURS[0]
IDEAL: Any = {"facecolor": "white", "edgecolor": style.FAINT, "linestyle": "--"}
DASHED = (0, (4, 3))


# Scores


@style.applied
def draw_scores(summary: Summary, ax: Axes | None = None) -> Figure | None:
    """Draw one dot per fold, the mean and its interval, for each candidate."""
    metric = summary.metric
    rows = [row for row in summary.candidates if math.isfinite(row.mean[metric])]
    if not rows:
        return None
    shown = rows[: style.SHOWN]
    _, axes = style.panel(1.35 + 0.3 * len(shown), say.headline(summary), ax)
    colours = style.colours_of(row.name for row in summary.candidates)
    for place, row in enumerate(shown):
        colour, scores = colours[row.name], row.scores[metric]
        spread = np.linspace(-0.16, 0.16, len(scores)) if len(scores) > 1 else np.zeros(1)
        axes.scatter(scores, place + spread, s=20, color=colour, alpha=0.55, linewidths=0)
        axes.plot([row.ci_low, row.ci_high], [place, place], color=colour, linewidth=2.2, alpha=0.9)
        face = colour if row.complete else "white"
        axes.plot([row.mean[metric]], [place], "D", ms=6, color=colour, markerfacecolor=face)
    axes.set_yticks(range(len(shown)), [_rank_label(row) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(style.plotted(metric))
    style.grid(axes, "x")
    axes.tick_params(axis="y", length=0)
    hidden = f"; the first {len(shown)} of {len(rows)} candidates" * (len(rows) > len(shown))
    marks = say.forest_marks(summary).lower().rstrip(".")
    axes.set_title(f"{marks}{hidden}", loc="left")
    return style.figure_of(axes)


def _rank_label(row: CandidateRow) -> str:
    if row.complete:
        return f"{row.rank or '–'}. {style.plotted(row.name)}"
    return f"{style.plotted(row.name)} ({row.folds_done}/{row.folds})"


# Panels of lines


def _panel_figure(panels: Sequence[Panel], title: str, height_inches: float = 3.6) -> Figure:
    """Return a figure of panels side by side."""
    figure = style.new_figure(height_inches, title)
    _draw_panels(figure, figure.subplots(1, len(panels), squeeze=False)[0], panels)
    return figure


def _draw_panels(place: Figure | Axes, axes: Iterable[Axes], panels: Sequence[Panel]) -> None:
    for each, panel in zip(axes, panels, strict=True):
        _draw_panel(each, panel)
    places = {line.name: line.place for panel in panels for line in panel.lines if line.name}
    colours = {name: style.colour(place) for name, place in places.items()}
    style.name_candidates(place, colours, colours, lines=True)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for line in reversed(panel.lines):
        has_colour = line.place < len(COLOURS)
        look: Any = {"color": style.colour(line.place), "linewidth": 1.8 if has_colour else 0.9}
        across, up = zip(*line.points, strict=True)
        if line.band and has_colour:
            low, high = zip(*line.band, strict=True)
            axes.fill_between(across, low, high, color=look["color"], alpha=0.16, linewidth=0)
        marker = "o" if line.said and len(up) <= 12 else ""
        look |= {"linestyle": DASHED if line.dashed else "-", "marker": marker, "markersize": 3.5}
        axes.plot(across, up, **look)
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.under)
    if panel.x.whole:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    if panel.x.low == 0:
        axes.set_xlim(left=0)
    style.grid(axes, "y")
    least, most = panel.y.low, panel.y.high
    if panel.y.log:
        style.log_axis(axes, decades=math.log10(most / least))
        axes.set_ylim(least / 1.2, most * 1.2)
    else:
        room = 0.06 * (most - least)
        axes.set_ylim(least - room, most + room)


@style.applied
def draw_curves(summary: Summary, *ax: Axes) -> Figure | None:
    """Draw losses and accuracy over the epochs: mean over the folds, and range.

    On one of the caller's axes, the validation loss.
    """
    order = ("train loss", "valid loss", "accuracy")
    panels = sorted(figures.curves(summary)[:-1], key=lambda panel: order.index(panel.title))
    if not panels:
        return None
    title = _curves_title(next(row for row in summary.candidates if row.curves))
    if not ax:
        candidates = len({line.name for panel in panels for line in panel.lines})
        return _panel_figure(panels, title, 3.3 + 0.16 * min(candidates, 9))
    if len(ax) == 1:
        panels = [panel for panel in panels if panel.title == "valid loss"] or panels
    if len(ax) != len(panels):
        names = listed([panel.title for panel in panels])
        rule = f"curves needs one of ax, or {len(panels)} for {names}"
        raise InputError.one(rule, f"{len(ax)}", f"Pass plt.subplots(1, {len(panels)})[1].")
    _draw_panels(ax[-1], ax, panels)
    return style.figure_of(ax[0])


def _curves_title(row: CandidateRow) -> str:
    curve, train = (figures.curve_of(row, measure) for measure in ("valid_loss", "train_loss"))
    if curve is None and train is not None and math.isfinite(train.mean[-1]):
        return f"{row.name} reaches a training loss of {number(train.mean[-1])}; none is validated"
    losses = [value if math.isfinite(value) else math.inf for value in curve.mean] if curve else []
    if not losses or min(losses) == math.inf:
        return f"{row.name} has no finite validation loss on every fold"
    epoch = losses.index(min(losses)) + 1
    if len(losses) == 1:
        return f"{row.name} reaches a validation loss of {number(losses[0])} in one epoch"
    if epoch == len(losses):
        return f"{row.name}: validation loss is lowest at the last epoch, more may help"
    return f"{row.name}: validation loss is lowest at epoch {epoch} of {len(losses)}"


def draw_loss(summary: Summary) -> Figure | None:
    """Draw the training loss over time, packed and in the measured, undisturbed serial loop."""
    disturbance = "" if summary.speedup is None else summary.speedup.disturbance
    title = f"Times not compared: {disturbance}" if disturbance else ""
    return loss_lines(figures.comparable_losses(summary), figures.places_of(summary), title)


@style.applied
def loss_lines(
    pairs: Sequence[LossOverTime], places: Mapping[str, int], title: str = ""
) -> Figure | None:
    """Draw a solid line per candidate, packed, and a dashed one where the serial loop is known."""
    panel = figures.loss_over_time(pairs, places)
    return _panel_figure([panel], title or _loss_title(pairs[0]), 3.7) if panel else None


def _loss_title(pair: LossOverTime) -> str:
    """Say when the packed run reached the final loss of the serial loop."""
    name = style.plotted(pair.candidate)
    if not pair.packed or not pair.serial:
        seconds, loss = (pair.packed or pair.serial)[-1]
        return f"{name} ends at a training loss of {number(loss)} after {duration(seconds)}"
    end, goal = pair.serial[-1]
    reached = next((seconds for seconds, loss in pair.packed if loss <= goal), None)
    if reached is None:
        seconds, loss = pair.packed[-1]
        return (
            f"{name}: packed ends at a training loss of {number(loss)} in {duration(seconds)}, "
            f"the serial loop at {number(goal)} in {duration(end)}"
        )
    return (
        f"{name}: packed reaches the serial loop's final training loss in {duration(reached)} "
        f"instead of {duration(end)}"
    )


def draw_use(summary: Summary) -> Figure | None:
    """Draw the cores in use over time, of the serial loop and of the packed run."""
    return cpu_panels(summary.use) if summary.use else None


@style.applied
def cpu_panels(uses: Sequence[CpuUse]) -> Figure:
    """Draw the cores in use over time, serial above packed, on one time axis."""
    uses = sorted(uses, key=lambda use: use.phase, reverse=True)
    panels = figures.cpu_use(uses)
    title = f"CPU use, {panels[-1].title}".replace(", packed:", ":")
    figure = style.new_figure(0.7 + 1.8 * len(panels), title)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for each, panel, use in zip(axes, panels, uses, strict=True):
        _draw_panel(each, panel)
        each.axhline(use.cores, color=style.FAINT, linewidth=0.8, linestyle=":")
        each.set_ylim(bottom=0)
        each.set(ylabel="cores", xlabel="" if panel is not panels[-1] else panel.under)
        each.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
        known = "" if math.isnan(use.mean_own) else "; filled: this run, dashed: everyone"
        each.set_title(f"{panel.title}{known}", loc="left")
    return figure


@style.applied
def draw_probabilities(summary: Summary) -> Figure | None:
    """Draw the curves of two classes, and the calibration of the first candidate."""
    panels = list(figures.probabilities(summary))
    if not panels:
        return None
    figure = _panel_figure(panels, say.calibrated(summary) or say.areas(summary))
    for axes in figure.axes:
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    return figure


@style.applied
def draw_predictions(summary: Summary) -> Figure | None:
    """Draw held-out samples of the best candidate; on the dashed line they are equal."""
    predictions = summary.predictions
    if predictions is None:
        return None
    error = number(figures.root_mean_squared_error(predictions))
    figure = style.new_figure(4.2, f"{predictions.candidate}: root mean squared error {error}")
    axes = figure.subplots()
    ends = (
        min(*predictions.true, *predictions.predicted),
        max(*predictions.true, *predictions.predicted),
    )
    axes.plot(ends, ends, color=style.FAINT, linestyle=DASHED, linewidth=0.8)
    axes.scatter(
        predictions.true, predictions.predicted, s=12, color=COLOURS[0], alpha=0.5, linewidths=0
    )
    axes.set(xlabel="true", ylabel="predicted")
    axes.set_title(
        f"{len(predictions.true)} of {predictions.total} held-out predictions", loc="left"
    )
    style.grid(axes, "y")
    return figure


# The timeline


@style.applied
def draw_timeline(summary: Summary, ax: Axes | None = None) -> Figure | None:
    """Draw which job ran on which core when."""
    if not summary.bars:
        return None
    lanes = lanes_of(summary.bars)
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
    title = timeline_title(summary, longest)
    place_of_legend, axes = style.panel(1.7 + 0.3 * min(len(lanes), 24), title, ax)
    divisor, unit = say.time_unit(longest)
    colours = style.colours_of(row.name for row in summary.candidates)
    for place, (_, bars) in enumerate(lanes):
        for good in (True, False):
            kept = [bar for bar in bars if bar.ended_well == good]
            _draw_lane(axes, place, kept, colours, first, divisor, good=good)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes])
    if len(lanes) > 48:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(longest / divisor * 1.01, 1e-3))
    axes.set_xlabel(f"{unit} since the first job began")
    axes.tick_params(axis="y", length=0)
    style.grid(axes, "x")
    all_well = all(bar.ended_well for bar in summary.bars)
    axes.set_title("" if all_well else "hatched: ended without a score", loc="left")
    candidates = [bar.candidate for bar in summary.bars]
    style.name_candidates(place_of_legend, colours, candidates, lines=False)
    return style.figure_of(axes)


def _draw_lane(
    axes: Axes,
    place: int,
    bars: Sequence[Bar],
    colours: Mapping[str, str],
    first: float,
    unit: float,
    *,
    good: bool,
) -> None:
    axes.broken_barh(
        [((bar.start - first) / unit, (bar.end - bar.start) / unit) for bar in bars],
        (place - 0.36, 0.72),
        facecolors=[colours[bar.candidate] for bar in bars],
        edgecolors="white",
        linewidth=0.7,
        hatch=None if good else "////",
        alpha=1 if good else 0.6,
    ).set_in_layout(False)


# Against the serial loop


def draw_speedup(summary: Summary) -> Figure | None:
    """Draw serial and packed seconds of each model, and its speedup if it was measured."""
    bars = figures.speedup_bars(summary)
    return seconds_and_ratios(bars, say.speed(summary)) if bars else None


@style.applied
def seconds_and_ratios(bars: SpeedupBars, title: str) -> Figure:
    """Draw (serial, packed) seconds of each model; where they were measured, the speedup, too."""
    rows, kind = bars.rows, bars.kind
    figure = style.new_figure(1.5 + 0.5 * len(rows), title)
    panels = figure.subplots(1, 1 + bars.is_measured, squeeze=False, sharey=True)[0]
    hidden = bars.models > figures.MODELS
    few = f"; the first {figures.MODELS} of {bars.models} models" if hidden else ""
    _draw_seconds(panels[0], list(rows.values()), bars)
    panels[0].set_title(f"shorter is better{few}", loc="left")
    label = f"serial loop ({style.plotted(kind)})"
    handles: list[Line2D | Patch] = [
        Patch(facecolor=SERIAL, edgecolor="white", hatch=_hatch(bars), label=label),
        Patch(color=PACKED, label="packed, its share of the wall time"),
    ]
    if bars.is_measured:
        _draw_ratios(panels[1], list(rows.values()), bars.ideal)
        if bars.ideal is not None:
            handles.append(Patch(**IDEAL, label=f"ideal: one job per core, {bars.ideal:g}×"))
    panels[0].set_yticks(range(len(rows)), [style.plotted(name, 24) for name in rows])
    panels[0].set_ylim(len(rows) - 0.45, -0.55)
    for axes in panels:
        axes.tick_params(axis="y", length=0)
    style.add_legend(figure, handles)
    return figure


def _hatch(bars: SpeedupBars) -> str | None:
    return None if bars.is_measured else "////"


def _draw_seconds(axes: Axes, rows: Sequence[tuple[float, float]], seconds: SpeedupBars) -> None:
    longest = max(map(max, rows))
    divisor, unit = say.time_unit(longest)
    for which, colour in enumerate((SERIAL, PACKED)):
        places = [place + (0.19 if which else -0.19) for place in range(len(rows))]
        values = [pair[which] for pair in rows]
        bars = axes.barh(places, [it / divisor for it in values], height=0.34, color=colour)
        is_estimated = not which and not seconds.is_measured
        if is_estimated:
            for bar in bars:
                bar.set(hatch=_hatch(seconds), edgecolor="white")
        labels = [f"{'≈ ' * is_estimated}{duration(value)}" for value in values]
        axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_xlim(0, 1.3 * longest / divisor)
    axes.set_xlabel(f"{unit} of wall time")


def _draw_ratios(axes: Axes, rows: Sequence[tuple[float, float]], ideal: float | None) -> None:
    ratios = [serial / packed for serial, packed in rows]
    places = range(len(rows))
    above = [place - 0.19 if ideal is not None else place for place in places]
    bars = axes.barh(above, ratios, height=0.34, color=COLOURS[2])
    axes.bar_label(bars, [f"{ratio:.2f}×" for ratio in ratios], padding=4, fontsize=8)
    if ideal is not None:
        axes.barh([place + 0.19 for place in places], ideal, height=0.34, **IDEAL)
    axes.axvline(1, color=style.FAINT, linewidth=0.8, zorder=0)
    axes.set_xlim(0, 1.25 * max([*ratios, ideal or 1.0]))
    axes.set_xlabel("speedup")
    axes.set_title("serial / packed seconds; longer is better", loc="left")


# All of them

FIGURES: Mapping[str, Callable[[Summary], Figure | None]] = {
    "scores": draw_scores,
    "curves": draw_curves,
    "loss_vs_time": draw_loss,
    "class_accuracy": draw_classes,
    "confusion": draw_confusion,
    "probabilities": draw_probabilities,
    "predictions": draw_predictions,
    "cpu_usage": draw_use,
    "timeline": draw_timeline,
    "speedup": draw_speedup,
}
"""The figures, by name of file and of `CVResults.plot`; None without numbers to draw."""

ON_AXES: Mapping[str, Callable[..., Figure | None]] = {
    "scores": draw_scores,
    "curves": draw_curves,
    "confusion": draw_confusion,
    "timeline": draw_timeline,
}
"""Those that the caller's axes can take."""

# No dates, so that the same run gives the same bytes.
_METADATA: Mapping[str, Any] = {
    "png": None,
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@style.applied
def rendered(figure: Figure, kind: str = "png") -> bytes:
    """Return a figure as PNG, or as a vector: SVG, or PDF with embedded TrueType fonts."""
    buffer = io.BytesIO()
    matplotlib.rcParams["pdf.fonttype"] = 42
    figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()


def draw(summary: Summary, kind: str = "png") -> dict[str, bytes]:
    """Draw every figure that the run has numbers for, by the name of its file."""
    drawn = ((name, make(summary)) for name, make in FIGURES.items())
    return {
        f"{name}.{kind}": rendered(figure, kind) for name, figure in drawn if figure is not None
    }
