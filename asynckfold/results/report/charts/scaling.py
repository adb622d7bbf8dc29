"""Cores against seconds and against speedup: measured points beside the model fitted to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from asynckfold.results.report.charts import style
from asynckfold.results.report.inline import svg

_LOG_FROM = 6
"""Ratio of the greatest to the smallest value from which on both axes are logarithmic."""
_IDEAL: Any = {"color": style.FAINT, "linestyle": ":", "linewidth": 1.2}
_MODEL: Any = {"linestyle": "--", "linewidth": 1.1}


@dataclass(frozen=True)
class ScalingLine:
    """Seconds by cores: ``measured``, and by a model.

    ``modelled`` are the points beyond those measured, ``curve`` is the model over the whole range,
    and ``law`` is its formula; all are empty where no model was fitted.
    """

    name: str
    measured: Mapping[int, float]
    modelled: Mapping[int, float] = field(default_factory=dict)
    curve: Sequence[tuple[float, float]] = ()
    law: str = ""


@style.applied
def draw_scaling(
    subject: str, rows: Mapping[str, Sequence[ScalingLine]], one: float
) -> style.Drawing:
    """Draw two panels for each heading of `rows`: seconds and speedup.

    Speedup, and the ideal, are relative to ``one``, the seconds of one core.
    """
    lines = [line for group in rows.values() for line in group]
    title = _title(subject, lines, one)
    figure = style.new_figure(1.0 + 2.5 * len(rows), title)
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (heading, group), (left, right) in zip(rows.items(), panels, strict=True):
        _draw_panel(left, group, one, is_speedup=False)
        _draw_panel(right, group, one, is_speedup=True)
        no_model = "" if any(line.curve for line in group) else " (too few counts for a model)"
        left.set_title(f"{heading}: seconds{no_model}", loc="left")
        right.set_title("speedup", loc="left")
        left.legend(handles=_names(group), loc="lower left", fontsize=7)
    keys: list[Line2D] = [Line2D([], [], color=style.INK, marker="o", linewidth=0)]
    keys[0].set_label("measured")
    if any(line.curve for line in lines):
        look = {"color": style.INK, "marker": "o", "markerfacecolor": "white", **_MODEL}
        keys.append(Line2D([], [], label="fitted model; hollow: not measured", **look))
    keys.append(Line2D([], [], label="ideal: one core's seconds / cores", **_IDEAL))
    style.add_legend(figure, keys)
    return style.Drawing(title, "; ".join(map(_in_words, lines)), figure)


def _title(subject: str, lines: Sequence[ScalingLine], one: float) -> str:
    found = [(seconds, cores) for line in lines for cores, seconds in line.measured.items()]
    seconds, cores = min(found)
    if cores == 1:
        return f"{subject}: more cores were no faster than one"
    return f"{subject}: measured {one / seconds:.2f}× as fast on {cores} cores as on one"


def _in_words(line: ScalingLine) -> str:
    points = [f"{cores}: {seconds:.3g} s" for cores, seconds in line.measured.items()]
    points += [f"{cores}: {seconds:.3g} s (model)" for cores, seconds in line.modelled.items()]
    return f"{line.name}, by cores: {', '.join(points)}" + (
        f"; model {line.law}" if line.law else ""
    )


def _names(group: Sequence[ScalingLine]) -> list[Line2D]:
    return [
        Line2D([], [], color=colour, linewidth=2, label=style.plotted(line.name))
        for line, colour in zip(group, _colours(len(group)), strict=True)
    ]


def _colours(count: int) -> list[str]:
    return [*svg.COLOURS, *[svg.OTHERS] * count][:count]


def _draw_panel(axes: Axes, group: Sequence[ScalingLine], one: float, *, is_speedup: bool) -> None:
    def of(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
        places = [cores for cores, _ in points]
        return places, [one / seconds if is_speedup else seconds for _, seconds in points]

    points = [
        item for line in group for part in (line.measured, line.modelled) for item in part.items()
    ]
    most = max(cores for cores, _ in points)
    ideal = [(cores, one / cores) for cores in np.geomspace(1, most, 60).tolist()]
    axes.plot(*of(ideal), zorder=1, **_IDEAL)
    for line, colour in zip(group, _colours(len(group)), strict=True):
        axes.plot(*of(line.curve), color=colour, zorder=2, **_MODEL)
        solid: Any = {"linewidth": 0.0 if line.curve else 1.4, "marker": "o", "markersize": 5}
        axes.plot(*of(list(line.measured.items())), color=colour, zorder=4, **solid)
        hollow: Any = {"linewidth": 0, "marker": "o", "markersize": 5, "markerfacecolor": "white"}
        axes.plot(*of(list(line.modelled.items())), color=colour, zorder=3, **hollow)
    _, values = of([*points, *ideal])
    if max(values) > _LOG_FROM * min(values):
        style.log_axis(axes, math.log10(max(values) / min(values)))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.08 * max(values))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("cores")
    axes.grid(axis="y")
