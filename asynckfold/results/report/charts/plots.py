"""`asynckfold.plots`: the figures that compare the packed run with the serial loop.

Each is drawn from a run, given by its folder or its results, or from arrays, and returned as a
figure of matplotlib, which is neither shown nor known to pyplot: ``figure.savefig("speedup.pdf")``.
`CVResults.plot` draws the other figures of the report.

Examples
--------
>>> from asynckfold import plots
>>> serial, packed = {"LeNet": 165.0, "MLP": 40.0}, {"LeNet": 80.0, "MLP": 25.0}
>>> figure = plots.speedup(serial=serial, packed=packed)
>>> figure.get_suptitle()
'1.95× as fast: 1 min 45 s packed against 3 min 25 s serial'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from asynckfold.errors import InputError, nearest
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.attempts import CpuUse
from asynckfold.results.report.candidate_rows import LossOverTime
from asynckfold.results.report.charts import drawings
from asynckfold.results.report.charts.classes import class_rows
from asynckfold.results.report.charts.drawings import FIGURES, ON_AXES
from asynckfold.results.report.figures import seconds_bars
from asynckfold.results.report.summary import summarize
from asynckfold.results.report.svg import COLOURS
from asynckfold.store import open_run
from asynckfold.system.units import duration

__all__ = ["class_accuracy", "cpu_usage", "loss_vs_time", "speedup"]

Run = str | Path | CVResults
"""The folder of a run, or its results."""
Curve = tuple[ArrayLike, ArrayLike]
"""Moments in seconds, and a value at each of them."""


def cpu_usage(
    run: Run | None = None,
    *,
    packed: Curve | None = None,
    serial: Curve | None = None,
    cores: int | None = None,
) -> Figure:
    """Draw the cores in use over time, of the serial loop and of the packed run.

    Parameters
    ----------
    run : str, Path or CVResults, optional
        The run to draw; or pass arrays.
    packed, serial : tuple of (array, array), optional
        Seconds since the beginning, and the cores in use then.
    cores : int, optional
        Allowed cores; by default the most that were in use.

    Returns
    -------
    matplotlib.figure.Figure
        The serial loop above the packed run, on one time axis; or the one that is known.

    Raises
    ------
    InputError
        Nothing to draw, or the run has no CPU samples.

    Examples
    --------
    >>> figure = cpu_usage(packed=([0, 1, 2], [1.9, 2.0, 1.2]), serial=([0, 3], [1, 1]))
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['cores', 'cores']
    """
    if _reads_run(run, packed, serial):
        return of_run(run, "cpu_usage")
    uses = []
    for name, curve in (("packed", packed), ("serial", serial)):
        if curve is not None:
            times, used = zip(*_points(curve), strict=True)
            allowed = cores or max(1, math.ceil(max(used)))
            # Whose use it is, arrays do not say.
            uses.append(CpuUse(name, times, used, used, allowed, float(np.mean(used)), math.nan))
    most = max(use.cores for use in uses)
    return drawings.cpu_panels([replace(use, cores=most) for use in uses])


def speedup(
    run: Run | None = None,
    *,
    packed: Mapping[str, float] | None = None,
    serial: Mapping[str, float] | None = None,
    ideal: float | None = None,
) -> Figure:
    """Plot serial and packed seconds of each model, and its speedup beside the ideal.

    Parameters
    ----------
    run : str, Path or CVResults, optional
        The run to draw; or pass both mappings. Packed seconds of a model are its share of the run's
        wall time, in proportion to the cores and GPUs that its jobs held.
    packed, serial : Mapping of str to float, optional
        Seconds of each model, both measured.
    ideal : float, optional
        The speedup to compare with, such as the number of cores.

    Returns
    -------
    matplotlib.figure.Figure
        Seconds as bars; their labels have the speedup, unless the run's baseline is an estimate.

    Raises
    ------
    InputError
        Nothing to draw, or mappings of different models; or the run has no speedup.

    Examples
    --------
    >>> figure = speedup(serial={"LeNet": 165.0}, packed={"LeNet": 80.0}, ideal=5)
    >>> [text.get_text() for text in figure.axes[0].texts][1]
    '1 min 20 s packed, 2.06× as fast'
    """
    if _reads_run(run, packed, serial):
        return of_run(run, "speedup")
    packed, serial = packed or {}, serial or {}
    if packed.keys() != serial.keys() or min(*packed.values(), *serial.values()) <= 0:
        rule = "packed and serial must give seconds above 0 for the same models"
        remedy = "Give each model its seconds in both."
        raise InputError.one(rule, f"{packed} and {serial}", remedy)
    whole = math.fsum(serial.values()), math.fsum(packed.values())
    title = (
        f"{whole[0] / whole[1]:.2f}× as fast: {duration(whole[1])} packed against "
        f"{duration(whole[0])} serial"
    )
    pairs = {name: (serial[name], packed[name]) for name in serial}
    return drawings.seconds_figure(seconds_bars(pairs, whole, ideal=ideal), title)


def class_accuracy(
    run: Run | None = None,
    *,
    packed: Mapping[str, ArrayLike] | None = None,
    serial: Mapping[str, ArrayLike] | None = None,
    classes: Sequence[str] | None = None,
) -> Figure:
    """Draw the accuracy of each class, of the packed run and of the serial loop.

    Parameters
    ----------
    run : str, Path or CVResults, optional
        The run to draw; or pass arrays.
    packed, serial : Mapping of str to array of shape (n_classes,), optional
        By candidate, the share of the samples of each class that was recognised.
    classes : sequence of str, optional
        Names of the classes; by default their numbers.

    Returns
    -------
    matplotlib.figure.Figure
        A row for each candidate, and below it one for the serial loop.

    Raises
    ------
    InputError
        Nothing to draw, or the run counted no classes.

    Examples
    --------
    >>> figure = class_accuracy(packed={"LeNet": [0.9, 0.8]}, serial={"LeNet": [0.9, 0.7]})
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['LeNet', 'serial loop']
    """
    if _reads_run(run, packed, serial):
        return of_run(run, "class_accuracy")
    ours, theirs = (
        {name: np.asarray(shares, float).tolist() for name, shares in (given or {}).items()}
        for given in ((packed, serial) if packed else (serial, None))
    )
    count = len(next(iter(ours.values())))
    named = [str(number) for number in range(count)] if classes is None else list(classes)
    return class_rows(ours, theirs, named)


def loss_vs_time(
    run: Run | None = None,
    *,
    packed: Mapping[str, Curve] | None = None,
    serial: Mapping[str, Curve] | None = None,
) -> Figure:
    """Draw the training loss against time, of the packed run and of the serial loop.

    Parameters
    ----------
    run : str, Path or CVResults, optional
        The run to draw; or pass arrays. Its seconds are those until all folds of a candidate have
        finished the epoch: serial one after another, packed as its share of the wall time.
    packed, serial : Mapping of str to tuple of (array, array), optional
        By candidate, seconds and the training loss after them.

    Returns
    -------
    matplotlib.figure.Figure
        Solid lines for the packed run, dashed ones for the serial loop.

    Raises
    ------
    InputError
        Nothing to draw, or arrays that do not fit; or the serial loop of the run was not measured.

    Examples
    --------
    >>> figure = loss_vs_time(packed={"LeNet": ([1, 2], [0.5, 0.2])})
    >>> figure.get_suptitle()
    'LeNet ends at a training loss of 0.2000 after 2.0 s'
    """
    if _reads_run(run, packed, serial):
        return of_run(run, "loss_vs_time")
    ours, theirs = (
        {name: _points(curve) for name, curve in (given or {}).items()}
        for given in (packed, serial)
    )
    places = {name: place for place, name in enumerate({**ours, **theirs})}
    pairs = [LossOverTime(name, ours.get(name, ()), theirs.get(name, ())) for name in places]
    figure = drawings.loss_lines(pairs[: len(COLOURS)], places)
    assert figure is not None
    return figure


def of_run(run: Run | None, kind: str, ax: Any = None) -> Figure:
    """Draw a figure of a run on disk; see `CVResults.plot`."""
    axes = () if ax is None else tuple(np.asarray(ax, dtype=object).ravel())
    if kind not in FIGURES:
        rule = f"kind must be one of {', '.join(FIGURES)}"
        remedy = nearest(str(kind), FIGURES).strip() or "Pass for instance 'scores'."
        raise InputError.one(rule, repr(kind), remedy)
    if axes and (kind not in ON_AXES or (kind != "curves" and len(axes) > 1)):
        rule = f"ax is one Axes for {', '.join(ON_AXES)}, or those of all panels of curves"
        raise InputError.one(rule, f"{len(axes)} for {kind}", "Leave ax out.")
    with open_run(run.root_dir if isinstance(run, CVResults) else run or "") as store:
        summary = summarize(store).labelled()
    figure = ON_AXES[kind](summary, *axes) if axes else FIGURES[kind](summary)
    if figure is None:
        remedy = "Finish the jobs of the run, or draw another figure."
        if kind in ("loss_vs_time", "speedup"):
            remedy = "Run the sweep with baseline='measure' on an idle machine."
        if kind in ("importance", "effects", "heatmap", "parallel"):
            remedy = "Search a grid, such as params={'lr': [1e-3, 1e-2], 'width': [16, 64]}."
            if kind == "importance" and summary.effects is not None:
                remedy = "Train more candidates: a forest on these means predicts nothing."
        why = summary.speedup.why_not if summary.speedup and kind == "speedup" else ""
        received = f"{store.root}: {why}" if why else str(store.root)
        raise InputError.one(f"{kind} needs numbers that this run does not have", received, remedy)
    return figure


def _reads_run(run: Run | None, packed: Any, serial: Any) -> bool:
    """Whether the run is drawn, and not arrays; refuse both and neither."""
    has_arrays = any(arrays is not None and len(arrays) > 0 for arrays in (packed, serial))
    if (run is not None) == has_arrays:
        received = "both" if has_arrays else "neither"
        remedy = "Pass the folder of a run, such as 'runs/x', or arrays."
        raise InputError.one("a figure takes either a run, or packed and serial", received, remedy)
    return run is not None


def _points(curve: Curve) -> tuple[tuple[float, float], ...]:
    times, values = (np.asarray(item, float).tolist() for item in curve)
    return tuple(zip(times, values, strict=True))
