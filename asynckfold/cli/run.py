"""The verbs ``run`` and ``train``: cross-validate a sweep, or train one model alone."""

from __future__ import annotations

import argparse
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from asynckfold.cli.output import Output, spinner_with
from asynckfold.cli.run_folder import continue_with, own_folder
from asynckfold.cli.summary import partial_report, print_results
from asynckfold.cli.sweep_file import make_kfold, sweep_parts
from asynckfold.errors import (
    OUT_OF_TIME,
    AllJobsFailedError,
    InterruptedRunError,
    JobFailedError,
    RefitFailedError,
)
from asynckfold.system.signals import listening


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
    with spinner_with("importing torch", parsed):
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
    from asynckfold.api.refit import chosen
    from asynckfold.results.cv_results import refit_of

    refit = kfold.settings.refit
    wanted = chosen(results, refit) if refit else None
    is_refitted = wanted is None or refit_of(results, wanted.name) is not None
    if not results.counts["pending"] and is_refitted:
        return code
    out.error(f"the time budget is over; {continue_with(parsed.line)}")
    return OUT_OF_TIME
