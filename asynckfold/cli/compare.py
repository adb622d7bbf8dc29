"""The verb ``compare``: are two runs the same, and where do they first differ?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from asynckfold.cli.output import Output
from asynckfold.cli.run_folder import open_run
from asynckfold.results.compare import Comparison, compare_runs


def compare(parsed: argparse.Namespace, out: Output) -> int:
    """Compare two runs; return 0 if they are the same, else 1."""
    names = (parsed.directory, parsed.other)
    with open_run(names[0], parsed.problems) as first, open_run(names[1]) as second:
        found = compare_runs(first, second)
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
