"""The verb ``compare``: the scores of two runs, or with ``--bits`` where they first differ."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from asynckfold.cli.output import Output, table_of
from asynckfold.results.compare import (
    CandidateScores,
    Comparison,
    ScoreComparison,
    compare_runs,
    compare_scores,
)
from asynckfold.results.cv_results import read_results
from asynckfold.results.verdict import p_value
from asynckfold.store import open_run
from asynckfold.system.plain_text import one_line

if TYPE_CHECKING:
    from rich.table import Table


def compare(parsed: argparse.Namespace, out: Output) -> int:
    """Compare two runs; return 0, or with ``--bits`` 1 if they are not the same."""
    names = (parsed.directory, parsed.other)
    with open_run(names[0], "DIR", parsed.problems) as first, open_run(names[1], "DIR") as second:
        bits = compare_runs(first, second)
        if parsed.bits:
            return _say_bits(bits, names, out)
        shown = one_line(names[0]), one_line(names[1])
        scores = compare_scores(read_results(first), read_results(second), shown)
    out.data({**asdict(scores), "identical": bits.identical, "plan": bits.plan})
    for sentence in scores.sentences:
        out.say(sentence)
    out.say(_table(scores, is_wide=out.is_wide))
    if bits.plan:
        out.say(f"plan: {bits.plan}")
    out.say(f"bits: {'identical' if bits.identical else 'not identical, --bits says where'}")
    return 0


def _table(scores: ScoreComparison, *, is_wide: bool) -> Table:
    """Return the table of all candidates; a narrow one has no deviations and intervals."""
    first, second = (Path(name).name for name in scores.runs)
    # The names of the folders, without the paths to them if they differ.
    heads = (first, second) if first != second else scores.runs
    intervals = ["95 % interval"] * is_wide
    rows = []
    for row in scores.candidates:
        cells = [
            "n/a" if math.isnan(mean) else f"{mean:.4f} ± {std:.4f}" if is_wide else f"{mean:.4f}"
            for mean, std in zip(row.means, row.stds, strict=True)
        ]
        difference, interval, p = _difference(row, scores.runs)
        rows.append([row.name, *cells, difference, *[interval for _ in intervals], p])
    name = f"{scores.metric} of"
    return table_of([name, *heads, "difference", *intervals, "p"], rows, left=(name,))


def _difference(row: CandidateScores, runs: tuple[str, str]) -> tuple[str, str, str]:
    """Return second - first, its interval and p."""
    mean, difference = row.means[1] - row.means[0], row.difference
    if difference is None:
        return "" if math.isnan(mean) else f"{mean:+.4f}", "", ""
    sign = 1 if difference.first == runs[1] else -1
    low, high = sorted((sign * difference.ci_low, sign * difference.ci_high))
    interval = "" if math.isnan(low) else f"{low:+.4f} … {high:+.4f}"
    return f"{sign * difference.mean + 0:+.4f}", interval, p_value(difference.p)


def _say_bits(bits: Comparison, names: tuple[str, str], out: Output) -> int:
    out.data(asdict(bits))
    for line in _lines(bits):
        out.say(line)
    for name, claim in zip(names, bits.claims, strict=True):
        out.say(f"{name}: {claim}")
    return 0 if bits.identical else 1


def _lines(bits: Comparison) -> Iterator[str]:
    if bits.identical:
        yield f"identical: {bits.jobs} jobs, fingerprint {bits.fingerprints[0]}"
        return
    yield f"not identical: {bits.equal_jobs} of {bits.jobs} jobs have equal results"
    for what, text in (("plan", bits.plan), ("results", bits.results)):
        yield f"{what}: {text or 'no difference in what both runs have'}"
    if bits.software:
        yield f"possible cause: {'; '.join(bits.software)}"
