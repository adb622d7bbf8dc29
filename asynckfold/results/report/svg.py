"""Inline SVG for pages and notebooks: x in percent, y in pixels.

So a figure is as wide as its container, and its text keeps its size. Colours are CSS variables of
the page with a fallback, and follow its theme.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup, escape

from asynckfold.results.report.sentences import columns_of, plural

# Okabe and Ito (2008), "Color Universal Design": distinct with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5A00", "#000000")
OTHERS = "#b4b9c2"
INK, FAINT = "var(--ink, currentColor)", "var(--faint, currentColor)"
GRID, PAPER = "var(--line, #8884)", "var(--paper, transparent)"
FONT = 12

_STEPS = (1, 2, 2.5, 5)

_JOINERS = "\u200d\ufe0f"
"""Zero width joiner, and what asks for an emoji."""


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
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{pairs}>{Markup().join(children)}</{name}>")


def _value(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


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
        known = [value for value in values if math.isfinite(value)] or [0.0]
        low, high = min(known), max(known)
        # A single value stands in the middle.
        room = 0.0 if low < high else 0.5 * abs(low) or 0.5
        largest = sys.float_info.max
        return cls(max(low - room, -largest), min(high + room, largest), log, whole)

    def __call__(self, value: float) -> float:
        """Return the place of a value; of one beyond the axis, its end."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        # Halves, since the whole range may be more than the largest float.
        span = high / 2 - low / 2
        return (value / 2 - low / 2) / span if span > 0 and math.isfinite(value) else 0.5

    def ticks(self, most: int) -> list[float]:
        """Return round values on the axis."""
        if max(abs(self.low), abs(self.high)) > 1e150 or (self.log and self.low < 1e-150):
            ticks = [self.low, self.high]
        elif self.log:
            exponents = range(
                math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
            )
            ticks = self._within(step * 10.0**at for at in exponents for step in (1, 2, 5))
            if len(exponents) > 4 or not 0 < len(ticks) <= most + 1:
                decades = self._within(10.0**at for at in exponents)
                ticks = decades[:: math.ceil(len(decades) / most) or 1]
        else:
            ticks = self._round_ticks(most)
        return ticks

    def _round_ticks(self, most: int) -> list[float]:
        """Return multiples of the least round step that fits; at least two, if that is possible."""
        least = (self.high / 2 - self.low / 2) * 2 / most or 1.0
        exponent = math.floor(math.log10(least))
        steps = [
            float(f"{step}e{at}") for at in range(exponent - 1, exponent + 2) for step in _STEPS
        ]
        steps = [step for step in steps if step % 1 == 0] or [1.0] if self.whole else steps
        place = next((at for at, step in enumerate(steps) if step >= least), len(steps) - 1)
        while True:
            step = steps[place]
            ends = math.floor(self.low / step), math.ceil(self.high / step)
            ticks = self._within(
                round(at * step, 2 - exponent) for at in range(ends[0], ends[1] + 1)
            )
            if len(ticks) > 1 or not place:
                return ticks
            place -= 1

    def _within(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]


def fitted(name: str, columns: int) -> str:
    """Cut the middle out of a name that is too wide; wide letters count twice.

    >>> fitted("LeNet5/cosine", 9), fitted("漢字漢字漢字", 9), fitted("a\\u200dbcdee\\u0301x", 5)
    ('LeNe…sine', '漢字…漢字', 'a…x')
    """
    letters = " ".join(name.split())
    if columns_of(letters) <= columns:
        return letters
    half = (columns - 1) // 2
    head, tail = letters[:half], letters[-half:]
    while columns_of(head) > half:
        head = head[:-1]
    while columns_of(tail) > half:
        tail = tail[1:]
    # Half of a joined sign, or an accent without its letter, would be another sign.
    while tail and (unicodedata.combining(tail[0]) or tail[0] in _JOINERS):
        tail = tail[1:]
    return f"{head.rstrip(_JOINERS)}…{tail}"


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
