"""The numbers of a report: plain frozen data, read from the store alone.

All that figures, page and ``results.json`` show is gathered here once, and text of users is cleaned
on its way in. Names of fields are the keys of ``results.json``.

============ =================================================================
`run`        `Summary`, computed from the parts that follow
`candidates` the ranking: scores fold by fold, learning curves, classes
`jobs`       attempts, packing, averaging, failures, the event log
`machine`    CPU use over time, packed and serial
`speedup`    serial against packed: seconds, and accuracy fold by fold
`facts`      what the plan says, and the command that reproduces the run
============ =================================================================
"""

from __future__ import annotations

from asynckfold.results.report.summary.candidates import CandidateRow, Curve
from asynckfold.results.report.summary.jobs import Bar
from asynckfold.results.report.summary.machine import USE_POINTS, Use
from asynckfold.results.report.summary.run import Summary, summarize
from asynckfold.results.report.summary.speedup import AccuracyPair

__all__ = [
    "USE_POINTS",
    "AccuracyPair",
    "Bar",
    "CandidateRow",
    "Curve",
    "Summary",
    "Use",
    "summarize",
]
