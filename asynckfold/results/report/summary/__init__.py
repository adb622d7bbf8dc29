"""The numbers of a report: plain frozen data, read from the store alone.

Everything that the figures, the page and ``results.json`` show is gathered here, once; the
statistics are those of `paired` and `confusion`. Text that a user or a user's code may have written
is cleaned on its way in.

============ =======================================================================
`run`        `Summary` and what computes it, from the parts that follow
`candidates` the ranking: scores fold by fold, learning curves, classes
`machine`    cores in use over time, packed and serial
`jobs`       every attempt, how jobs were packed, what averaging did in them
`speedup`    serial against packed: seconds, and accuracy fold by fold
`failures`   failures grouped by their error; lines of the run's log
`facts`      what the plan says, and the command that reproduces the run
============ =======================================================================
"""

from __future__ import annotations

from asynckfold.results.report.summary.candidates import CandidateRow, Curve
from asynckfold.results.report.summary.jobs import Bar
from asynckfold.results.report.summary.machine import USE_POINTS, Use
from asynckfold.results.report.summary.run import (
    Summary,
    summarize,
)
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
