"""The packed run against the serial loop: seconds, speedup, and training loss over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from asynckfold.results.report import sentences
from asynckfold.results.report.candidate_rows import Line, LossOverTime
from asynckfold.results.report.charts import style
from asynckfold.results.report.inline import svg
from asynckfold.results.report.inline.speedup import MODELS, WHOLE, seconds_of
from asynckfold.results.report.sentences import duration, number
from asynckfold.results.report.summary import Summary

SERIAL, PACKED = "#8d95a1", svg.COLOURS[0]


@style.applied
def draw_speedup(summary: Summary) -> style.Drawing | None:
    """Draw serial and packed seconds of each model, and its speedup if it was measured."""
    found = seconds_of(summary)
    if found is None:
        return None
    models, whole, kind = found
    ideal = sentences.ideal(summary) if kind == "measured" else None
    return speedup_bars(models, whole, ideal, sentences.speed(summary), kind=kind)


@style.applied
def speedup_bars(
    models: Mapping[str, tuple[float, float]],
    whole: tuple[float, float],
    ideal: float | None,
    title: str,
    *,
    kind: str = "measured",
) -> style.Drawing:
    """Draw (serial, packed) seconds of each model; where they were measured, the speedup, too."""
    rows = dict(list(models.items())[:MODELS])
    rows = {**rows, WHOLE: whole} if len(models) != 1 else rows
    figure = style.new_figure(1.5 + 0.5 * len(rows), title)
    is_measured = kind == "measured"
    panels = figure.subplots(1, 1 + is_measured, squeeze=False, sharey=True)[0]
    few = f"; the first {MODELS} of {len(models)} models" if len(models) > MODELS else ""
    _draw_seconds(panels[0], list(rows.values()), kind)
    panels[0].set_title(f"shorter is better{few}", loc="left")
    handles: list[Line2D | Patch] = [
        _patch(f"serial loop ({style.plotted(kind)})", kind),
        Patch(color=PACKED, label="packed, its share of the wall time"),
    ]
    if is_measured:
        _draw_ratios(panels[1], list(rows.values()), ideal)
        if ideal is not None:
            look: Any = {"facecolor": "white", "edgecolor": style.FAINT, "linestyle": "--"}
            text = f"ideal: one job per core, {ideal:g}×"
            handles.append(Patch(**look, label=text))
    panels[0].set_yticks(range(len(rows)), [style.plotted(name, 24) for name in rows])
    panels[0].set_ylim(len(rows) - 0.45, -0.55)
    for axes in panels:
        axes.tick_params(axis="y", length=0)
    style.add_legend(figure, handles)
    alt = "; ".join(
        f"{name}: serial {duration(serial)} ({kind}), packed {duration(packed)}"
        + (f", {serial / packed:.2f} times as fast" if is_measured else "")
        for name, (serial, packed) in rows.items()
    )
    return style.Drawing(title, alt, figure)


def _patch(label: str, kind: str) -> Patch:
    hatch = None if kind == "measured" else "////"
    return Patch(facecolor=SERIAL, edgecolor="white", hatch=hatch, label=label)


def _draw_seconds(axes: Axes, rows: Sequence[tuple[float, float]], kind: str) -> None:
    longest = max(max(pair) for pair in rows)
    divisor, unit = sentences.time_unit(longest)
    for shift, which, colour in ((-0.19, 0, SERIAL), (0.19, 1, PACKED)):
        values = [pair[which] for pair in rows]
        places = [place + shift for place in range(len(rows))]
        bars = axes.barh(places, [it / divisor for it in values], height=0.34, color=colour)
        if which == 0 and kind != "measured":
            for bar in bars:
                bar.set(hatch="////", edgecolor="white")
        about = "≈ " * (which == 0 and kind != "measured")
        labels = [f"{about}{duration(value)}" for value in values]
        axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_xlim(0, 1.3 * longest / divisor)
    axes.set_xlabel(f"{unit} of wall time")


def _draw_ratios(axes: Axes, rows: Sequence[tuple[float, float]], ideal: float | None) -> None:
    ratios = [serial / packed for serial, packed in rows]
    places = range(len(rows))
    above = [place - 0.19 if ideal is not None else place for place in places]
    bars = axes.barh(above, ratios, height=0.34, color=svg.COLOURS[2])
    axes.bar_label(bars, [f"{ratio:.2f}×" for ratio in ratios], padding=4, fontsize=8)
    if ideal is not None:
        look: Any = {"facecolor": "white", "edgecolor": style.FAINT, "linestyle": "--"}
        axes.barh([place + 0.19 for place in places], ideal, height=0.34, **look)
    axes.axvline(1, color=style.FAINT, linewidth=0.8, zorder=0)
    axes.set_xlim(0, 1.25 * max([*ratios, ideal or 1.0]))
    axes.set_xlabel("speedup")
    axes.set_title("serial / packed seconds; longer is better", loc="left")


# Training loss over time


@style.applied
def draw_loss(summary: Summary) -> style.Drawing | None:
    """Draw the training loss over time, packed and in the measured, undisturbed serial loop."""
    both = [pair for pair in summary.loss_over_time if pair.serial and pair.packed]
    if not both:
        return None
    places = {row.name: place for place, row in enumerate(summary.candidates)}
    both.sort(key=lambda pair: places[pair.candidate])
    disturbance = "" if summary.speedup is None else summary.speedup.disturbance
    processes = summary.facts.params["processes"]
    title = f"Times not compared: {disturbance}" if disturbance else ""
    if disturbance:
        both = [replace(pair, serial=()) for pair in both]
    return loss_lines(both, places, title, processes=processes)


@style.applied
def loss_lines(
    pairs: Sequence[LossOverTime],
    names: Sequence[str] | Mapping[str, Any],
    title: str = "",
    *,
    processes: int = 1,
) -> style.Drawing:
    """Draw a solid line per candidate, packed, and a dashed one where the serial loop is known."""
    shown = pairs[: len(svg.COLOURS)]
    title = title or _loss_title(shown[0])
    figure = style.new_figure(3.7, title)
    axes = figure.subplots()
    colours = style.colours_of(names)
    lines = [line for pair in shown for line in (pair.packed, pair.serial) if line]
    divisor, unit = sentences.time_unit(max(line[-1][0] for line in lines))
    for pair in shown:
        for line, dashes in ((pair.serial, (0, (4, 3))), (pair.packed, "-")):
            if line:
                times, losses = zip(*line, strict=True)
                look = {"color": colours[pair.candidate], "linestyle": dashes, "linewidth": 1.8}
                style.draw_line(axes, [moment / divisor for moment in times], losses, **look)
    known = [loss for line in lines for _, loss in line if 0 < loss < math.inf]
    if known and max(known) > 20 * min(known):
        style.log_axis(axes, decades=math.log10(max(known) / min(known)))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} that all folds of a candidate took")
    style.grid(axes, "y")
    several = f", {processes} processes a job" if processes > 1 else ""
    dashed = "; dashed: the serial loop" if any(pair.serial for pair in shown) else ""
    few = f"; the first {len(shown)} of {len(pairs)} candidates" if len(pairs) > len(shown) else ""
    axes.set_title(f"mean train loss; solid: packed{several}{dashed}{few}", loc="left")
    style.name_candidates(figure, colours, [pair.candidate for pair in shown], lines=True)
    alt = "; ".join(_loss_alt(pair) for pair in shown)
    return style.Drawing(title, alt, figure)


def _loss_alt(pair: LossOverTime) -> str:
    ends = (
        f"{name} loss {number(line[-1][1])} after {duration(line[-1][0])}"
        for name, line in (("packed", pair.packed), ("serial", pair.serial))
        if line
    )
    return f"{pair.candidate}: {', '.join(ends)}"


def _loss_title(pair: LossOverTime) -> str:
    """Say when the packed run reached the final loss of the serial loop."""
    name = style.plotted(pair.candidate)
    if not pair.packed or not pair.serial:
        seconds, loss = (pair.packed or pair.serial)[-1]
        return f"{name} ends at a training loss of {number(loss)} after {duration(seconds)}"
    end, goal = pair.serial[-1]
    reached = _reached(pair.packed, goal)
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


def _reached(line: Line, goal: float) -> float | None:
    """Return the end of the first epoch whose loss is at most `goal`.

    >>> _reached(((1.0, 0.5), (2.0, 0.25)), 0.3), _reached(((1.0, 0.5),), 0.3)
    (2.0, None)
    """
    return next((seconds for seconds, loss in line if loss <= goal), None)
