"""Every figure of a report by its name, drawn by matplotlib."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asynckfold.results.report import figures
from asynckfold.results.report import sentences as say
from asynckfold.results.report.attempts import CpuUse
from asynckfold.results.report.candidate_rows import CandidateRow, LossOverTime
from asynckfold.results.report.charts import style
from asynckfold.results.report.charts.classes import draw_classes, draw_confusion
from asynckfold.results.report.figures import Panel, SecondsBar
from asynckfold.results.report.sentences import number
from asynckfold.results.report.summary import Summary
from asynckfold.results.report.svg import COLOURS, OTHERS
from asynckfold.system.units import duration

SERIAL, PACKED = "#8d95a1", COLOURS[0]
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
    places = figures.places_of(summary)
    by_look: dict[tuple[str, bool], list[int]] = {}
    for place, row in enumerate(shown):
        by_look.setdefault((style.colour(places[row.name]), row.complete), []).append(place)
    for (colour, is_complete), kept in by_look.items():
        alike = [shown[place] for place in kept]
        scores = np.array([row.scores[metric] for row in alike])
        spread = np.linspace(-0.16, 0.16, scores.shape[1]) if scores.shape[1] > 1 else np.zeros(1)
        heights = np.add.outer(kept, spread)
        axes.scatter(scores, heights, s=20, color=colour, alpha=0.55, linewidths=0)
        # A gap after each interval.
        ends = np.array([(row.ci_low, row.ci_high, math.nan) for row in alike]).ravel()
        axes.plot(ends, np.repeat(kept, 3), color=colour, linewidth=2.2, alpha=0.9)
        face, means = colour if is_complete else "white", [row.mean[metric] for row in alike]
        axes.plot(means, kept, "D", ms=6, color=colour, markerfacecolor=face)
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
    style.add_legend(place, places, lines=True)


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
        if line.joined:
            axes.plot(across, up, **look)
        else:
            axes.scatter(across, up, s=12, color=look["color"], alpha=0.5, linewidths=0)
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
    _draw_panels(ax[-1], ax, panels)
    return style.figure_of(ax[0])


def _curves_title(row: CandidateRow) -> str:
    curve = figures.curve_of(row, "valid_loss")
    losses = [value if math.isfinite(value) else math.inf for value in curve.mean] if curve else []
    if not losses or min(losses) == math.inf:
        return f"{row.name} has no finite validation loss on every fold"
    epoch = losses.index(min(losses)) + 1
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
    """Say where the packed run ends, and when it reached the final loss of the serial loop."""
    seconds, loss = (pair.packed or pair.serial)[-1]
    title = f"{pair.candidate} ends at a training loss of {number(loss)} after {duration(seconds)}"
    if pair.packed and pair.serial:
        end, goal = pair.serial[-1]
        title += f", the serial loop at {number(goal)} after {duration(end)}"
    return title


def draw_use(summary: Summary) -> Figure | None:
    """Draw the cores in use over time, of the serial loop and of the packed run."""
    return cpu_panels(summary.use) if summary.use else None


@style.applied
def cpu_panels(uses: Sequence[CpuUse]) -> Figure:
    """Draw the cores in use over time, serial above packed, on one time axis."""
    uses = sorted(uses, key=lambda use: use.phase, reverse=True)
    panels = figures.over_time(uses)
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
    panel, predictions = figures.predicted_numbers(summary), summary.predictions
    if panel is None or predictions is None:
        return None
    figure = _panel_figure([panel], panel.title, 4.2)
    drawn = f"{len(predictions.true)} of {predictions.total} held-out predictions"
    figure.axes[0].set(title="", ylabel="predicted")
    figure.axes[0].set_title(drawn, loc="left")
    return figure


# The timeline


@style.applied
def draw_timeline(summary: Summary, ax: Axes | None = None) -> Figure | None:
    """Draw which job ran on which core when."""
    timeline = figures.timeline(summary)
    if timeline is None:
        return None
    lanes = timeline.lanes
    place_of_legend, axes = style.panel(1.7 + 0.3 * min(len(lanes), 24), timeline.title, ax)
    palette = np.array([*map(to_rgba, (*COLOURS, OTHERS))])
    for place, (_, spans) in enumerate(lanes):
        looks: Any = {True: {}, False: {"hatch": "////", "alpha": 0.6}}
        for well, look in looks.items():
            kept = [span for span in spans if span.ended_well == well]
            axes.broken_barh(
                [(span.start, span.end - span.start) for span in kept],
                (place - 0.36, 0.72),
                facecolors=palette[[min(span.place, len(COLOURS)) for span in kept]],
                edgecolors="white",
                linewidth=0.7,
                **look,
            ).set_in_layout(False)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes])
    if len(lanes) > 48:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, timeline.length * 1.01)
    axes.set_xlabel(timeline.under)
    axes.tick_params(axis="y", length=0)
    style.grid(axes, "x")
    all_well = all(bar.ended_well for bar in summary.bars)
    axes.set_title("" if all_well else "hatched: ended without a score", loc="left")
    held = {bar.candidate for bar in summary.bars}
    names = {name: at for name, at in figures.places_of(summary).items() if name in held}
    style.add_legend(place_of_legend, names, lines=False)
    return style.figure_of(axes)


# Against the serial loop


def draw_speedup(summary: Summary) -> Figure | None:
    """Draw serial and packed seconds of each model, and its speedup if it was measured."""
    rows = figures.speedup_bars(summary)
    return seconds_figure(rows, say.speed(summary)) if rows else None


@style.applied
def seconds_figure(rows: Mapping[str, Sequence[SecondsBar]], title: str) -> Figure:
    """Draw the bars of each model, labelled with their seconds and the speedup."""
    figure = style.new_figure(1.0 + 0.26 * sum(map(len, rows.values())), title)
    axes = figure.subplots()
    longest = max(bar.seconds for bars in rows.values() for bar in bars)
    divisor, unit = say.time_unit(longest)
    for row, bars in enumerate(rows.values()):
        for place, bar in enumerate(bars):
            look: Any = {"color": PACKED if bar.kind == "packed" else SERIAL}
            if bar.dashed:
                look = {"facecolor": "white", "edgecolor": style.FAINT, "linestyle": "--"}
            where = row + 0.27 * (place - (len(bars) - 1) / 2)
            drawn = axes.barh(where, bar.seconds / divisor, height=0.24, **look)
            axes.bar_label(drawn, [bar.words], padding=4, fontsize=8)
    axes.set_yticks(range(len(rows)), [style.plotted(name, 24) for name in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 1.9 * longest / divisor)
    axes.set_xlabel(f"{unit} of wall time")
    axes.set_title("shorter is better", loc="left")
    axes.tick_params(axis="y", length=0)
    return figure


# Parameters of a grid


@style.applied
def draw_importance(summary: Summary, ax: Axes | None = None) -> Figure | None:
    """Draw how much of R² is lost without the values of each parameter."""
    importance = summary.effects.importance if summary.effects else {}
    if not importance:
        return None
    _, axes = style.panel(1.2 + 0.32 * len(importance), say.matters(summary), ax)
    bars = axes.barh(range(len(importance)), list(importance.values()), color=COLOURS[0])
    axes.bar_label(bars, [f"{loss:.2f}" for loss in importance.values()], padding=4, fontsize=8)
    axes.set_yticks(range(len(importance)), [style.plotted(name) for name in importance])
    axes.set_ylim(len(importance) - 0.4, -0.6)
    axes.set_xlabel("R² lost when the values are shuffled")
    axes.tick_params(axis="y", length=0)
    return style.figure_of(axes)


@style.applied
def draw_effects(summary: Summary) -> Figure | None:
    """Draw the mean and its interval over the candidates with each value."""
    if summary.effects is None:
        return None
    effects, metric = summary.effects.effects, summary.metric
    figure = style.new_figure(3.2, say.matters(summary) or "Effect of each value")
    panels = figure.subplots(1, len(effects), sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(panels, effects.items(), strict=True):
        for place, row in enumerate(rows):
            folds = row.scores[metric]
            axes.scatter([place] * len(folds), folds, s=14, color=COLOURS[0], alpha=0.4)
            axes.plot([place, place], [row.ci_low, row.ci_high], color=COLOURS[0], linewidth=2)
            axes.plot(place, row.mean[metric], "D", ms=6, color=COLOURS[0])
        names = [style.plotted(row.name, 16) for row in rows]
        is_long = sum(map(len, names)) > 24
        axes.set_xticks(range(len(rows)), names, rotation=90 if is_long else 0)
        axes.set_xlabel(style.plotted(title))
        style.grid(axes, "y")
    panels[0].set_ylabel(style.plotted(metric))
    return figure


@style.applied
def draw_heatmap(summary: Summary, ax: Axes | None = None) -> Figure | None:
    """Draw the mean for each pair of values of the two numeric parameters that matter most."""
    effects = summary.effects
    if effects is None or effects.pair is None:
        return None
    down, across = effects.pair
    title = f"Mean {summary.metric} by {down} and {across}"
    _, axes = style.panel(1.6 + 0.36 * len(effects.means), title, ax)
    table = np.array(effects.means)
    least, room = np.nanmin(table), np.ptp(table[np.isfinite(table)]) or 1.0
    image = axes.imshow(table, cmap="Blues", aspect="auto")
    style.figure_of(axes).colorbar(image, ax=axes, pad=0.02).outline.set_visible(False)
    for place, row in enumerate(effects.means):
        for column, value in enumerate(row):
            if math.isfinite(value):
                shade = "white" if (value - least) / room > 0.6 else style.INK
                look: Any = {"ha": "center", "va": "center", "color": shade, "fontsize": 8}
                axes.text(column, place, number(value), **look)
    axes.set_xticks(*_value_ticks(summary, across))
    axes.set_yticks(*_value_ticks(summary, down))
    axes.set(xlabel=style.plotted(across), ylabel=style.plotted(down))
    return style.figure_of(axes)


def _value_ticks(summary: Summary, title: str) -> tuple[range, list[str]]:
    rows = summary.effects.effects[title] if summary.effects else ()
    return range(len(rows)), [style.plotted(row.name, 16) for row in rows]


@style.applied
def draw_parallel(summary: Summary, ax: Axes | None = None) -> Figure | None:
    """Draw a line for each ranked candidate across the axes of its values and its mean."""
    dimensions, lines = figures.parallel(summary)
    if not lines:
        return None
    place, axes = style.panel(4.2, say.headline(summary), ax)
    for line in reversed(lines):
        is_first = line.place < len(COLOURS)
        look: Any = {"color": style.colour(line.place), "linewidth": 1.8 if is_first else 0.8}
        axes.plot(*zip(*line.points, strict=True), **look)
    for at, dimension in enumerate(dimensions):
        axes.axvline(at, color=style.GRID, zorder=0)
        for value, height in dimension.ticks:
            label = axes.text(at + 0.02, height, style.plotted(value, 16), fontsize=8)
            # On lines, too, it can be read.
            label.set_bbox({"facecolor": axes.get_facecolor(), "alpha": 0.8, "pad": 1, "lw": 0})
    axes.set_xticks(range(len(dimensions)), [style.plotted(each.title) for each in dimensions])
    axes.set_yticks([])
    style.add_legend(place, {line.name: line.place for line in lines}, lines=True)
    return style.figure_of(axes)


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
    "importance": draw_importance,
    "effects": draw_effects,
    "heatmap": draw_heatmap,
    "parallel": draw_parallel,
}
"""The figures, by name of file and of `CVResults.plot`; None without numbers to draw."""

ON_AXES: Mapping[str, Callable[..., Figure | None]] = {
    "scores": draw_scores,
    "curves": draw_curves,
    "confusion": draw_confusion,
    "timeline": draw_timeline,
    "importance": draw_importance,
    "heatmap": draw_heatmap,
    "parallel": draw_parallel,
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
    buffer, layout = io.BytesIO(), figure.get_layout_engine()
    matplotlib.rcParams["pdf.fonttype"] = 42
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if not axis.get_label_text():
            # To place a label takes the boxes of all ticks, even for an empty one.
            axis.set_label_coords(0, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        if layout is not None:
            # With an engine, `savefig` would draw all of it once more for the layout.
            layout.execute(figure)
            figure.set_layout_engine(None)
        figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()


def draw(summary: Summary, kind: str = "png") -> dict[str, bytes]:
    """Draw every figure that the run has numbers for, by the name of its file."""
    summary = summary.labelled()
    drawn = ((name, make(summary)) for name, make in FIGURES.items())
    return {
        f"{name}.{kind}": rendered(figure, kind) for name, figure in drawn if figure is not None
    }
