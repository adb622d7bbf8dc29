"""Inline SVG for pages and notebooks: x in percent, y in pixels.

So a figure is as wide as its container, and its text keeps its size. Colours are CSS variables of
the page with a fallback, and follow its theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup, escape

from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.sentences import plural
from asynckfold.system.plain_text import fitted

# Okabe and Ito (2008), "Color Universal Design": distinct with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5A00", "#000000")
OTHERS = "#b4b9c2"
INK, FAINT = "var(--ink, currentColor)", "var(--faint, currentColor)"
GRID, PAPER = "var(--line, #8884)", "var(--paper, transparent)"
FONT = 12

LARGEST = 1e150
"""Beyond it, differences of numbers overflow."""


def colour(place: int) -> str:
    """Return the colour of a candidate by its place in the ranking, from 0."""
    if place >= len(COLOURS):
        return f"var(--others, {OTHERS})"
    return f"var(--c{place}, {COLOURS[place]})"


def element(name: str, *children: str, **attributes: object) -> Markup:
    """Return an element; text and values are escaped.

    >>> element("text", "a < b", text_anchor="end", class_="x")
    Markup('<text text-anchor="end" class="x">a &lt; b</text>')
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    texts = (item if isinstance(item, Markup) else clean(item) for item in children)
    return Markup(f"<{name}{pairs}>{Markup().join(texts)}</{name}>")


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value) if type(value) is int else escape(clean(value))


def percent(share: float) -> str:
    """Return a share of the width.

    >>> percent(0.5), percent(1 / 3)
    ('50%', '33.33%')
    """
    return f"{100 * share:.4g}%"


def text(words: str, x: float, y: float, anchor: str = "start", **look: object) -> Markup:
    """Return one line of text; `x` is a share of the width."""
    place: dict[str, object] = {"x": percent(x), "y": y, "font_size": FONT, "fill": INK}
    return element("text", words, **place, text_anchor=anchor, **look)


def anchor(x: float, margin: float = 0.06) -> str:
    """Return how text at a share of the width is aligned, so that it stays inside."""
    return "start" if x < margin else "end" if x > 1 - margin else "middle"


def rule(x: float, top: float, bottom: float, **look: object) -> Markup:
    """Return a vertical line."""
    place = {"x1": percent(x), "x2": percent(x), "y1": top, "y2": bottom}
    return element("line", **{**place, "stroke": GRID, **look})


def figure(height: float, label: str, *children: str) -> Markup:
    """Return an SVG as wide as its container; `label` describes it to screen readers."""
    box: dict[str, object] = {"width": "100%", "height": height, "role": "img"}
    look = {"aria_label": label, "font_family": "inherit", "style": "overflow:visible"}
    return element("svg", *children, **box, **look)


@dataclass(frozen=True)
class Scale:
    """An axis, from `low` at 0 to `high` at 1."""

    low: float
    high: float
    log: bool = False
    whole: bool = False  # whether its ticks are whole numbers

    @classmethod
    def over(cls, values: Iterable[float], log: bool = False, whole: bool = False) -> Scale:
        """Return the axis that holds all finite values."""
        known = [min(max(value, -LARGEST), LARGEST) for value in values if math.isfinite(value)]
        low, high = min(known, default=0.0), max(known, default=0.0)
        # A single value stands in the middle.
        room = 0.0 if low < high else 0.5 * abs(low) or 0.5
        return cls(low - room, high + room, log, whole)

    def __call__(self, value: float) -> float:
        """Return the place of a value; of one beyond the axis, its end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = map(math.log, (low, high, value))
        return (value - low) / (high - low) if high > low and math.isfinite(value) else 0.5

    def ticks(self, most: int) -> list[float]:
        """Return round values on the axis; at least two, if that is possible."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            exponents = range(math.floor(low), math.ceil(high) + 1)
            ticks = self._within(step * 10.0**at for at in exponents for step in (1, 2, 5))
            if len(exponents) > 4 or not 0 < len(ticks) <= most + 1:
                decades = self._within(10.0**at for at in exponents)
                ticks = decades[:: math.ceil(len(decades) / most) or 1]
            return ticks
        least = (self.high - self.low) / most or 1.0
        exponent = math.floor(math.log10(least))
        places = (exponent - 1, exponent, exponent + 1)
        steps = [float(f"{step}e{at}") for at in places for step in (1, 2, 2.5, 5)]
        steps = [step for step in steps if step and (not self.whole or step % 1 == 0)] or [1.0]
        fitting = sum(step < least for step in steps)
        ticks = []
        for step in reversed(steps[: fitting + 1]):
            ends = math.ceil(self.low / step), math.floor(self.high / step)
            ticks = [round(at * step, 2 - exponent) for at in range(ends[0], ends[1] + 1)]
            if len(ticks) > 1:
                break
        return self._within(ticks)

    def _within(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]


def legend(names: Mapping[str, int]) -> Markup:
    """Name the candidates by the colour of their place; those beyond the colours are one entry."""
    named = [(name, place) for name, place in names.items() if place < len(COLOURS)]
    others = len(names) - len(named)
    entries = [
        element("li", fitted(name, 60), data_legend=place, style=f"--own:{colour(place)}")
        for name, place in named
    ]
    if others:
        look = f"--own:{colour(len(COLOURS))}"
        entries.append(element("li", f"{plural(others, 'other candidate')}", style=look))
    return element("ul", *entries, class_="legend")
