"""Learning curves over epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asynckfold.errors import InputError
from asynckfold.results.report import sentences
from asynckfold.results.report.candidate_rows import CandidateRow, Curve
from asynckfold.results.report.charts import style
from asynckfold.results.report.inline import svg
from asynckfold.results.report.sentences import number
from asynckfold.results.report.summary import Summary
from asynckfold.results.verdict import listed

_MEASURES = {"train_loss": "train loss", "valid_loss": "valid loss", "accuracy": "accuracy"}


@style.applied
def draw_curves(summary: Summary, *given: Axes) -> style.Drawing | None:
    """Draw losses and accuracy over the epochs: mean over folds, with a thin line per fold.

    On one of the caller's axes, the validation loss.
    """
    rows = [row for row in summary.candidates if row.curves]
    measures = [
        name
        for name in _MEASURES
        if any(curve.measure == name for row in rows for curve in row.curves)
    ]
    if not measures:
        return None
    title = _curves_title(rows[0])
    if len(given) == 1 and "valid_loss" in measures:
        measures = ["valid_loss"]
    if given and len(given) != len(measures):
        rule = f"curves needs one of ax, or {len(measures)} for {listed(measures)}"
        raise InputError.one(rule, f"{len(given)}", f"Pass plt.subplots(1, {len(measures)})[1].")
    place: Figure | Axes
    if given:
        place, panels = given[-1], list(given)
    else:
        place = style.new_figure(3.3 + 0.16 * min(len(rows), 9), title)
        panels = list(place.subplots(1, len(measures), squeeze=False)[0])
    colours = style.colours_of(row.name for row in summary.candidates)
    for axes, measure in zip(panels, measures, strict=True):
        _draw_measure(axes, colours, rows, measure)
    style.name_candidates(place, colours, [row.name for row in rows], lines=True)
    alt = f"Mean over folds per epoch for {sentences.plural(len(rows), 'candidate')}; thin: folds."
    return style.Drawing(title, alt, style.drawn_on(panels[0]))


def _curves_title(row: CandidateRow) -> str:
    curve, train = _curve(row, "valid_loss"), _curve(row, "train_loss")
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


def _curve(row: CandidateRow, measure: str) -> Curve | None:
    return next((curve for curve in row.curves if curve.measure == measure), None)


def _draw_measure(
    axes: Axes, colours: Mapping[str, str], rows: Sequence[CandidateRow], measure: str
) -> None:
    for row in reversed(rows):
        curve = _curve(row, measure)
        if curve is not None:
            _draw_curve(axes, curve, colours[row.name])
    axes.set_title(_MEASURES[measure], loc="left")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    style.grid(axes, "y")
    _limit_to_complete(axes, rows, measure)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    if colour != svg.OTHERS:
        for line in curve.folds:
            axes.plot(range(1, len(line) + 1), line, color=colour, linewidth=0.6, alpha=0.3)
    width = 1.8 if colour != svg.OTHERS else 0.9
    epochs = range(1, len(curve.mean) + 1)
    style.draw_line(axes, epochs, curve.mean, color=colour, linewidth=width)


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
