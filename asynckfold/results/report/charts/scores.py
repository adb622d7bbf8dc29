"""Scores of each candidate: its folds, the mean and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from asynckfold.results.report import sentences
from asynckfold.results.report.candidate_rows import CandidateRow
from asynckfold.results.report.charts import style
from asynckfold.results.report.summary import Summary


@style.applied
def draw_scores(summary: Summary, given: Axes | None = None) -> style.Drawing | None:
    """Draw one dot per fold, the mean and its interval, for each candidate."""
    rows = [row for row in summary.candidates if math.isfinite(row.mean[summary.metric])]
    if not rows:
        return None
    title = sentences.headline(summary)
    shown = rows[: style.SHOWN]
    _, axes = style.panel(1.35 + 0.3 * len(shown), title, given)
    colours = style.colours_of(row.name for row in summary.candidates)
    for place, row in enumerate(shown):
        _draw_folds(axes, place, row.scores[summary.metric], colours[row.name])
        _draw_mean(axes, place, row, summary.metric, colours[row.name])
    axes.set_yticks(range(len(shown)), [_rank_label(row) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(style.plotted(summary.metric))
    style.grid(axes, "x")
    axes.tick_params(axis="y", length=0)
    hidden = (
        f"; the first {style.SHOWN} of {len(rows)} candidates" if len(rows) > style.SHOWN else ""
    )
    marks = sentences.forest_marks(summary).lower().rstrip(".")
    axes.set_title(f"{marks}{hidden}", loc="left")
    alt = "; ".join(
        f"{row.name}: {sentences.mean_std(row, summary.metric)} ({sentences.folds_note(row)})"
        for row in shown[:10]
    )
    return style.Drawing(title, alt, style.drawn_on(axes))


def _draw_folds(axes: Axes, place: int, scores: Sequence[float], colour: str) -> None:
    spread = np.linspace(-0.16, 0.16, len(scores)) if len(scores) > 1 else np.zeros(1)
    axes.scatter(scores, place + spread, s=20, color=colour, alpha=0.55, linewidths=0)


def _draw_mean(axes: Axes, place: int, row: CandidateRow, metric: str, colour: str) -> None:
    mean = row.mean[metric]
    axes.plot([row.ci_low, row.ci_high], [place, place], color=colour, linewidth=2.2, alpha=0.9)
    face = colour if row.complete else "white"
    axes.plot([mean], [place], "D", markersize=6, color=colour, markerfacecolor=face)


def _rank_label(row: CandidateRow) -> str:
    if row.complete:
        return f"{row.rank or '–'}. {style.plotted(row.name)}"
    return f"{style.plotted(row.name)} ({row.folds_done}/{row.folds})"
