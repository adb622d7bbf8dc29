"""The verbs ``run``, ``train`` and ``resume``: cross-validate a sweep, or train one model alone.

The folder that ``resume`` continues may be a stranger's. Of the command that is stored there, only
what does no more than compute is taken: numbers, switches and names of built-in things. What names
a file, a host or code comes from the command line.
"""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asynckfold.cli.flags import flags, imports_user_code
from asynckfold.cli.output import Output
from asynckfold.cli.parser import parse_stored
from asynckfold.cli.run_folder import continue_with, own_folder, with_root
from asynckfold.cli.summary import partial_report, print_results
from asynckfold.cli.sweep_file import make_kfold, sweep_parts
from asynckfold.errors import (
    OUT_OF_TIME,
    AllJobsFailedError,
    InterruptedRunError,
    JobFailedError,
    Problem,
    RefitFailedError,
    refuse,
)
from asynckfold.store import open_run
from asynckfold.system.signals import listening

_NAMES = (
    *("models", "schedulers", "optimizer", "param", "scoring", "rank_by", "pos_label", "sampler"),
    *("criterion", "target_transform", "part", "max_memory", "min_free_memory"),
)
"""Flags whose texts are taken from the folder of a run, beside numbers, switches and words."""

_REPLACED = ("root", "resume", "allow_different_software")
"""Flags whose values come from this command."""


def run(parsed: argparse.Namespace, out: Output) -> int:
    """Run or continue a sweep; return the exit code."""
    with own_folder(parsed) as folder:
        if folder:
            out.error(f"run: {folder}")
        return _run(parsed, out)


def _run(parsed: argparse.Namespace, out: Output) -> int:
    from asynckfold.engines import warm_pool

    # An invalid niceness is refused later.
    warm_pool.start_early(["torchvision"], parsed.nice if parsed.nice in range(20) else 0)
    sweep = sweep_parts(parsed)
    kfold = make_kfold(parsed, sweep)
    root = Path(parsed.root)
    # Built here, after what is said first.
    with_report, kfold.settings = kfold.settings.report, replace(kfold.settings, report=False)
    try:
        with warnings.catch_warnings():
            # The table and the exit code report failed jobs.
            warnings.simplefilter("ignore", category=UserWarning)
            results = kfold(*sweep, **sweep.grid)
    except (AllJobsFailedError, JobFailedError) as error:
        print_results(root, out, with_report=with_report)
        if isinstance(error, RefitFailedError):
            out.error(str(error))
        return AllJobsFailedError.exit_code
    except InterruptedRunError as interrupt:
        # Before the report, which takes seconds.
        out.error(str(interrupt))
        out.error(continue_with(parsed.line))
        with suppress(InterruptedRunError), listening() as signals, signals.anew():
            if with_report:
                partial_report(root, out)
        return interrupt.exit_code
    code = print_results(root, out, with_report=with_report)
    plan, ended = results.whole
    outside = plan.jobs_outside(kfold.settings.part)
    if outside:
        code = int(any(item.is_failure for item in ended.values()))
    from asynckfold.api.refit import chosen
    from asynckfold.results.cv_results import refit_of

    refit = kfold.settings.refit
    wanted = chosen(results, refit) if refit else None
    is_refitted = wanted is None or refit_of(results, wanted.name) is not None
    left = {job.id for job in plan.jobs} - outside - ended.keys()
    if not left and is_refitted:
        return code
    out.error(f"the time budget is over; {continue_with(parsed.line)}")
    return OUT_OF_TIME


def resume(parsed: argparse.Namespace, out: Output) -> int:
    """Continue a run of built-in models and data."""
    root = Path(parsed.directory)
    with open_run(parsed.directory, "DIR", parsed.problems) as store:
        about = store.about
    words, stored = parse_stored(about)
    refuse(_trust_problems(words, stored, root, about))
    assert stored is not None
    stored.root, stored.line, stored.resume = parsed.directory, words, "must"
    stored.json, stored.verbose, stored.quiet = parsed.json, parsed.verbose, parsed.quiet
    stored.allow_different_software = parsed.allow_different_software
    return run(stored, out)


def _trust_problems(
    words: list[str], stored: argparse.Namespace | None, root: Path, about: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield what the stored command names that a run's folder is not trusted with."""
    named = "" if stored is None else ", ".join(_untrusted(stored))
    if stored is not None and not named:
        return
    folder, line = str(about.get("folder", "")), words
    place, origin = Path(folder), "command" if "command" in about else "script"
    if stored is not None and (place / (stored.root or "")).resolve() != root.resolve():
        line = with_root(words, str(root.resolve()))  # the folder was moved
    cd = "" if place.resolve() == Path.cwd() else f"cd {shlex.quote(folder)} && "
    shown = f"command again, if it is yours; it continues the run: {cd}"
    yield Problem(
        "a run's folder is never trusted to name code, files or hosts, and resume continues runs "
        "of built-in models and data only",
        named
        or (f"a run of {shlex.join(['asynckfold', *words])}" if words else f"a run of a {origin}"),
        f"Run that same {shown}{shlex.join(['asynckfold', *line])}"
        if words
        else f"Run that same {origin} again: it continues the run.",
    )


def _untrusted(stored: argparse.Namespace) -> Iterator[str]:
    if imports_user_code(stored):
        yield stored.file or f"--models {stored.models}"
    for dest, item in flags().items():
        value = getattr(stored, dest, None)
        is_plain = dest in _NAMES or ((item.is_switch or item.is_plain) and dest != "download")
        is_plain = is_plain or (dest, type(value)) == ("folds", int)
        if value is None or dest in _REPLACED or is_plain or (dest, value) == ("data", "digits"):
            continue
        yield f"--{item.flag}" if value is True else f"--{item.flag} {value}"
