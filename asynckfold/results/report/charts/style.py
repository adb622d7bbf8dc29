"""What all figures share: colours, style, size, text and legend."""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.svg import COLOURS, OTHERS
from asynckfold.system.plain_text import columns_of, fitted

INK, FAINT, GRID = "#1c2330", "#5b6472", "#e3e6eb"
SHOWN, WIDTH_INCHES = 40, 7.6

EAST_ASIAN = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC"),
    *("WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei"),
)
"""Fonts for Chinese, Japanese and Korean names; without any of them, boxes are drawn."""

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
    "svg.hashsalt": "asynckfold",
}

Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")


class ShownFigure(Figure):
    """A figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def applied(make: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Draw under our style, and restore the caller's."""

    @functools.wraps(make)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE | {"font.family": [*fonts()]})
            return make(*args, **kwargs)

    return drawn


@functools.cache
def fonts() -> tuple[str, ...]:
    """Return the font of matplotlib, and the first installed one of `EAST_ASIAN`."""
    installed = {font.name for font in fontManager.ttflist}
    return "DejaVu Sans", *[name for name in EAST_ASIAN if name in installed][:1]


def plotted(text: str, limit: int = 30) -> str:
    """Return text on one line, its middle cut out if it is long."""
    return fitted(" ".join(clean(text, 4096).split()), limit)


def new_figure(height_inches: float, title: str) -> Figure:
    """Return an empty figure of the common width, with its title."""
    figure = ShownFigure(figsize=(WIDTH_INCHES, height_inches))
    figure.set_layout_engine("constrained", w_pad=0.09, h_pad=0.07)
    FigureCanvasAgg(figure)
    tied = plotted(title, 170).replace(" ± ", "\xa0±\xa0").replace(" %", "\xa0%")
    text = "\n".join(textwrap.wrap(tied, 76))
    figure.suptitle(text, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def panel(height_inches: float, title: str, ax: Axes | None) -> tuple[Figure | Axes, Axes]:
    """Return the place of the legend, and the axes: the caller's, or those of a new figure."""
    if ax is not None:
        return ax, ax
    figure = new_figure(height_inches, title)
    return figure, figure.subplots()


def figure_of(axes: Axes) -> Figure:
    """Return the whole figure that axes belong to."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def colour(place: int) -> str:
    """Return the colour of a candidate by its place in the ranking, from 0."""
    return COLOURS[place] if place < len(COLOURS) else OTHERS


def add_legend(place: Figure | Axes, names: Mapping[str, int], *, lines: bool) -> None:
    """Name candidates by the colour of their place, the others as one: below, or beside axes."""
    labels = [(colour(at), plotted(name)) for name, at in names.items() if at < len(COLOURS)]
    if len(labels) < len(names):
        labels.append((OTHERS, f"the other {len(names) - len(labels)}"))
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=shade, linewidth=2, label=label)
        if lines
        else Patch(color=shade, label=label)
        for shade, label in labels
    ]
    if isinstance(place, Axes):
        place.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
        return
    longest = max((columns_of(label) for _, label in labels), default=1)
    columns = max(1, min(4, len(handles), 110 // (longest + 6)))
    place.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8)


def grid(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Draw the lines of a grid below the data, also on the caller's axes."""
    axes.set_axisbelow(True)
    axes.grid(axis=axis, color=GRID)


def log_axis(axes: Axes, decades: float) -> None:
    """Make the y axis logarithmic, labelled with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
