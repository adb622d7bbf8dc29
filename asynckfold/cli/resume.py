"""The verb ``resume``: continue a run by its folder."""

from __future__ import annotations

import argparse
import shlex

from asynckfold.cli.flags import imports_user_code
from asynckfold.cli.output import Output
from asynckfold.cli.parser import parse_stored
from asynckfold.cli.run import run
from asynckfold.cli.run_folder import open_run
from asynckfold.errors import InputError, Problem


def resume(parsed: argparse.Namespace, out: Output) -> int:
    """Continue a run of built-in models and data."""
    with open_run(parsed.directory, parsed.problems) as store:
        words, stored = parse_stored(store.about)
    if stored is None or imports_user_code(stored):
        rule = (
            "resume continues runs of built-in models and data only; a run's folder is never "
            "trusted to name code"
        )
        shown = shlex.join(["asynckfold", *words]) if words else "the script that started it"
        remedy = "Run that same command again: it continues the run."
        raise InputError([Problem(rule, f"a run of {shown}", remedy)])
    stored.root, stored.line, stored.resume = parsed.directory, words, "must"
    stored.json, stored.verbose, stored.quiet = parsed.json, parsed.verbose, parsed.quiet
    stored.allow_different_software = parsed.allow_different_software
    return run(stored, out)
