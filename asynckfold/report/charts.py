"""The figures of a report as PNG; the only place of matplotlib.

Figures are drawn by matplotlib's object interface on an Agg canvas: no display, no pyplot, nothing
left behind. Whatever style the caller has set, matplotlib's own defaults apply here, and mathtext
is off, so that a model called ``$\\frac{`` is written as it is.
"""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from asynckfold.report import findings
from asynckfold.report.race import Line, Race
from asynckfold.report.summary import Bar, CandidateRow, Curve, Summary, Use

# Okabe and Ito (2008), "Color Universal Design": told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5A00", "#000000")
OTHERS = "#b4b9c2"
INK, FAINT, GRID = "#1c2330", "#5b6472", "#e3e6eb"
SHOWN = 40
WIDTH_INCHES = 7.6

_STYLE: Any = {
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": "#c3c8d0",
    "axes.titlesize": 9,
    "axes.titlecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "legend.frameon": False,
    "figure.dpi": 150,
}


@dataclass(frozen=True)
class Chart:
    """A drawn figure.

    Parameters
    ----------
    name : str
        File name without ``.png``.
    title : str
        The finding, as written on the figure.
    alt : str
        What a reader who cannot see it should know.
    png : bytes
        The picture.
    width, height : int
        Pixels.
    """

    name: str
    title: str
    alt: str
    png: bytes
    width: int
    height: int


def draw(summary: Summary) -> tuple[Chart, ...]:
    """Draw every figure that the run has numbers for."""
    makers: tuple[Callable[[Summary], Chart | None], ...] = (
        draw_scores,
        draw_curves,
        draw_race,
        draw_classes,
        draw_confusion,
        draw_use,
        draw_gantt,
        draw_speedup,
    )
    drawn = (make(summary) for make in makers)
    return tuple(chart for chart in drawn if chart is not None)


def _styled(make: Callable[[Summary], Chart | None]) -> Callable[[Summary], Chart | None]:
    """Run a drawing function under our style and give the caller's style back."""

    @functools.wraps(make)
    def drawn(summary: Summary) -> Chart | None:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)
            return make(summary)

    return drawn


# What all figures share


@functools.cache
def _glyphs() -> frozenset[int]:
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return frozenset(FT2Font(str(font)).get_charmap())


def plotted(text: str, limit: int = 30) -> str:
    """Return text that the font can draw, on one line, with its middle cut out where it is long.

    >>> plotted("LeNet5/cosine"), plotted("网络/warm")
    ('LeNet5/cosine', '□□/warm')
    """
    line = " ".join(findings.shorten(text, 4 * limit).split()) or "□"
    known = "".join(sign if ord(sign) in _glyphs() else "□" for sign in line)
    return findings.shorten(known, limit)


def _new_figure(height_inches: float, title: str) -> Figure:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches))
    figure.set_layout_engine("constrained", w_pad=0.09, h_pad=0.07)
    FigureCanvasAgg(figure)
    text = "\n".join(textwrap.wrap(plotted(title, 170), 82))
    figure.suptitle(text, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def _chart(name: str, title: str, alt: str, figure: Figure) -> Chart:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    width, height = (round(inches * figure.dpi) for inches in figure.get_size_inches())
    return Chart(name, title, f"{title}. {alt}", buffer.getvalue(), width, height)


def _colours(summary: Summary) -> dict[str, str]:
    """The first candidates have a colour of their own, the same one in every figure."""
    names = [row.name for row in summary.candidates]
    own = dict(zip(names, COLOURS, strict=False))
    return {name: own.get(name, OTHERS) for name in names}


def _name_candidates(
    figure: Figure, summary: Summary, names: Iterable[str], *, lines: bool
) -> None:
    colours = _colours(summary)
    present = set(names)
    named = [name for name, own in colours.items() if own != OTHERS and name in present]
    handles: list[Any] = [_handle(colours[name], plotted(name), lines=lines) for name in named]
    others = len(summary.candidates) - len(COLOURS)
    if others > 0:
        handles.append(_handle(OTHERS, f"the other {others}", lines=lines))
    longest = max((len(handle.get_label()) for handle in handles), default=1)
    columns = max(1, min(4, len(handles), 110 // (longest + 6)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8)


def _handle(colour: str, label: str, *, lines: bool) -> Line2D | Patch:
    if lines:
        return Line2D([], [], color=colour, linewidth=2, label=label)
    return Patch(color=colour, label=label)


def _time_unit(longest_seconds: float) -> tuple[float, str]:
    """Return what to divide seconds by, and the unit's name."""
    if longest_seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest_seconds < 3 * 3600 else (3600.0, "hours")


# Scores


@_styled
def draw_scores(summary: Summary) -> Chart | None:
    """Draw one dot per fold, and mean ± std, for each candidate."""
    rows = [row for row in summary.candidates if math.isfinite(row.mean[summary.metric])]
    if not rows:
        return None
    title = findings.winner(summary)
    shown = rows[:SHOWN]
    figure = _new_figure(1.35 + 0.3 * len(shown), title)
    axes = figure.subplots()
    colours = _colours(summary)
    for place, row in enumerate(shown):
        _draw_folds(axes, place, row.scores[summary.metric], colours[row.name])
        _draw_mean(axes, place, row, summary.metric, colours[row.name])
    axes.set_yticks(range(len(shown)), [_rank_label(row) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(plotted(summary.metric))
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    hidden = f"; the first {SHOWN} of {len(rows)} candidates" if len(rows) > SHOWN else ""
    axes.set_title(f"dots: folds; bar: mean ± std{hidden}", loc="left")
    alt = "; ".join(
        f"{row.name}: {findings.mean_std(row, summary.metric)} ({findings.folds_note(row)})"
        for row in shown[:10]
    )
    return _chart("scores", title, alt, figure)


def _draw_folds(axes: Axes, place: int, scores: Sequence[float], colour: str) -> None:
    spread = np.linspace(-0.16, 0.16, len(scores)) if len(scores) > 1 else np.zeros(1)
    axes.scatter(scores, place + spread, s=20, color=colour, alpha=0.55, linewidths=0)


def _draw_mean(axes: Axes, place: int, row: CandidateRow, metric: str, colour: str) -> None:
    mean, std = row.mean[metric], row.std[metric]
    axes.plot([mean - std, mean + std], [place, place], color=colour, linewidth=2.2, alpha=0.9)
    face = colour if row.complete else "white"
    axes.plot([mean], [place], "D", markersize=6, color=colour, markerfacecolor=face)


def _rank_label(row: CandidateRow) -> str:
    if row.complete:
        return f"{row.rank or '–'}. {plotted(row.name)}"
    return f"{plotted(row.name)} ({row.folds_done}/{row.folds})"


# Learning curves


_MEASURES = {"train_loss": "train loss", "valid_loss": "valid loss", "accuracy": "accuracy"}


@_styled
def draw_curves(summary: Summary) -> Chart | None:
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
    figure = _new_figure(3.3 + 0.16 * min(len(rows), 9), title)
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, measure in zip(panels, measures, strict=True):
        _draw_measure(axes, summary, rows, measure)
    _name_candidates(figure, summary, [row.name for row in rows], lines=True)
    alt = f"Mean over folds per epoch for {findings.plural(len(rows), 'candidate')}; thin: folds."
    return _chart("curves", title, alt, figure)


def _curves_title(row: CandidateRow) -> str:
    curve = _curve(row, "valid_loss")
    losses = [value if math.isfinite(value) else math.inf for value in curve.mean] if curve else []
    if not losses or min(losses) == math.inf:
        return f"{row.name} has no finite validation loss on every fold"
    epoch = losses.index(min(losses)) + 1
    if len(losses) == 1:
        return f"{row.name} reaches a validation loss of {findings.number(losses[0])} in one epoch"
    if epoch == len(losses):
        return f"{row.name}: validation loss is lowest at the last epoch, more may help"
    return f"{row.name}: validation loss is lowest at epoch {epoch} of {len(losses)}"


def _curve(row: CandidateRow, measure: str) -> Curve | None:
    return next((curve for curve in row.curves if curve.measure == measure), None)


def _draw_measure(axes: Axes, summary: Summary, rows: Sequence[CandidateRow], measure: str) -> None:
    colours = _colours(summary)
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
    if colour != OTHERS:
        for line in curve.folds:
            axes.plot(range(1, len(line) + 1), line, color=colour, linewidth=0.6, alpha=0.3)
    marker = "o" if len(curve.mean) <= 12 else ""
    axes.plot(
        range(1, len(curve.mean) + 1),
        curve.mean,
        color=colour,
        marker=marker,
        markersize=3.5,
        linewidth=1.8 if colour != OTHERS else 0.9,
    )


def _limit_to_complete(axes: Axes, rows: Sequence[CandidateRow], measure: str) -> None:
    """Keep one diverged candidate from flattening all the others."""
    found = [_curve(row, measure) for row in rows if row.complete]
    lines = [line for curve in found if curve is not None for line in curve.folds]
    values = [value for line in lines for value in line if math.isfinite(value)]
    if not values:
        return
    low, high = min(values), max(values)
    if measure != "accuracy" and low > 0 and high > 20 * low:
        _log_axis(axes, decades=math.log10(high / low))
        axes.set_ylim(low / 1.2, high * 1.2)
        return
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - margin, high + margin)


def _log_axis(axes: Axes, decades: float) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


# Several processes against one


@_styled
def draw_race(summary: Summary) -> Chart | None:
    """Draw the training loss over wall-clock time, of several processes and of one."""
    if not summary.races:
        return None
    shown = summary.races[: len(COLOURS)]
    first = shown[0]
    title = _race_title(first)
    figure = _new_figure(3.6, title)
    axes = figure.subplots()
    colours = _colours(summary)
    lines = [line for race in shown for line in (race.several, race.one)]
    divisor, unit = _time_unit(max(line[-1][0] for line in lines))
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
        _log_axis(axes, decades=math.log10(max(known) / min(known)))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} of training")
    axes.grid(axis="y")
    threads = findings.plural(first.threads, "thread")
    note = f"solid: {first.processes} processes; dashed: the serial loop, one process, {threads}"
    if summary.speedup is not None and summary.speedup.disturbance:
        note += ", disturbed by others"
    axes.set_title(f"train loss; {note}", loc="left")
    _name_candidates(figure, summary, [race.candidate for race in shown], lines=True)
    alt = "; ".join(
        f"{race.candidate}: loss {findings.number(race.several[-1][1])} after "
        f"{findings.duration(race.several[-1][0])}, one process {findings.number(race.one[-1][1])} "
        f"after {findings.duration(race.one[-1][0])}"
        for race in shown
    )
    return _chart("race", title, alt, figure)


def _race_title(race: Race) -> str:
    """Tell when the processes had reached the loss at which one process ended."""
    end, goal = race.one[-1]
    reached = _reached(race.several, goal)
    name = plotted(race.candidate)
    if reached is None:
        return (
            f"{name}: {race.processes} processes end at a training loss of "
            f"{findings.number(race.several[-1][1])} in {findings.duration(race.several[-1][0])}, "
            f"one at {findings.number(goal)} in {findings.duration(end)}"
        )
    return (
        f"{name}: {race.processes} processes have one's final training loss in "
        f"{findings.duration(reached)} instead of {findings.duration(end)}"
    )


def _reached(line: Line, goal: float) -> float | None:
    """Return the end of the first epoch that is as good.

    Examples
    --------
    >>> _reached(((1.0, 0.5), (2.0, 0.25)), 0.3), _reached(((1.0, 0.5),), 0.3)
    (2.0, None)
    """
    return next((seconds for seconds, loss in line if loss <= goal), None)


# Classes


@_styled
def draw_classes(summary: Summary) -> Chart | None:
    """Draw the accuracy of each class under each candidate."""
    rows = [row for row in summary.candidates if row.class_accuracy is not None][:SHOWN]
    if not rows:
        return None
    title = _classes_title(summary, rows[0])
    named = _class_rows(rows, summary.races)
    table = np.array([shares for _, shares in named], dtype=float)
    names = summary.facts.classes
    columns = _hardest_columns(table)
    figure = _new_figure(1.5 + 0.28 * len(named), title)
    axes = figure.subplots()
    note = f"the {SHOWN} hardest of {len(names)} classes; " if len(names) > SHOWN else ""
    axes.set_title(f"{note}share of held-out samples recognised", loc="left")
    low = float(np.nanmin(table)) if np.isfinite(table).any() else 0.0
    image = axes.imshow(table[:, columns], cmap="Blues", vmin=min(low, 0.9), vmax=1, aspect="auto")
    figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03).outline.set_visible(False)
    axes.set_yticks(range(len(named)), [name for name, _ in named])
    _class_ticks(axes, [names[column] for column in columns])
    if len(columns) <= 14:
        _write_cells(axes, table[:, columns], image, lambda value: f"{100 * value:.0f}")
    _no_frame(axes)
    return _chart("classes", title, "Numbers are in the tables of the page.", figure)


def _class_rows(
    rows: Sequence[CandidateRow], races: Sequence[Race]
) -> list[tuple[str, Sequence[float]]]:
    """Name the rows: each candidate, and below it what one process made of it, where known."""
    alone = {race.candidate: race.class_accuracy for race in races}
    found: list[tuple[str, Sequence[float]]] = []
    for row in rows:
        found.append((plotted(row.name), row.class_accuracy or ()))
        if row.name in alone:
            found.append((f"{plotted(row.name, 16)}, one process", alone[row.name]))
    return found


def _classes_title(summary: Summary, row: CandidateRow) -> str:
    worst = findings.hardest(summary.facts.classes, row.class_accuracy or ())
    if worst is None:
        return "No class has held-out samples"
    if worst[1] == 1:
        return f"{row.name} recognises every class without a mistake"
    name = plotted(worst[0])
    return f"Hardest class for {plotted(row.name)}: {name}, {findings.percent(worst[1])} recognised"


def _hardest_columns(table: np.ndarray[Any, np.dtype[np.float64]]) -> list[int]:
    if table.shape[1] <= SHOWN:
        return list(range(table.shape[1]))
    worst = np.argsort(np.nan_to_num(table[0], nan=2.0), kind="stable")[:SHOWN]
    return sorted(worst.tolist())


def _class_ticks(axes: Axes, names: Sequence[str]) -> None:
    labels = [plotted(name, 16) for name in names]
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
        if np.isfinite(value):
            shade = float(image.norm(image.get_array()[row, column]))
            colour = "white" if shade > 0.6 else INK
            text = written(float(value))
            cell = axes.text(
                column, row, text, ha="center", va="center", color=colour, fontsize=size
            )
            cell.set_in_layout(False)


@_styled
def draw_confusion(summary: Summary) -> Chart | None:
    """Draw the out-of-fold confusion matrix of the best candidate."""
    row = next((row for row in summary.candidates if row.confusion is not None), None)
    if row is None or row.confusion is None:
        return None
    title = _confusion_title(summary, row)
    counts = np.array(row.confusion)
    size = len(counts)
    inches = float(np.clip(1.6 + 0.42 * size, 3.2, 7.6))
    figure = _new_figure(inches, title)
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    colorbar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.04)
    colorbar.set_label("share of the true class")
    colorbar.outline.set_visible(False)
    _confusion_labels(axes, summary.class_names)
    if size <= 20:
        cells = np.where(counts > 0, counts, np.nan)
        _write_cells(axes, cells, image, lambda value: f"{value:.0f}", 8 if size < 13 else 6.5)
    _no_frame(axes)
    alt = f"Rows are true classes, columns what {row.name} says, counted over held-out samples."
    return _chart("confusion", title, alt, figure)


def _confusion_labels(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xlabel("class that the model says")
    axes.set_ylabel("true class")
    if len(names) <= SHOWN:
        _class_ticks(axes, names)
        axes.set_yticks(range(len(names)), [plotted(name, 16) for name in names])


def _confusion_title(summary: Summary, row: CandidateRow) -> str:
    assert row.confusion is not None
    found = findings.worst_confusion(row.confusion)
    if found is None:
        return f"{plotted(row.name)} confuses no classes"
    true, said, count = found
    names = [plotted(name, 20) for name in summary.class_names]
    total = sum(row.confusion[true])
    return (
        f"{plotted(row.name)} most often takes {names[true]} for {names[said]}: "
        f"{count} of {total} samples"
    )


# Machine


@_styled
def draw_use(summary: Summary) -> Chart | None:
    """Draw the cores in use over time, serial above packed, on one time axis."""
    found = {use.phase: use for use in summary.use}
    if not found:
        return None
    title = _use_title(found)
    figure = _new_figure(4.3, title)
    panels = figure.subplots(2, 1, sharex=True)
    longest = max(use.seconds[-1] for use in summary.use)
    divisor, unit = _time_unit(longest)
    for axes, phase, colour in zip(panels, ("serial", "packed"), (FAINT, COLOURS[0]), strict=True):
        _draw_phase(axes, phase, found.get(phase), divisor, colour)
    panels[1].set_xlabel(f"{unit} since the phase began")
    panels[1].set_xlim(0, max(longest / divisor * 1.01, 1e-3))
    alt = "; ".join(
        f"{use.phase}: {use.mean_used:.2f} of {use.cores} cores in use on average"
        for use in summary.use
    )
    return _chart("use", title, alt, figure)


def _use_title(found: dict[str, Use]) -> str:
    shares = {
        phase: findings.percent(use.mean_used / max(use.cores, 1)) for phase, use in found.items()
    }
    if len(shares) == 2:
        return (
            f"Of the allowed cores {shares['packed']} were in use packed, {shares['serial']} serial"
        )
    phase, share = next(iter(shares.items()))
    return f"{share} of the allowed cores were in use in the {phase} run"


def _draw_phase(axes: Axes, phase: str, use: Use | None, divisor: float, colour: str) -> None:
    axes.set_ylabel("cores")
    if use is None:
        axes.set_title(phase, loc="left")
        text = f"there are no CPU samples of the {phase} run"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_yticks([])
        return
    seconds = np.array(use.seconds) / divisor
    axes.fill_between(seconds, use.own, color=colour, alpha=0.35, linewidth=0, label="this run")
    axes.plot(seconds, use.used, color=colour, linewidth=1.3, label="everyone")
    axes.axhline(use.cores, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, use.cores * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    mean = f"mean {use.mean_used:.2f} of {use.cores} cores, this run {use.mean_own:.2f}"
    axes.set_title(f"{phase}: {mean}; filled: this run, line: everyone", loc="left")


@_styled
def draw_gantt(summary: Summary) -> Chart | None:
    """Draw which job ran on which core when."""
    if not summary.bars:
        return None
    lanes = _lanes(summary.bars)
    title = _gantt_title(summary, lanes)
    figure = _new_figure(1.7 + 0.3 * min(len(lanes), 24), title)
    axes = figure.subplots()
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
    divisor, unit = _time_unit(longest)
    for place, (_, bars) in enumerate(lanes):
        _draw_lane(axes, place, bars, _colours(summary), first, divisor)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes])
    if len(lanes) > 48:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(longest / divisor * 1.01, 1e-3))
    axes.set_xlabel(f"{unit} since the first job began")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    ended_badly = any(bar.outcome not in ("ok", "running") for bar in summary.bars)
    axes.set_title("hatched: ended without a score" if ended_badly else "", loc="left")
    _name_candidates(figure, summary, [bar.candidate for bar in summary.bars], lines=False)
    return _chart("gantt", title, "A bar per attempt at a job, a row per core.", figure)


def _gantt_title(summary: Summary, lanes: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    jobs = len({bar.job for bar in summary.bars})
    first = min(bar.start for bar in summary.bars)
    longest = max(bar.end for bar in summary.bars) - first
    rows, busy = len(lanes), math.fsum(_covered(bars) for _, bars in lanes)
    share = busy / (longest * rows) if longest else math.nan
    known = summary.packing
    if known is not None and known.cores is not None and known.held is not None:
        rows, longest, share = known.cores, known.makespan, known.held
    return (
        f"{findings.plural(jobs, 'job')} on {findings.plural(rows, 'core')} in "
        f"{findings.duration(longest)}; jobs held {findings.percent(share)} of the core time"
    )


def _covered(bars: Sequence[Bar]) -> float:
    """Return the seconds in which there is a bar: jobs that are trained as one share theirs.

    Examples
    --------
    >>> from dataclasses import replace
    >>> bar = Bar("a", "A", 1, (0,), "cpu", 1.0, 3.0, "ok", "", 2.0, None, None, ())
    >>> _covered([bar, bar, replace(bar, start=2.0, end=5.0), replace(bar, start=7.0, end=8.0)])
    5.0
    """
    total, end = 0.0, -math.inf
    for bar in sorted(bars, key=lambda bar: bar.start):
        total += max(0.0, bar.end - max(bar.start, end))
        end = max(end, bar.end)
    return total


def _lanes(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Group attempts by core; those without a core of their own go to the first free row."""
    cores: dict[int, list[Bar]] = {}
    rows: list[list[Bar]] = []
    for bar in bars:
        for piece in _pieces(bar):
            for core in piece.cores:
                cores.setdefault(core, []).append(piece)
        if not bar.cores:
            free = next((row for row in rows if row[-1].end <= bar.start), None)
            if free is None:
                rows.append([bar])
            else:
                free.append(bar)
    pinned = [(f"core {core}", cores[core]) for core in sorted(cores)]
    return pinned + [(f"unpinned {number}", row) for number, row in enumerate(rows, 1)]


def _pieces(bar: Bar) -> list[Bar]:
    """Divide an attempt where it went on with other cores."""
    starts = [(bar.start, bar.cores), *bar.changes]
    ends = [*(at for at, _ in bar.changes), bar.end]
    return [
        replace(bar, start=start, end=end, cores=cores, changes=())
        for (start, cores), end in zip(starts, ends, strict=True)
    ]


def _draw_lane(
    axes: Axes,
    place: int,
    bars: Sequence[Bar],
    colours: dict[str, str],
    first: float,
    divisor: float,
) -> None:
    for good in (True, False):
        kept = [bar for bar in bars if (bar.outcome in ("ok", "running")) == good]
        spans = [((bar.start - first) / divisor, (bar.end - bar.start) / divisor) for bar in kept]
        drawn = axes.broken_barh(
            spans,
            (place - 0.36, 0.72),
            facecolors=[colours[bar.candidate] for bar in kept],
            edgecolors="white",
            linewidth=0.7,
            hatch=None if good else "////",
            alpha=1 if good else 0.6,
        )
        drawn.set_in_layout(False)


@_styled
def draw_speedup(summary: Summary) -> Chart | None:
    """Draw serial against packed seconds."""
    found = summary.speedup
    if found is None or not summary.packed_seconds:
        return None
    title = findings.speed(summary)
    figure = _new_figure(1.75, title)
    axes = figure.subplots()
    divisor, unit = _time_unit(max(found.serial_seconds, found.packed_seconds))
    values = [found.serial_seconds / divisor, found.packed_seconds / divisor]
    bars = axes.barh([0, 1], values, height=0.62, color=[OTHERS, COLOURS[0]])
    if found.kind != "measured":
        bars[0].set_hatch("////")
        bars[0].set_edgecolor("white")
    axes.bar_label(
        bars,
        [findings.duration(found.serial_seconds), findings.duration(found.packed_seconds)],
        padding=5,
    )
    axes.set_yticks([0, 1], [f"serial ({plotted(found.kind)})", "packed"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, 1.16 * max(values))
    axes.set_xlabel(f"{unit} of wall time")
    axes.tick_params(axis="y", length=0)
    return _chart("speedup", title, "Shorter is better.", figure)
