"""Seconds of the serial loop and of the packed run, as inline SVG."""

from __future__ import annotations

import math

from markupsafe import Markup

from asynckfold.results.report import sentences
from asynckfold.results.report.inline import svg
from asynckfold.results.report.sentences import duration
from asynckfold.results.report.summary import Summary

MODELS = 16
"""Models with a bar of their own."""
WHOLE = "whole sweep"


def seconds_of(
    summary: Summary,
) -> tuple[dict[str, tuple[float, float]], tuple[float, float], str] | None:
    """Return (serial, packed) seconds of each model and of the whole, and their kind."""
    found = summary.speedup
    if found is None or found.why_not:
        return None
    is_measured = found.ratio is not None
    pairs: dict[str, tuple[float, float]] = {}
    for row in summary.candidates:
        serial, packed = pairs.get(row.model, (0.0, 0.0))
        own_serial = row.serial_seconds if is_measured else row.estimated_serial_seconds
        own = [0.0 if math.isnan(it) else it for it in (own_serial, row.packed_seconds)]
        pairs[row.model] = serial + own[0], packed + own[1]
    models = {name: pair for name, pair in pairs.items() if min(pair) > 0}
    serial_seconds = found.serial_seconds if is_measured else found.estimated_serial_seconds
    return models, (serial_seconds or 0.0, found.packed_seconds), found.kind


def speedup_svg(summary: Summary) -> Markup | None:
    """Draw the seconds as inline SVG; where they were measured, the ideal ones, too."""
    found = seconds_of(summary)
    if found is None:
        return None
    models, whole, kind = found
    ideal = sentences.ideal(summary) if kind == "measured" else None
    rows = {**dict(list(models.items())[:MODELS]), **({WHOLE: whole} if len(models) != 1 else {})}
    longest = max(max(pair) for pair in rows.values()) or 1.0
    about = "" if kind == "measured" else "about "
    grey = svg.colour(len(svg.COLOURS))
    step = 62 if ideal is None else 80
    parts = []
    for line, (name, (serial, packed)) in enumerate(rows.items()):
        top = step * line
        parts.append(svg.text(svg.fitted(name, 40), 0, top + 14, font_weight="600"))
        ratio = f", {serial / packed:.2f}× as fast" if kind == "measured" else ""
        bars = [
            (serial, grey, kind != "measured", f"{about}{duration(serial)} serial ({kind})"),
            (packed, svg.colour(0), False, f"{duration(packed)} packed{ratio}"),
        ]
        if ideal is not None:
            words = f"{duration(serial / ideal)} ideal: one job per core, {ideal}× as fast"
            bars.append((serial / ideal, grey, True, words))
        for place, (seconds, colour, is_dashed, words) in enumerate(bars):
            y = top + 20 + 18 * place
            wide = max(0.4 * seconds / longest, 0.002)
            shape = {"fill": "none" if is_dashed else colour}
            shape |= {"stroke": colour, "stroke_dasharray": "3 2"} if is_dashed else {}
            where = {"x": 0, "y": y, "width": svg.percent(wide), "height": 14}
            parts.append(svg.element("rect", **where, **shape))
            parts.append(svg.text(words, wide, y + 11, dx=6))
    return svg.figure(step * len(rows), sentences.speed(summary), *parts)
