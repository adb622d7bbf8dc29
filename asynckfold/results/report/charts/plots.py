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
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import typing as npt
from numpy.typing import ArrayLike

from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.argument import one_line
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.attempts import CpuUse
from asynckfold.results.report.candidate_rows import LossOverTime
from asynckfold.results.report.charts import drawings
from asynckfold.results.report.charts.classes import class_rows
from asynckfold.results.report.charts.drawings import FIGURES, ON_AXES
from asynckfold.results.report.figures import SpeedupBars
from asynckfold.results.report.summary import summarize
from asynckfold.results.report.svg import COLOURS
from asynckfold.store import open_run
from asynckfold.system.units import duration

__all__ = ["class_accuracy", "cpu_usage", "loss_vs_time", "speedup"]

Run = str | Path | Outcome
"""The folder of a run, or its results."""
TITLED = 3
"""Most candidates that a title names."""
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
        Nothing to draw, or arrays that do not fit; or the run has no CPU samples.

    Examples
    --------
    >>> figure = cpu_usage(packed=([0, 1, 2], [1.9, 2.0, 1.2]), serial=([0, 3], [1, 1]))
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['cores', 'cores']
    """
    arrays = {"packed": packed, "serial": serial}
    if _reads_run(run, arrays):
        return of_run(run, "cpu_usage")
    curves = {name: _curve(name, curve) for name, curve in arrays.items() if curve is not None}
    most = max(max(used) for _, used in curves.values())
    if cores is not None and not 0 < cores < math.inf:
        raise InputError.one("cores must be a number above 0", repr(cores), "Leave cores out.")
    allowed = max(1, math.ceil(most)) if cores is None else cores
    uses = [
        # Whose use it is, arrays do not say.
        CpuUse(name, times, used, used, allowed, float(np.mean(used)), math.nan)
        for name, (times, used) in curves.items()
    ]
    return drawings.cpu_panels(uses)


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
        Seconds on the left; speedups on the right, unless the run's baseline is an estimate.

    Raises
    ------
    InputError
        Nothing to draw, or mappings of different models; or the run has no speedup.

    Examples
    --------
    >>> figure = speedup(serial={"LeNet": 165.0}, packed={"LeNet": 80.0}, ideal=5)
    >>> figure.axes[1].get_xlabel()
    'speedup'
    """
    arrays = {"packed": packed, "serial": serial}
    if _reads_run(run, arrays, needs_both=True):
        return of_run(run, "speedup")
    packed, serial = _by_candidate(arrays, lambda _, seconds: seconds, "80.0")
    if packed.keys() != serial.keys() or not all(
        isinstance(value, (int, float, np.number)) and 0 < value < math.inf
        for value in (*packed.values(), *serial.values())
    ):
        rule = "packed and serial must give seconds above 0 for the same models"
        remedy = "Give each model its seconds in both."
        raise InputError([Problem(rule, f"{packed} and {serial}", remedy)])
    whole = math.fsum(serial.values()), math.fsum(packed.values())
    title = (
        f"{whole[0] / whole[1]:.2f}× as fast: {duration(whole[1])} packed against "
        f"{duration(whole[0])} serial"
    )
    pairs = {name: (serial[name], packed[name]) for name in serial}
    return drawings.seconds_and_ratios(SpeedupBars.of(pairs, whole, ideal=ideal), title)


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
        Nothing to draw, or arrays of different lengths; or the run counted no classes.

    Examples
    --------
    >>> figure = class_accuracy(packed={"LeNet": [0.9, 0.8]}, serial={"LeNet": [0.9, 0.7]})
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['LeNet', 'serial loop']
    """
    arrays = {"packed": packed, "serial": serial}
    if _reads_run(run, arrays):
        return of_run(run, "class_accuracy")
    ours, theirs = _by_candidate(
        arrays, lambda name, shares: _numbers(name, shares).tolist(), "[0.9, 0.8]"
    )
    if not ours:
        ours, theirs = theirs, {}
    lengths = {len(shares) for shares in (*ours.values(), *theirs.values())}
    lengths |= {len(classes)} if classes is not None else set()
    if len(lengths) != 1:
        rule = "all candidates must have a share for each class"
        raise InputError([Problem(rule, f"lengths {sorted(lengths)}", "Use NaN for none.")])
    outside = [x for row in (*ours.values(), *theirs.values()) for x in row if x < 0 or x > 1]
    if outside:
        rule = "the shares of a class must lie between 0 and 1"
        raise InputError.one(rule, str(outside[0]), "Divide percent by 100.")
    named = [str(number) for number in range(lengths.pop())] if classes is None else list(classes)
    of = ", ".join(ours) if len(ours) <= TITLED else f"{len(ours)} candidates"
    title = f"Accuracy of each class: {of}"
    return class_rows(ours, theirs, named, title)


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
    arrays = {"packed": packed, "serial": serial}
    if _reads_run(run, arrays):
        return of_run(run, "loss_vs_time")
    ours, theirs = _by_candidate(
        arrays,
        lambda name, curve: tuple(zip(*_curve(name, curve), strict=True)),
        "(seconds, losses)",
    )
    places = {name: place for place, name in enumerate(dict.fromkeys([*ours, *theirs]))}
    pairs = [LossOverTime(name, ours.get(name, ()), theirs.get(name, ())) for name in places]
    figure = drawings.loss_lines(pairs[: len(COLOURS)], places)
    assert figure is not None
    return figure


def of_run(run: Run | None, kind: str, ax: Any = None) -> Figure:
    """Draw a figure of a run on disk; see `CVResults.plot`."""
    axes = () if ax is None else tuple(np.asarray(ax, dtype=object).ravel())
    _check_axes(kind, axes)
    if kind not in FIGURES:
        rule = f"kind must be one of {', '.join(FIGURES)}"
        remedy = nearest(str(kind), FIGURES).strip() or "Pass for instance 'scores'."
        raise InputError([Problem(rule, repr(kind), remedy)])
    with open_run(run.root_dir if isinstance(run, Outcome) else run or "") as store:
        summary = summarize(store)
    figure = ON_AXES[kind](summary, *axes) if axes else FIGURES[kind](summary)
    if figure is None:
        remedy = "Finish the jobs of the run, or draw another figure."
        if kind in ("loss_vs_time", "speedup"):
            remedy = "Run the sweep with baseline='measure' on an idle machine."
        why = summary.speedup.why_not if summary.speedup and kind == "speedup" else ""
        why, _, advice = why.partition(". ")
        received = f"{store.root}: {why or 'it has none'}"
        remedy = f"{advice}." if advice else remedy
        raise InputError([Problem(f"{kind} needs {_NEEDS[kind]}", received, remedy)])
    return figure


def _check_axes(kind: str, axes: Sequence[Any]) -> None:
    if not axes:
        return
    if kind in FIGURES and kind not in ON_AXES:
        rule = f"ax is for {', '.join(ON_AXES)}: {kind} has a figure of its own"
        raise InputError.one(rule, "ax", "Leave ax out.")
    if not all(isinstance(item, Axes) for item in axes):
        rule = "ax must be an Axes of matplotlib"
        raise InputError.one(rule, one_line(axes[0]), "Pass plt.subplots()[1].")
    if kind != "curves" and len(axes) > 1:
        raise InputError.one(f"{kind} has one panel", f"{len(axes)} of ax", "Pass one Axes.")


_NEEDS = {
    "scores": "a candidate with a finite score",
    "curves": "finished jobs with epochs",
    "loss_vs_time": "a serial loop that was run in full",
    "class_accuracy": "out-of-fold outputs for classes",
    "confusion": "out-of-fold outputs for classes",
    "probabilities": "out-of-fold probabilities of classes",
    "predictions": "a best candidate that predicts one number a sample",
    "cpu_usage": "samples of the CPU use",
    "timeline": "jobs that were started",
    "speedup": "a serial loop that was timed undisturbed",
}
"""What each figure is drawn from."""


def _reads_run(run: Run | None, arrays: Mapping[str, Any], *, needs_both: bool = False) -> bool:
    """Whether the run is drawn, and not arrays; refuse both and neither."""
    passed = [
        name
        for name, value in arrays.items()
        if value is not None and (not isinstance(value, Sized) or len(value))
    ]
    is_enough = len(passed) == len(arrays) if needs_both else bool(passed)
    if (run is None) == is_enough and not (run is not None and passed):
        return run is not None
    wanted = "packed and serial" if needs_both else "packed, serial or both"
    received = " and ".join([*(["a run"] if run is not None else []), *passed]) or "nothing"
    remedy = f"Pass the folder of a run, such as 'runs/x', or {wanted}."
    if run is not None and passed:
        remedy = "Leave one of them out."
    raise InputError.one(f"a figure takes either a run, or {wanted}", received, remedy)


def _by_candidate(
    arrays: Mapping[str, Any], convert: Callable[[str, Any], Any], example: str
) -> list[dict[str, Any]]:
    """Return each mapping with its values converted, by name of the candidate."""
    for kind, values in arrays.items():
        if values is not None and not isinstance(values, Mapping):
            remedy = f"Pass for instance {kind}={{'LeNet': {example}}}."
            raise InputError.one(f"{kind} must be a dict by name", one_line(values), remedy)
    return [
        {name: convert(f"{kind}[{name!r}]", value) for name, value in (values or {}).items()}
        for kind, values in arrays.items()
    ]


def _numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    try:
        return np.atleast_1d(np.asarray(values, float))
    except (TypeError, ValueError):
        remedy = "Pass one array of numbers."
        raise InputError.one(f"{name} must be numbers", one_line(values), remedy) from None


def _curve(name: str, curve: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    rule = f"{name} must be seconds and as many values"
    if not isinstance(curve, (tuple, list, np.ndarray)) or len(curve) != 2:
        raise InputError.one(rule, one_line(curve), "Pass two arrays.")
    times, values = (_numbers(name, item) for item in curve)
    if times.shape != values.shape or times.ndim != 1 or not times.size:
        shapes = f"shapes {times.shape} and {values.shape}"
        refuse([Problem(rule, shapes, "Pass two arrays of one length.")])
    return tuple(times.tolist()), tuple(values.tolist())
