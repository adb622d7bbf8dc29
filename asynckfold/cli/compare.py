"""The verb ``compare``: the scores of two runs, as a page, too; ``--bits``: where they differ."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from asynckfold.cli.output import Output, table_of
from asynckfold.errors import Problem
from asynckfold.results.compare import Comparison, ScoreComparison, compare_runs, compare_scores
from asynckfold.results.cv_results import read_results
from asynckfold.results.verdict import p_value
from asynckfold.store import open_run
from asynckfold.system.plain_text import one_line

if TYPE_CHECKING:
    from rich.table import Table


def compare(parsed: argparse.Namespace, out: Output) -> int:
    """Compare two runs; return 0, or with ``--bits`` 1 if they are not the same."""
    names = (parsed.directory, parsed.other)
    problems = [*parsed.problems, *_page_problems(parsed)]
    with open_run(names[0], "DIR", problems) as first, open_run(names[1], "DIR") as second:
        bits = compare_runs(first, second)
        if parsed.bits:
            return _say_bits(bits, names, out)
        shown = one_line(names[0]), one_line(names[1])
        results = read_results(first), read_results(second)
        scores = compare_scores(*results, shown)
        page = {}
        if parsed.html:
            # It loads a template engine.
            from asynckfold.results.report.page import write_comparison

            stores = first, second
            page["page"] = str(write_comparison(stores, results, scores, bits, parsed.html))
    out.data({**asdict(scores), "identical": bits.identical, "plan": bits.plan, **page})
    for sentence in scores.sentences:
        out.say(sentence)
    out.say(_table(scores, is_wide=out.is_wide))
    if bits.plan:
        out.say(f"plan: {bits.plan}")
    out.say(f"bits: {'identical' if bits.identical else 'not identical, --bits says where'}")
    for path in page.values():
        out.say(f"page: {path}")
    return 0


def _page_problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    if parsed.html and parsed.bits:
        yield Problem("--html shows scores, and goes without --bits", "both", "Leave one out.")
    if parsed.html and Path(parsed.html).is_dir():
        remedy = "Pass the path of a page, such as comparison.html."
        yield Problem("--html must name a file", f"the folder {parsed.html}", remedy)


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
        change, low, high, p = row.change(scores.runs[1])
        interval = "" if math.isnan(low) else f"{low:+.4f} … {high:+.4f}"
        difference = "" if math.isnan(change) else f"{change:+.4f}"
        p_text = p_value(p) if row.difference else ""
        rows.append([row.name, *cells, difference, *[interval for _ in intervals], p_text])
    name = f"{scores.metric} of"
    return table_of([name, *heads, "difference", *intervals, "p"], rows, left=(name,))


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
