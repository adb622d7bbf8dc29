"""What a run says in the terminal: tables to standard output, trouble to standard error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from asynckfold.api.display import shown
from asynckfold.errors import AsyncKFoldError
from asynckfold.results.candidates import folds_note
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sanitize import plain_data
from asynckfold.results.utilization import Packing, packing_of
from asynckfold.store import RunStore
from asynckfold.system import terminal
from asynckfold.system.console import console, spinner
from asynckfold.system.plain_text import one_line

WIDE = 240
"""Columns of what goes into a file or a pipe."""


class Output:
    """Where words go: tables to standard output, trouble to standard error.

    A reader that goes away (``asynckfold run | head -1``) silences the output and stops nothing.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.json = bool(getattr(parsed, "json", False))
        # What is no terminal has no width: a file or a pipe gets whole names, not 80 columns.
        self._console = console(width=None if terminal.is_terminal() else WIDE)

    def say(self, what: Any = "") -> None:
        """Print a line, or a table, for people; nothing when JSON is asked for."""
        if not self.json:
            self._console.print(Text(one_line(what)) if isinstance(what, str) else what)

    def data(self, what: Mapping[str, Any]) -> None:
        """Print one JSON object when asked for."""
        if self.json:
            terminal.write(f"{json.dumps(plain_data(what), default=str)}\n")

    def error(self, text: str) -> None:
        """Print to standard error."""
        terminal.complain(text)


def patience(parsed: argparse.Namespace, text: str) -> AbstractContextManager[object]:
    """Show on a terminal that something is going on, while the first seconds pass."""
    if parsed.quiet or not terminal.is_terminal(stderr=True):
        return nullcontext()
    place = console(stderr=True)
    return shown(place.status(text, spinner=spinner(place)))


def tell_results(root: Path, out: Output, with_report: bool) -> int:
    """Print the table, the best, the speedup and the report's path; return the exit code."""
    from asynckfold.api.kfold import load_results
    from asynckfold.results.read import refit_note

    with RunStore.read(root) as store:
        results, packing, refit = load_results(store), packing_of(store), refit_note(store)
        data = store.about.get("data")
    page = results.report() if with_report else None
    out.data(
        {
            **_numbers(results),
            **_packing(packing),
            "refit": refit,
            "report": str(page) if page else None,
        }
    )
    out.say(_results_table(results))
    if data:
        out.say(f"data: {data}")
    for line in result_lines(results):
        out.say(line)
    if refit:
        out.say(refit)
    trace = next((item.traceback for item in results.results.values() if item.traceback), "")
    if "\n" in trace.strip():
        out.error(f"the first of them:\n{trace.strip()}")
    if page:
        out.say(f"report: {page}")
    return 1 if results.counts["done"] < results.counts["planned"] else 0


def _numbers(results: CVResults) -> dict[str, Any]:
    """The run as plain data."""
    timing, best = results.timing, _best(results)
    return {
        **results.counts,
        "fingerprint": results.fingerprint,
        "bit_identity": asdict(results.bit_identity),
        "best": best,
        "best_score": results.best_score_ if best else None,
        "seconds": results.seconds,
        "serial_seconds": timing.serial_seconds,
        "baseline": timing.kind or None,
        "speedup": timing.ratio,
        "estimated_speedup": timing.estimate,
        "speedup_note": timing.text,
    }


def _packing(packing: Packing | None) -> dict[str, Any]:
    """What was predicted and what came of it, as plain data."""
    if packing is None:
        return {}
    predicted = packing.predicted
    return {
        "makespan": packing.makespan,
        "predicted_makespan": predicted and predicted.makespan,
        "lower_bound": packing.lower_bound,
        "held": packing.held,
    }


def _best(results: CVResults) -> dict[str, str] | None:
    try:
        return results.best_params_
    except ValueError:
        return None  # no candidate has a score on every fold


def _results_table(results: CVResults) -> Table:
    metric = results.plan.scoring[0]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    both = ("device",) if results.plan.devices else ()
    words = ("model", "scheduler", *both)
    for name in ("rank", *words, metric, "95 % interval", "folds", "seconds"):
        table.add_column(name, justify="left" if name in words else "right")
    for row in results.to_frame().to_dict("records"):
        known = row[f"mean_{metric}"] == row[f"mean_{metric}"]
        complete = row["folds_done"] == row["folds"]
        table.add_row(
            "-" if row["rank"] != row["rank"] else str(int(row["rank"])),
            Text(one_line(row["model"])),
            Text(one_line(row["scheduler"])),
            *(row[name] for name in both),
            f"{row[f'mean_{metric}']:.4f} ± {row[f'std_{metric}']:.4f}" if known else "n/a",
            f"{row['ci_low']:.4f} … {row['ci_high']:.4f}" if complete else "",
            folds_note(row["folds_done"], row["folds"]),
            f"{row['fit_seconds']:.1f}" if row["fit_seconds"] == row["fit_seconds"] else "",
        )
    return table


def result_lines(results: CVResults) -> Iterator[str]:
    """What is said below the table, line by line."""
    from asynckfold.api.kfold import failure_lines

    counts, best = results.counts, _best(results)
    if best:
        yield (
            f"best: {best['model']} with {best['scheduler']}, "
            f"{results.plan.scoring[0]} {results.best_score_:.4f}{_verdict(results)}"
        )
    if results.baseline is not None:
        yield results.speedup_note
    unfinished = {
        state: number
        for state, number in counts.items()
        if state not in ("planned", "done") and number
    }
    if unfinished:
        parts = ", ".join(f"{number} {state}" for state, number in unfinished.items())
        yield f"{counts['done']} of {counts['planned']} jobs done, {parts}"
        yield from failure_lines(results)
    yield f"fingerprint {results.fingerprint}, {results.bit_identity}"


def _verdict(results: CVResults) -> str:
    """Say whether the lead is one, in the sense of the report."""
    lead = results.lead
    if lead is None:
        return ""
    return {
        "tie": f"; a tie with {lead.runner_up}",
        "chance": f"; ahead of {lead.runner_up}, perhaps by chance",
        "untestable": f"; ahead of {lead.runner_up}",
        "real": f"; ahead of {lead.runner_up}, probably real",
    }[lead.difference.verdict]


def partial_report(root: Path, out: Output) -> None:
    """Build the report of an interrupted run; its failure is told, and fails nothing."""
    from asynckfold.results.report.page import write_report

    if not (root / "run.db").exists():
        return  # it was interrupted before there was anything to tell
    try:
        with RunStore.read(root) as store:
            if store.has_plan:
                out.error(f"partial report: {write_report(store)}")
    except (AsyncKFoldError, OSError) as error:
        out.error(f"no partial report: {error}")
