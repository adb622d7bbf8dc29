"""Predicted against true numbers."""

from __future__ import annotations

from asynckfold.results.report.charts import style
from asynckfold.results.report.inline import svg
from asynckfold.results.report.inline.scatter import root_mean_squared_error
from asynckfold.results.report.sentences import number
from asynckfold.results.report.summary import Summary


@style.applied
def draw_predictions(summary: Summary) -> style.Drawing | None:
    """Draw held-out samples of the best candidate; on the dashed line they are equal."""
    found = summary.predictions
    if found is None:
        return None
    title = f"{found.candidate}: root mean squared error {number(root_mean_squared_error(found))}"
    figure = style.new_figure(4.2, title)
    axes = figure.subplots()
    ends = min(*found.true, *found.predicted), max(*found.true, *found.predicted)
    axes.plot(ends, ends, color=style.FAINT, linestyle=(0, (4, 3)), linewidth=0.8)
    axes.scatter(found.true, found.predicted, s=12, color=svg.COLOURS[0], alpha=0.5, linewidths=0)
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.set_title(f"{len(found.true)} of {found.total} held-out predictions", loc="left")
    style.grid(axes, "y")
    return style.Drawing(title, "On the dashed line, predicted and true numbers are equal.", figure)
