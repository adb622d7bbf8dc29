"""The figure of the machine's use: cores over time, serial above packed."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asynckfold.results.report import sentences
from asynckfold.results.report.charts.style import (
    COLOURS,
    FAINT,
    Chart,
    chart_of,
    new_figure,
    styled,
    time_unit,
)
from asynckfold.results.report.summary import Summary, Use


@styled
def draw_use(summary: Summary) -> Chart | None:
    """Draw the cores in use over time, serial above packed, on one time axis."""
    found = {use.phase: use for use in summary.use}
    if not found:
        return None
    title = _use_title(found)
    figure = new_figure(4.3, title)
    panels = figure.subplots(2, 1, sharex=True)
    longest = max(use.seconds[-1] for use in summary.use)
    divisor, unit = time_unit(longest)
    for axes, phase, colour in zip(panels, ("serial", "packed"), (FAINT, COLOURS[0]), strict=True):
        _draw_phase(axes, phase, found.get(phase), divisor, colour)
    panels[1].set_xlabel(f"{unit} since the phase began")
    panels[1].set_xlim(0, max(longest / divisor * 1.01, 1e-3))
    alt = "; ".join(f"{use.phase}: {_told(use)}" for use in summary.use)
    return chart_of("use", title, alt, figure)


def _use_title(found: dict[str, Use]) -> str:
    phase = "packed" if "packed" in found else next(iter(found))
    return f"CPU use{'' if phase == 'packed' else ', serial'}: {_told(found[phase])}"


def _told(use: Use) -> str:
    return sentences.cpu_use(use.mean_own, use.mean_used, use.cores)


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
    axes.set_title(f"{phase}: {_told(use)}; filled: this run, line: everyone", loc="left")
