"""The verb ``report``: build the HTML report of a run."""

from __future__ import annotations

import argparse

from asynckfold.cli.output import Output
from asynckfold.cli.run_folder import open_run


def report(parsed: argparse.Namespace, out: Output) -> int:
    """Build the report and print its path."""
    with open_run(parsed.directory, parsed.problems) as store:
        from asynckfold.results.report.page import write_report

        path = str(write_report(store))
    out.data({"report": path})
    out.say(path)
    return 0
