"""The figures of a report; the only place of matplotlib.

Figures use matplotlib's object interface on an Agg canvas: no display, no pyplot, no global state.
They ignore the caller's style. Mathtext is off, so a model called ``$\\frac{`` is drawn literally.
"""

from __future__ import annotations

from asynckfold.results.report.charts import plots
from asynckfold.results.report.charts.drawings import FIGURES, draw

__all__ = ["FIGURES", "draw", "plots"]
