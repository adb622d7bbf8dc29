"""The verb ``report``: build the report of a run, or serve its page while the run goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from asynckfold.cli.output import Output
from asynckfold.errors import InterruptedRunError
from asynckfold.system import terminal

FIGURES = ("png", "svg", "pdf")


def report(parsed: argparse.Namespace, out: Output) -> int:
    """Build the report and print its path."""
    # Not for `--help`, which imports this module.
    from asynckfold.store import open_run

    with open_run(parsed.directory, "DIR", parsed.problems) as store:
        if not parsed.serve:
            from asynckfold.results.report.page import write_report

            path = str(write_report(store, figures=parsed.figures))
            out.data({"report": path})
            out.say(path)
            return 0
    return _serve(Path(parsed.directory), out)


def _serve(root: Path, out: Output) -> int:
    """Serve the page until Ctrl-C, which is how it ends well."""
    from asynckfold.results.report.live import LiveServer

    with LiveServer(root) as server:
        out.data({"address": server.address})
        out.say(server.address)
        out.say("Only this machine can open it, and only by this address. Ctrl-C ends it.")
        terminal.flush()
        try:
            server.serve_forever()
        except InterruptedRunError as interrupt:
            if interrupt.exit_code != 130:
                raise
    return 0
