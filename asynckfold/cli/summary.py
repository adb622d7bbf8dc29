"""What a run prints at its end: the table of candidates, the best, the speedup, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.api.report import written
from asynckfold.cli.output import Output, table_of
from asynckfold.jobs.result import counts_line
from asynckfold.results import tables
from asynckfold.results.cv_results import CVResults
from asynckfold.results.nested import NestedScores
from asynckfold.results.utilization import Packing, packing_of
from asynckfold.store import RunStore
from asynckfold.system.units import duration

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 10
"""Candidates in the table, unless ``-v`` asks for all."""

SPARE = ("95 % interval", "seconds")
"""Columns of the table that a narrow terminal does without."""


def print_results(root: Path, out: Output, *, with_report: bool) -> int:
    """Print the results of a run and, if asked, build its report; return the exit code."""
    from asynckfold.api.stored_results import load_results
    from asynckfold.results.cv_results import refit_note

    with RunStore.read(root) as store:
        results, packing, refit = load_results(store), packing_of(store), refit_note(store)
        data = store.about.get("data")
    page, fault = written(root) if with_report else (None, "")
    out.data(
        {
            **_numbers(results),
            **_packing(packing),
            "refit": refit,
            "root": str(root),
            "report": str(page) if page else None,
        }
    )
    rows = None if out.verbose else MOST_ROWS
    out.say(_results_table(results, rows, SPARE * out.is_wide))
    if rows is not None and len(results.candidates) > rows:
        more = len(results.candidates) - rows
        out.say(f"and {more} more, which -v and the report show")
    if data:
        out.say(f"data: {data}")
    for line in result_lines(results, verbose=out.verbose):
        out.say(line)
    if refit:
        out.say(refit)
    trace = next((item.traceback for item in results.whole[1].values() if item.traceback), "")
    if "\n" in trace.strip():
        out.error(f"traceback of the first failed job:\n{trace.strip()}")
    if page:
        out.say(f"report: {page}", wraps=False)
    if fault:
        out.error(fault)
    counts = results.counts
    return 1 if counts["done"] + counts["cancelled"] < counts["planned"] else 0


def _numbers(results: CVResults) -> dict[str, Any]:
    """Return the run for ``--json``."""
    timing, highest = results.timing, _highest(results)
    # Best is only what beats all others, not the first of a tie.
    is_clear = results.verdict.best is not None
    return {
        **results.counts,
        "fingerprint": results.fingerprint,
        "bit_identity": asdict(results.bit_identity),
        "best": highest if is_clear else None,
        "best_score": results.best_score_ if is_clear else None,
        "highest": highest,
        "highest_score": results.best_score_ if highest else None,
        "verdict": str(results.verdict),
        "seconds": results.seconds,
        "serial_seconds": timing.serial_seconds,
        "estimated_serial_seconds": timing.estimated_serial_seconds,
        "baseline": timing.kind or None,
        "speedup": timing.ratio,
        "estimated_speedup": timing.estimate,
        "speedup_note": timing.text,
        **(_nested(results.nested) if results.nested else {}),
    }


def _nested(nested: NestedScores) -> dict[str, Any]:
    numbers = {name: getattr(nested, name) for name in ("mean", "std", "bias")}
    return {"nested": {**numbers, "folds": [asdict(fold) for fold in nested.folds]}}


def _packing(packing: Packing | None) -> dict[str, Any]:
    """Return predicted and measured makespan for ``--json``."""
    if packing is None:
        return {}
    predicted = packing.predicted
    return {
        "makespan": packing.makespan,
        "predicted_makespan": predicted and predicted.makespan,
        "lower_bound": packing.lower_bound,
        "held": packing.held,
    }


def _highest(results: CVResults) -> dict[str, str] | None:
    try:
        return results.best_params_
    except ValueError:
        return None  # no candidate has a score on every fold


def _results_table(results: CVResults, most: int | None, spare: Sequence[str]) -> Table:
    """Return the ranking with these of the `SPARE` columns; a clear winner is marked."""
    metric, winner = results.plan.scoring[0], results.verdict.best is not None
    head, *rows = tables.ranking(results.to_frame().to_dict("records"), metric, spare)
    names = head[1 : head.index(metric)]
    if winner:
        head.append("")
        rows = [[*row, "" if place else "winner"] for place, row in enumerate(rows)]
    return table_of(head, rows[:most], names, ["bold"] * winner, gap=1)


def result_lines(results: CVResults, *, verbose: int = 0) -> Iterator[str]:
    """Yield the lines below the table; the fingerprint only with `verbose`."""
    from asynckfold.api.kfold import failure_lines

    counts = results.counts
    yield from results.verdict.sentences
    if results.baseline is not None:
        yield results.speedup_note
    yield f"{counts_line(counts)} in {duration(results.seconds)}"
    yield from failure_lines(results)
    if verbose:
        yield f"fingerprint {results.fingerprint}, {results.bit_identity}"
    elif results.bit_identity.reasons:
        yield str(results.bit_identity)


def partial_report(root: Path, out: Output) -> None:
    """Build the report of an interrupted run; a failure is printed and changes no exit code."""
    page, fault = written(root)
    if page or fault:
        out.error(f"partial report: {page}" if page else fault)
