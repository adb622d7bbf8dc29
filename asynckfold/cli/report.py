"""The verb ``report``: build the report of a run, or serve its page while the run goes on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from asynckfold.cli.output import Output
from asynckfold.errors import InterruptedRunError, Problem
from asynckfold.system import terminal

FIGURES = ("png", "svg", "pdf")


def report(parsed: argparse.Namespace, out: Output) -> int:
    """Build the report and print its path; return 1 if the audit fails, see ``--fail-on``."""
    # Not for `--help`, which imports this module.
    from asynckfold.store import open_run

    codes = [] if parsed.fail_on is None else [code.strip() for code in parsed.fail_on.split(",")]
    problems = [*parsed.problems, *(_code_problems(codes, parsed.serve) if codes else ())]
    with open_run(parsed.directory, "DIR", problems) as store:
        if not parsed.serve:
            from asynckfold.results.cv_results import read_results
            from asynckfold.results.report.page import write_report

            path = str(write_report(store, figures=parsed.figures))
            audit = read_results(store).audit() if codes else None
            out.data({"report": path} | ({} if audit is None else {"audit": audit}))
            for line in [path, *("" if audit is None else str(audit)).splitlines()]:
                out.say(line)
            # What is named must have been checked.
            failing = {*audit.codes, *audit.not_checked} if audit is not None else set[str]()
            return int(bool(failing & {*codes} or (audit and "any" in codes)))
    return _serve(Path(parsed.directory), out)


def _code_problems(codes: Sequence[str], serve: bool) -> Iterator[Problem]:
    from asynckfold.results.audit import CHECKS

    if serve or not {*codes} <= {*CHECKS, "any"}:
        rule = "--fail-on must name codes of the audit, and goes without --serve"
        yield Problem(rule, repr(",".join(codes)), f"Pass any, or of {', '.join(CHECKS)}.")


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
