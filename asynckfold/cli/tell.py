"""What a run says in the terminal: tables to standard output, trouble to standard error."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asynckfold.errors import AsyncKFoldError
from asynckfold.plan import Plan
from asynckfold.result import CVResults
from asynckfold.store import RunStore


class Output:
    """Where words go: tables to standard output, trouble to standard error.

    A reader that goes away (``asynckfold run | head -1``) silences the output and stops nothing.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.json = bool(getattr(parsed, "json", False))
        self._console = Console(highlight=False, soft_wrap=True)

    def say(self, what: Any = "") -> None:
        """Print for people; nothing when JSON is asked for."""
        if not self.json:
            self._print(
                lambda: self._console.print(what if not isinstance(what, str) else Text(what))
            )

    def data(self, what: Mapping[str, Any]) -> None:
        """Print one JSON object when asked for."""
        if self.json:
            text = json.dumps(what, default=str)
            self._print(lambda: _write(sys.stdout, text))

    def error(self, text: str) -> None:
        """Print to standard error."""
        self._print(lambda: _write(sys.stderr, text))

    def _print(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BrokenPipeError:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, sys.stdout.fileno())
            os.close(quiet)


def _write(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def tell_results(root: Path, out: Output, failure: str, with_report: bool) -> int:
    """Print the table, the best, the speedup and the report's path; return the exit code."""
    from asynckfold.kfold import load_results

    with RunStore.read(root) as store:
        results = load_results(store)
        fingerprint = store.fingerprint()
    page = results.report() if with_report else None
    counts = results.counts
    complete = any(row.complete for row in results.candidates)
    out.data(
        {
            **counts,
            "fingerprint": fingerprint,
            "best": results.best_params_ if complete else None,
            "best_score": results.best_score_ if complete else None,
            "seconds": results.seconds,
            "serial_seconds": results.baseline.seconds if results.baseline else None,
            "baseline": results.baseline.kind if results.baseline else None,
            "speedup": results.speedup,
            "report": str(page) if page else None,
        }
    )
    out.say(_results_table(results))
    for line in _result_lines(results, failure):
        out.say(line)
    if page:
        out.say(f"report: {page}")
    return 1 if counts["done"] < counts["planned"] else 0


def _results_table(results: CVResults) -> Table:
    metric = results.plan.scoring[0]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("rank", "model", "scheduler", metric, "95 % interval", "folds", "seconds"):
        table.add_column(name, justify="left" if name in ("model", "scheduler") else "right")
    for row in results.to_frame().to_dict("records"):
        known = row[f"mean_{metric}"] == row[f"mean_{metric}"]
        complete = row["folds_done"] == row["folds"]
        table.add_row(
            str(int(row["rank"])) if complete else "-",
            Text(str(row["model"])),
            Text(str(row["scheduler"])),
            f"{row[f'mean_{metric}']:.4f} ± {row[f'std_{metric}']:.4f}" if known else "n/a",
            f"{row['ci_low']:.4f} … {row['ci_high']:.4f}" if complete else "",
            f"{row['folds_done']}/{row['folds']}" + ("" if complete else " incomplete"),
            f"{row['fit_seconds']:.1f}" if row["fit_seconds"] == row["fit_seconds"] else "",
        )
    return table


def _result_lines(results: CVResults, failure: str) -> Iterator[str]:
    counts = results.counts
    if any(row.complete for row in results.candidates):
        best = results.best_params_
        yield (
            f"best: {best['model']} with {best['scheduler']}, "
            f"{results.plan.scoring[0]} {results.best_score_:.4f}"
        )
    baseline, speedup = results.baseline, results.speedup
    if baseline is not None and speedup is not None:
        what = "measured" if baseline.kind == "measured" else "estimated from some batches"
        yield (
            f"speedup: {speedup:.2f}x, serial loop {baseline.seconds:.1f} s ({what}, "
            f"{baseline.threads} threads) / packed {results.seconds:.1f} s"
        )
    unfinished = {
        state: number
        for state, number in counts.items()
        if state not in ("planned", "done") and number
    }
    if unfinished:
        parts = ", ".join(f"{number} {state}" for state, number in unfinished.items())
        yield f"{counts['done']} of {counts['planned']} jobs done, {parts}"
        shown = {item.error for item in results.results.values() if item.error}
        yield from (f"  {error}" for error in sorted(shown)[:5])
    elif failure:
        yield failure


def partial_report(root: Path, out: Output) -> None:
    """Build the report of an interrupted run; its failure is told, and fails nothing."""
    from asynckfold.report.page import write_report

    try:
        with RunStore.read(root) as store:
            out.error(f"partial report: {write_report(store)}")
    except (AsyncKFoldError, OSError) as error:
        out.error(f"no partial report: {error}")


def plan_table(found: Plan, sizes: Sequence[tuple[int, int]]) -> Table:
    """Return one row a candidate; `sizes` holds (train, valid) samples by fold."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("model", "scheduler", "folds", "train", "valid"):
        table.add_column(name)
    trains, valids = zip(*sizes, strict=True)
    for model, lr_schedule in found.candidates:
        table.add_row(
            Text(model),
            Text(lr_schedule),
            str(len(sizes)),
            _range(trains),
            _range(valids),
        )
    return table


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of nested mappings."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
