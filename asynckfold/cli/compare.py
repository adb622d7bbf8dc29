"""The verb ``compare``: the scores of two runs, or with ``--bits`` where they first differ."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from asynckfold.cli.output import Output
from asynckfold.cli.run_folder import open_run
from asynckfold.results.compare import (
    CandidateScores,
    Comparison,
    ScoreComparison,
    compare_runs,
    compare_scores,
)
from asynckfold.results.cv_results import read_results
from asynckfold.results.verdict import p_value
from asynckfold.system.plain_text import one_line

INTERVAL, STD = "95 % interval", "standard deviation"
SPARE = (INTERVAL, STD)
"""What the table does without on a narrow terminal, the first one first."""


def compare(parsed: argparse.Namespace, out: Output) -> int:
    """Compare two runs; return 0, or with ``--bits`` 1 if they are not the same."""
    names = (parsed.directory, parsed.other)
    with open_run(names[0], parsed.problems) as first, open_run(names[1]) as second:
        bits = compare_runs(first, second)
        if parsed.bits:
            return _say_bits(bits, names, out)
        shown = one_line(names[0]), one_line(names[1])
        scores = compare_scores(read_results(first), read_results(second), shown)
    out.data({**asdict(scores), "identical": bits.identical, "plan": bits.plan})
    for sentence in scores.sentences:
        out.say(sentence)
    # Names are folded only where the other columns leave no room for them.
    for spare in (SPARE, SPARE[1:], ()):
        table = _table(scores, spare)
        if out.has_room_for(table):
            break
    out.say(table)
    if bits.plan:
        out.say(f"plan: {bits.plan}")
    out.say(f"bits: {'identical' if bits.identical else 'not identical, --bits says where'}")
    return 0


def _table(found: ScoreComparison, spare: Sequence[str]) -> Table:
    """Return the table of all candidates, with these of what it can spare."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(f"{found.metric} of", overflow="fold")
    intervals = [name for name in spare if name == INTERVAL]
    for name in (*_heads(found.runs), "difference", *intervals, "p"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row in found.candidates:
        scores = (
            "n/a"
            if math.isnan(mean)
            else f"{mean:.4f} ± {std:.4f}"
            if STD in spare
            else f"{mean:.4f}"
            for mean, std in zip(row.means, row.stds, strict=True)
        )
        difference, interval, p = _difference(row, found.runs)
        shown = [interval for _ in intervals]
        table.add_row(Text(row.name), *scores, difference, *shown, p)
    return table


def _heads(runs: tuple[str, str]) -> tuple[str, str]:
    """Return the names of the folders, without the paths to them if they differ."""
    first, second = (Path(name).name for name in runs)
    return (first, second) if first != second else runs


def _difference(row: CandidateScores, runs: tuple[str, str]) -> tuple[str, str, str]:
    """Return second - first, its interval and p."""
    difference, found = row.means[1] - row.means[0], row.difference
    if found is None:
        return "" if math.isnan(difference) else f"{difference:+.4f}", "", ""
    sign = 1 if found.first == runs[1] else -1
    low, high = sorted((sign * found.ci_low, sign * found.ci_high))
    interval = "" if math.isnan(low) else f"{low:+.4f} … {high:+.4f}"
    return f"{sign * found.mean + 0:+.4f}", interval, p_value(found.p)


def _say_bits(found: Comparison, names: tuple[str, str], out: Output) -> int:
    out.data(asdict(found))
    for line in _lines(found):
        out.say(line)
    for name, claim in zip(names, found.claims, strict=True):
        out.say(f"{name}: {claim}")
    return 0 if found.identical else 1


def _lines(found: Comparison) -> Iterator[str]:
    if found.identical:
        yield f"identical: {found.jobs} jobs, fingerprint {found.fingerprints[0]}"
        return
    yield f"not identical: {found.equal_jobs} of {found.jobs} jobs have equal results"
    for what, text in (("plan", found.plan), ("results", found.results)):
        yield f"{what}: {text or 'no difference in what both runs have'}"
    if found.software:
        yield f"possible cause: {'; '.join(found.software)}"
