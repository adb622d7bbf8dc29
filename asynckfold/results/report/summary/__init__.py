"""The numbers of a report: plain frozen data, read from the store alone.

All that figures, page and ``results.json`` show is gathered here once, and text of users is cleaned
on its way in. Names of fields are the keys of ``results.json``.
"""

from __future__ import annotations

from asynckfold.results.report.summary.candidates import CandidateRow, Curve
from asynckfold.results.report.summary.jobs import Bar
from asynckfold.results.report.summary.machine import USE_POINTS, CpuUse
from asynckfold.results.report.summary.run import Summary, summarize
from asynckfold.results.report.summary.speedup import AccuracyPair

__all__ = [
    "USE_POINTS",
    "AccuracyPair",
    "Bar",
    "CandidateRow",
    "Curve",
    "Summary",
    "CpuUse",
    "summarize",
]
