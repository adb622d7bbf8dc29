"""Accuracy of each class, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.ticker import PercentFormatter

from asynckfold.results.report import sentences
from asynckfold.results.report.candidate_rows import CandidateRow
from asynckfold.results.report.charts import style
from asynckfold.results.report.summary import Summary


@style.applied
def draw_classes(summary: Summary) -> style.Drawing | None:
    """Draw the accuracy of each class under each candidate, and in the measured serial loop."""
    rows = [row for row in summary.candidates if row.class_accuracy is not None]
    if not rows:
        return None
    packed = {row.name: row.class_accuracy or () for row in rows}
    serial = {row.name: row.serial_class_accuracy for row in rows if row.serial_class_accuracy}
    return class_rows(packed, serial, summary.facts.classes, _classes_title(summary, rows[0]))


@style.applied
def class_rows(
    packed: Mapping[str, Sequence[float]],
    serial: Mapping[str, Sequence[float]],
    classes: Sequence[str],
    title: str,
) -> style.Drawing:
    """Draw a row of shares per candidate, and below it one of the serial loop where it is known."""
    most = style.SHOWN // 2 if serial else style.SHOWN
    named: list[tuple[str, Sequence[float]]] = []
    for name, shares in list(packed.items())[:most]:
        named.append((style.plotted(name), shares))
        if name in serial:
            named.append(("serial loop", serial[name]))
    table = np.array([shares for _, shares in named], dtype=float)
    columns = _hardest_columns(table)
    figure = style.new_figure(1.5 + 0.28 * len(named), title)
    axes = figure.subplots()
    hidden = [f"the {style.SHOWN} hardest of {len(classes)} classes"] * (
        len(classes) > style.SHOWN
    ) + [f"the first {most} of {len(packed)} candidates"] * (len(packed) > most)
    what = "share of held-out samples recognised, in percent"
    axes.set_title("; ".join([*hidden, what]), loc="left")
    low = float(np.nanmin(table)) if np.isfinite(table).any() else 0.0
    image = axes.imshow(table[:, columns], cmap="Blues", vmin=min(low, 0.9), vmax=1, aspect="auto")
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, format=PercentFormatter(1, 0))
    bar.outline.set_visible(False)
    axes.set_yticks(range(len(named)), [name for name, _ in named])
    for label, (name, _) in zip(axes.get_yticklabels(), named, strict=True):
        label.set_color(style.FAINT if name == "serial loop" else style.INK)
    _class_ticks(axes, [classes[column] for column in columns])
    if len(columns) <= 14:
        _write_cells(axes, table[:, columns], image, lambda value: f"{100 * value:.0f}")
    _no_frame(axes)
    return style.Drawing(title, "Numbers are in the tables of the page.", figure)


def _classes_title(summary: Summary, row: CandidateRow) -> str:
    worst = sentences.hardest(summary.facts.classes, row.class_accuracy or ())
    if worst is None:
        return "No class has held-out samples"
    if worst[1] == 1:
        return f"{row.name} recognises every class without a mistake"
    share = sentences.percent(worst[1])
    name, hardest = style.plotted(row.name), style.plotted(worst[0])
    return f"Hardest class for {name}: {hardest}, {share} recognised"


def _hardest_columns(table: npt.NDArray[np.float64]) -> list[int]:
    if table.shape[1] <= style.SHOWN:
        return list(range(table.shape[1]))
    worst = np.argsort(np.nan_to_num(table[0], nan=2.0), kind="stable")[: style.SHOWN]
    return sorted(worst.tolist())


def _class_ticks(axes: Axes, names: Sequence[str]) -> None:
    labels = [style.plotted(name, 16) for name in names]
    long = sum(map(len, labels)) > 70
    axes.set_xticks(range(len(labels)), labels, rotation=90 if long else 0)


def _no_frame(axes: Axes) -> None:
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write_cells(
    axes: Axes, table: Any, image: Any, written: Callable[[float], str], size: float = 8
) -> None:
    for (row, column), value in np.ndenumerate(table):
        if not np.isfinite(value):
            continue
        shade = float(image.norm(image.get_array()[row, column]))
        colour = "white" if shade > 0.6 else style.INK
        place: Any = {"ha": "center", "va": "center", "color": colour, "fontsize": size}
        axes.text(column, row, written(float(value)), **place).set_in_layout(False)


@style.applied
def draw_confusion(summary: Summary, given: Axes | None = None) -> style.Drawing | None:
    """Draw the out-of-fold confusion matrix of the best candidate."""
    row = next((row for row in summary.candidates if row.confusion is not None), None)
    if row is None or row.confusion is None:
        return None
    counts = np.array(row.confusion)
    repeated = bool(counts.sum() > summary.facts.samples)
    title = _confusion_title(summary, row, counts, repeated)
    size = len(counts)
    inches = float(np.clip(1.6 + 0.42 * size, 3.2, 7.6))
    _, axes = style.panel(inches, title, given)
    figure = style.drawn_on(axes)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # Squares would leave the left of our wide figure empty.
    aspect: Any = "auto" if given is None else "equal"
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect=aspect)
    colorbar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.04)
    colorbar.set_label("share of the true class")
    colorbar.outline.set_visible(False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if size <= style.SHOWN:
        _class_ticks(axes, summary.class_names)
        axes.set_yticks(range(size), [style.plotted(name, 16) for name in summary.class_names])
    if size <= 20:
        cells = np.where(counts > 0, counts, np.nan)
        _write_cells(axes, cells, image, lambda value: f"{value:.0f}", 8 if size < 13 else 6.5)
    _no_frame(axes)
    alt = (
        f"Rows are true classes, columns what {row.name} predicts, counted over held-out samples"
        f"{', each once a repeat' if repeated else ''}."
    )
    return style.Drawing(title, alt, figure)


def _confusion_title(
    summary: Summary, row: CandidateRow, counts: npt.NDArray[np.int64], repeated: bool
) -> str:
    found = sentences.worst_confusion(counts.tolist())
    if found is None:
        return f"{style.plotted(row.name)} confuses no classes"
    true, predicted, count = found
    names = [style.plotted(name, 20) for name in summary.class_names]
    return (
        f"{style.plotted(row.name)} most often takes {names[true]} for {names[predicted]}: "
        f"{count} of {counts[true].sum()} {'predictions' if repeated else 'samples'}"
    )
