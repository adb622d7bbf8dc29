"""Learning curves over epochs, and over time of several processes against one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asynckfold.results.report import sentences
from asynckfold.results.report.baseline_curves import Line, Race
from asynckfold.results.report.charts import style
from asynckfold.results.report.sentences import duration, number
from asynckfold.results.report.summary import CandidateRow, Curve, Summary

_MEASURES = {"train_loss": "train loss", "valid_loss": "valid loss", "accuracy": "accuracy"}


@style.applied
def draw_curves(summary: Summary) -> style.Chart | None:
    """Draw losses and accuracy over the epochs: mean over folds, with a thin line per fold."""
    rows = [row for row in summary.candidates if row.curves]
    measures = [
        name
        for name in _MEASURES
        if any(curve.measure == name for row in rows for curve in row.curves)
    ]
    if not measures:
        return None
    title = _curves_title(rows[0])
    figure = style.new_figure(3.3 + 0.16 * min(len(rows), 9), title)
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, measure in zip(panels, measures, strict=True):
        _draw_measure(axes, summary, rows, measure)
    style.name_candidates(figure, summary, [row.name for row in rows], lines=True)
    alt = f"Mean over folds per epoch for {sentences.plural(len(rows), 'candidate')}; thin: folds."
    return style.chart_of("curves", title, alt, figure)


def _curves_title(row: CandidateRow) -> str:
    curve = _curve(row, "valid_loss")
    losses = [value if math.isfinite(value) else math.inf for value in curve.mean] if curve else []
    if not losses or min(losses) == math.inf:
        return f"{row.name} has no finite validation loss on every fold"
    epoch = losses.index(min(losses)) + 1
    if len(losses) == 1:
        return f"{row.name} reaches a validation loss of {number(losses[0])} in one epoch"
    if epoch == len(losses):
        return f"{row.name}: validation loss is lowest at the last epoch, more may help"
    return f"{row.name}: validation loss is lowest at epoch {epoch} of {len(losses)}"


def _curve(row: CandidateRow, measure: str) -> Curve | None:
    return next((curve for curve in row.curves if curve.measure == measure), None)


def _draw_measure(axes: Axes, summary: Summary, rows: Sequence[CandidateRow], measure: str) -> None:
    colours = style.colours_of(summary)
    for row in reversed(rows):
        curve = _curve(row, measure)
        if curve is not None:
            _draw_curve(axes, curve, colours[row.name])
    axes.set_title(_MEASURES[measure], loc="left")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    _limit_to_complete(axes, rows, measure)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    if colour != style.OTHERS:
        for line in curve.folds:
            axes.plot(range(1, len(line) + 1), line, color=colour, linewidth=0.6, alpha=0.3)
    width = 1.8 if colour != style.OTHERS else 0.9
    _draw_mean(axes, range(1, len(curve.mean) + 1), curve.mean, color=colour, linewidth=width)


def _draw_mean(axes: Axes, places: Sequence[float], values: Sequence[float], **look: Any) -> None:
    axes.plot(places, values, marker="o" if len(values) <= 12 else "", markersize=3.5, **look)


def _limit_to_complete(axes: Axes, rows: Sequence[CandidateRow], measure: str) -> None:
    """Keep one diverged candidate from flattening all the others."""
    found = [_curve(row, measure) for row in rows if row.complete]
    lines = [line for curve in found if curve is not None for line in curve.folds]
    values = [value for line in lines for value in line if math.isfinite(value)]
    if not values:
        return
    low, high = min(values), max(values)
    if measure != "accuracy" and low > 0 and high > 20 * low:
        style.log_axis(axes, decades=math.log10(high / low))
        axes.set_ylim(low / 1.2, high * 1.2)
        return
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - margin, high + margin)


@style.applied
def draw_race(summary: Summary) -> style.Chart | None:
    """Draw the training loss over wall time, of several processes and of one."""
    if not summary.races:
        return None
    shown = summary.races[: len(style.COLOURS)]
    first = shown[0]
    disturbance = "" if summary.speedup is None else summary.speedup.disturbance
    title = f"Times not compared: {disturbance}" if disturbance else _race_title(first)
    figure = style.new_figure(3.6, title)
    axes = figure.subplots()
    colours = style.colours_of(summary)
    lines = [line for race in shown for line in (race.several, race.one)]
    divisor, unit = style.time_unit(max(line[-1][0] for line in lines))
    for race in shown:
        for line, dashes in ((race.one, (0, (4, 3))), (race.several, "-")):
            seconds, losses = zip(*line, strict=True)
            colour = colours[race.candidate]
            times = [moment / divisor for moment in seconds]
            _draw_mean(axes, times, losses, color=colour, linestyle=dashes, linewidth=1.8)
    known = [loss for line in lines for _, loss in line if loss > 0]
    if known and max(known) > 20 * min(known):
        style.log_axis(axes, decades=math.log10(max(known) / min(known)))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} of training")
    axes.grid(axis="y")
    threads = sentences.plural(first.threads, "thread")
    note = f"solid: {first.processes} processes; dashed: the serial loop, one process, {threads}"
    axes.set_title(f"train loss; {note}", loc="left")
    style.name_candidates(figure, summary, [race.candidate for race in shown], lines=True)
    alt = "; ".join(
        f"{race.candidate}: loss {number(race.several[-1][1])} after "
        f"{duration(race.several[-1][0])}, one process {number(race.one[-1][1])} "
        f"after {duration(race.one[-1][0])}"
        for race in shown
    )
    return style.chart_of("race", title, alt, figure)


def _race_title(race: Race) -> str:
    """Say when the processes reached the final loss of one process."""
    end, goal = race.one[-1]
    reached = _reached(race.several, goal)
    name = style.plotted(race.candidate)
    if reached is None:
        return (
            f"{name}: {race.processes} processes end at a training loss of "
            f"{number(race.several[-1][1])} in {duration(race.several[-1][0])}, "
            f"one at {number(goal)} in {duration(end)}"
        )
    return (
        f"{name}: {race.processes} processes reach the final training loss of one in "
        f"{duration(reached)} instead of {duration(end)}"
    )


def _reached(line: Line, goal: float) -> float | None:
    """Return the end of the first epoch whose loss is at most `goal`.

    >>> _reached(((1.0, 0.5), (2.0, 0.25)), 0.3), _reached(((1.0, 0.5),), 0.3)
    (2.0, None)
    """
    return next((seconds for seconds, loss in line if loss <= goal), None)
