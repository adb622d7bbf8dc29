"""The figure of several processes against one: training loss over wall-clock time."""

from __future__ import annotations

import math

import numpy as np

from asynckfold.results.report.baseline_curves import Line, Race
from asynckfold.results.report.charts.style import (
    COLOURS,
    Chart,
    chart_of,
    colours_of,
    log_axis,
    name_candidates,
    new_figure,
    plotted,
    styled,
    time_unit,
)
from asynckfold.results.report.sentences import duration, number, plural
from asynckfold.results.report.summary import Summary


@styled
def draw_race(summary: Summary) -> Chart | None:
    """Draw the training loss over wall-clock time, of several processes and of one."""
    if not summary.races:
        return None
    shown = summary.races[: len(COLOURS)]
    first = shown[0]
    disturbance = "" if summary.speedup is None else summary.speedup.disturbance
    title = f"Times not compared: {disturbance}" if disturbance else _race_title(first)
    figure = new_figure(3.6, title)
    axes = figure.subplots()
    colours = colours_of(summary)
    lines = [line for race in shown for line in (race.several, race.one)]
    divisor, unit = time_unit(max(line[-1][0] for line in lines))
    for race in shown:
        for line, style in ((race.one, (0, (4, 3))), (race.several, "-")):
            seconds, losses = zip(*line, strict=True)
            axes.plot(
                np.array(seconds) / divisor,
                losses,
                color=colours[race.candidate],
                linestyle=style,
                marker="o" if len(line) <= 12 else "",
                markersize=3.5,
                linewidth=1.8,
            )
    known = [loss for line in lines for _, loss in line if loss > 0]
    if known and max(known) > 20 * min(known):
        log_axis(axes, decades=math.log10(max(known) / min(known)))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} of training")
    axes.grid(axis="y")
    threads = plural(first.threads, "thread")
    note = f"solid: {first.processes} processes; dashed: the serial loop, one process, {threads}"
    axes.set_title(f"train loss; {note}", loc="left")
    name_candidates(figure, summary, [race.candidate for race in shown], lines=True)
    alt = "; ".join(
        f"{race.candidate}: loss {number(race.several[-1][1])} after "
        f"{duration(race.several[-1][0])}, one process {number(race.one[-1][1])} "
        f"after {duration(race.one[-1][0])}"
        for race in shown
    )
    return chart_of("race", title, alt, figure)


def _race_title(race: Race) -> str:
    """Tell when the processes had reached the loss at which one process ended."""
    end, goal = race.one[-1]
    reached = _reached(race.several, goal)
    name = plotted(race.candidate)
    if reached is None:
        return (
            f"{name}: {race.processes} processes end at a training loss of "
            f"{number(race.several[-1][1])} in {duration(race.several[-1][0])}, "
            f"one at {number(goal)} in {duration(end)}"
        )
    return (
        f"{name}: {race.processes} processes have one's final training loss in "
        f"{duration(reached)} instead of {duration(end)}"
    )


def _reached(line: Line, goal: float) -> float | None:
    """Return the end of the first epoch that is as good.

    Examples
    --------
    >>> _reached(((1.0, 0.5), (2.0, 0.25)), 0.3), _reached(((1.0, 0.5),), 0.3)
    (2.0, None)
    """
    return next((seconds for seconds, loss in line if loss <= goal), None)
