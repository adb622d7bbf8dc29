"""Accuracy of each class, and the confusion matrix."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from asynckfold.results.report import sentences as say
from asynckfold.results.report.charts import style
from asynckfold.results.report.summary import Summary

SERIAL_LOOP = "serial loop"
TITLED = 3
"""Most candidates that a title names."""


def draw_classes(summary: Summary) -> Figure | None:
    """Draw the accuracy of each class under each candidate, and in the measured serial loop."""
    rows = [row for row in summary.candidates if row.class_accuracy is not None]
    if not rows:
        return None
    packed = {row.name: row.class_accuracy or () for row in rows}
    serial = {row.name: row.serial_class_accuracy for row in rows if row.serial_class_accuracy}
    return class_rows(packed, serial, summary.facts["classes"])


@style.applied
def class_rows(
    packed: Mapping[str, Sequence[float]],
    serial: Mapping[str, Sequence[float]],
    classes: Sequence[str],
) -> Figure:
    """Draw a row of shares per candidate, and below it one of the serial loop where it is known."""
    most = style.SHOWN // 2 if serial else style.SHOWN
    named: list[tuple[str, Sequence[float]]] = []
    for name, shares in list(packed.items())[:most]:
        named.append((style.plotted(name), shares))
        named += [(SERIAL_LOOP, serial[name])] if name in serial else []
    table = np.array([shares for _, shares in named], dtype=float)
    columns = list(range(table.shape[1]))
    if len(columns) > style.SHOWN:
        worst = np.argsort(np.nan_to_num(table[0], nan=2.0), kind="stable")
        columns = sorted(worst[: style.SHOWN].tolist())
    of = ", ".join(packed) if len(packed) <= TITLED else f"{len(packed)} candidates"
    figure = style.new_figure(1.5 + 0.28 * len(named), f"Accuracy of each class: {of}")
    axes = figure.subplots()
    is_part = len(classes) > len(columns) or len(packed) > most
    part = "; the hardest classes of the first candidates" if is_part else ""
    axes.set_title(f"share of held-out samples recognised, in percent{part}", loc="left")
    low = float(np.nanmin(table)) if np.isfinite(table).any() else 0.0
    look: Any = {"cmap": "Blues", "vmin": min(low, 0.9), "vmax": 1, "aspect": "auto"}
    image = axes.imshow(table[:, columns], **look)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, format=PercentFormatter(1, 0))
    bar.outline.set_visible(False)
    axes.set_yticks(range(len(named)), [name for name, _ in named])
    for label, (name, _) in zip(axes.get_yticklabels(), named, strict=True):
        label.set_color(style.FAINT if name == SERIAL_LOOP else style.INK)
    _class_ticks(axes, [classes[column] for column in columns])
    if len(columns) <= 14:
        _write_cells(axes, 100 * table[:, columns], image)
    _no_frame(axes)
    return figure


def _class_ticks(axes: Axes, names: Sequence[str]) -> None:
    labels = [style.plotted(name, 16) for name in names]
    long = sum(map(len, labels)) > 70
    axes.set_xticks(range(len(labels)), labels, rotation=90 if long else 0)


def _no_frame(axes: Axes) -> None:
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write_cells(axes: Axes, table: npt.NDArray[np.float64], image: Any, size: float = 8) -> None:
    # One by one: an array would not be rounded as a single number is.
    shade = functools.cache(lambda share: float(image.norm(share)))
    for (row, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            colour = "white" if shade(image.get_array()[row, column]) > 0.6 else style.INK
            look: Any = {"ha": "center", "va": "center", "color": colour, "fontsize": size}
            axes.text(column, row, f"{value:.0f}", **look).set_in_layout(False)


@style.applied
def draw_confusion(summary: Summary, ax: Axes | None = None) -> Figure | None:
    """Draw the out-of-fold confusion matrix of the best candidate."""
    row = next((row for row in summary.candidates if row.confusion is not None), None)
    if row is None or row.confusion is None:
        return None
    counts = np.array(row.confusion)
    size = len(counts)
    title = _confusion_title(summary, row.name, counts)
    _, axes = style.panel(float(np.clip(1.6 + 0.42 * size, 3.2, 7.6)), title, ax)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # Squares would leave the left of our wide figure empty.
    aspect: Any = "auto" if ax is None else "equal"
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect=aspect)
    colorbar = style.figure_of(axes).colorbar(image, ax=axes, pad=0.02, fraction=0.04)
    colorbar.set_label("share of the true class")
    colorbar.outline.set_visible(False)
    axes.set(xlabel="predicted class", ylabel="true class")
    if size <= style.SHOWN:
        _class_ticks(axes, summary.class_names)
        axes.set_yticks(range(size), [style.plotted(name, 16) for name in summary.class_names])
    if size <= 20:
        cells = np.where(counts > 0, counts, np.nan)
        _write_cells(axes, cells, image, 8 if size < 13 else 6.5)
    _no_frame(axes)
    return style.figure_of(axes)


def _confusion_title(summary: Summary, candidate: str, counts: npt.NDArray[np.int64]) -> str:
    mistakes = say.mistakes(counts.tolist())
    if not mistakes:
        return f"{style.plotted(candidate)} confuses no classes"
    true, predicted, count = mistakes[0]
    names = [style.plotted(name, 20) for name in summary.class_names]
    of = "predictions" if counts.sum() > summary.facts["samples"] else "samples"
    return (
        f"{style.plotted(candidate)} most often takes {names[true]} for {names[predicted]}: "
        f"{count} of {counts[true].sum()} {of}"
    )
