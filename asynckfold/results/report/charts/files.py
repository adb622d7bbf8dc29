"""The figures as vectors for a paper: SVG and PDF."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

import matplotlib

from asynckfold.results.report.charts.figures import FIGURES
from asynckfold.results.report.charts.style import Drawing, applied, as_svg
from asynckfold.results.report.summary import Summary

# Nothing that changes by itself: the same run gives the same bytes.
_UNDATED = {"CreationDate": None, "Creator": None, "Producer": None}


@applied
def as_pdf(drawing: Drawing) -> bytes:
    """Render a figure as PDF, with embedded TrueType fonts, which journals ask for."""
    buffer = io.BytesIO()
    matplotlib.rcParams["pdf.fonttype"] = 42
    drawing.figure.savefig(buffer, format="pdf", metadata=_UNDATED)
    return buffer.getvalue()


FORMATS: Mapping[str, Callable[[Drawing], bytes]] = {"svg": as_svg, "pdf": as_pdf}


def figure_files(summary: Summary, kind: str) -> dict[str, bytes]:
    """Return every figure that the run has numbers for, by the name of its file."""
    drawn = ((name, make(summary)) for name, make in FIGURES.items())
    return {f"{name}.{kind}": FORMATS[kind](found) for name, found in drawn if found is not None}
