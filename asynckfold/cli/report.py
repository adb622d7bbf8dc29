"""The verb ``report``: build the HTML report of a run, its tables and figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from asynckfold.cli.output import Output
from asynckfold.cli.run_folder import open_run
from asynckfold.errors import Problem, nearest

FIGURES = ("png", "svg", "pdf")


def report(parsed: argparse.Namespace, out: Output) -> int:
    """Build the report and print its path."""
    with open_run(parsed.directory, [*parsed.problems, *_problems(parsed.figures)]) as store:
        from asynckfold.results.report.page import write_report

        path = str(write_report(store, figures=parsed.figures))
    out.data({"report": path})
    out.say(path)
    return 0


def _problems(figures: str) -> Iterator[Problem]:
    if figures not in FIGURES:
        rule = f"--figures must be one of {', '.join(FIGURES)}"
        yield Problem(rule, repr(figures), nearest(figures, FIGURES).strip() or "Pass pdf.")
