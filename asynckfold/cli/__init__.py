"""The command ``asynckfold``: one verb for each stage.

::

    run     cross-validate a sweep; the same command continues it
    plan    what a run would do; starts nothing
    resume  continue a run by its folder
    status  how far a run is
    report  build the HTML report of a run
    doctor  what this machine offers, and what would be used

Exit codes: 0 all done, 1 some jobs failed, 2 bad input and nothing started, 3 the run is held by
another process, 4 the run on disk is damaged, 5 an I/O fault and resumable, 130 interrupted and
resumable.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from asynckfold.cli.parser import make_parser
from asynckfold.cli.parts import make_kfold, names_code, sweep_parts
from asynckfold.cli.tell import (
    Output,
    flat,
    partial_report,
    plan_table,
    tell_results,
)
from asynckfold.engines import pool
from asynckfold.errors import (
    AllJobsFailedError,
    AsyncKFoldError,
    InterruptedRunError,
    JobFailedError,
    Problem,
    refuse,
)
from asynckfold.store import RunStore


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; ``sys.argv`` by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed = make_parser().parse_args(words)
    parsed.line = words
    out = Output(parsed)
    try:
        return VERBS[parsed.verb](parsed, out)
    except InterruptedRunError as interrupt:
        out.error(str(interrupt))
        out.error(f"continue with: {_command(parsed)}")
        return interrupt.exit_code
    except KeyboardInterrupt:
        return InterruptedRunError.exit_code
    except AsyncKFoldError as error:
        out.error(f"asynckfold: {error}")
        if error.exit_code == 5:
            out.error(f"continue with: {_command(parsed)}")
        return error.exit_code


def run(parsed: argparse.Namespace, out: Output) -> int:
    """Cross-validate a sweep."""
    pool.start_early(["torchvision", "sklearn"])
    sweep = sweep_parts(parsed)
    kfold = make_kfold(parsed, sweep)
    code = 0
    failure = ""
    try:
        with warnings.catch_warnings():
            # Failed jobs are told by the table and the exit code.
            warnings.simplefilter("ignore", category=UserWarning)
            kfold(sweep.models, sweep.schedulers, sweep.opt_fn, sweep.trainer_params)
    except (AllJobsFailedError, JobFailedError) as error:
        code, failure = 1, str(error)
    except InterruptedRunError:
        partial_report(Path(parsed.root), out)
        raise
    return max(code, tell_results(Path(parsed.root), out, failure, not parsed.no_report))


def plan(parsed: argparse.Namespace, out: Output) -> int:
    """Print what a run would do."""
    sweep = sweep_parts(parsed)
    kfold = make_kfold(parsed, sweep)
    found, folds = kfold.plan(sweep.models, sweep.schedulers, sweep.opt_fn, sweep.trainer_params)
    from asynckfold.engines.machine import Machine

    machine = Machine(kfold.devices)
    sizes = [(len(fold.train), len(fold.valid)) for fold in folds]
    out.data(
        {
            "jobs": [job.id for job in found.jobs],
            "candidates": ["/".join(pair) for pair in found.candidates],
            "folds": [{"train": train, "valid": valid} for train, valid in sizes],
            "classes": list(found.classes),
            "epochs": found.params.epochs,
            "batch_size": found.batch_size,
            "device": found.device,
            "cores": list(machine.cores),
            "threads_per_job": found.threads_per_job,
        }
    )
    out.say(plan_table(found, sizes))
    slots = machine.max_cores // found.threads_per_job
    where = f"{len(machine.gpus().gpus)} GPUs" if found.device == "cuda" else f"{slots} at a time"
    out.say(
        f"{len(found.jobs)} jobs on {found.device}, {where} on cores "
        f"{', '.join(map(str, machine.cores))}, {found.threads_per_job} thread(s) each; "
        f"{found.params.epochs} epochs in batches of {found.batch_size}"
    )
    out.say("nothing was started")
    return 0


def resume(parsed: argparse.Namespace, out: Output) -> int:
    """Continue a run by its folder."""
    root = Path(parsed.directory)
    with RunStore.read(root) as store:
        stored = store.about.get("cli")
    words = [str(word) for word in stored] if isinstance(stored, list) else []
    again = make_parser().parse_args(words) if words else None
    if again is None or names_code(again):
        shown = shlex.join(["asynckfold", *words]) if words else "the script that started it"
        refuse(
            [
                Problem(
                    "resume starts runs of built-in models and data only; a run's folder is never "
                    "trusted to name code",
                    f"a run of {shown}",
                    "Run that same command again: it continues the run.",
                )
            ]
        )
        return 2
    again.root, again.line = str(root), words
    again.json, again.verbose, again.quiet = parsed.json, parsed.verbose, parsed.quiet
    return run(again, out)


def status(parsed: argparse.Namespace, out: Output) -> int:
    """Say how far a run is."""
    with RunStore.read(parsed.directory) as store:
        counts = store.counts()
        fingerprint, holder = store.fingerprint(), store.holder()
        running = [
            (item, store.epochs(item.job_id)) for item in store.attempts() if item.outcome is None
        ]
        total = store.plan.params.epochs
    out.data({**counts, "fingerprint": fingerprint, "holder": holder})
    out.say(
        f"{counts['planned']} planned = {counts['done']} done + {counts['failed']} failed + "
        f"{counts['diverged']} diverged + {counts['cancelled']} cancelled + "
        f"{counts['pending']} pending ({counts['running']} of them running)"
    )
    if holder:
        out.say(f"held by process {holder.get('pid')} on {holder.get('host')}")
        for attempt, epochs in running:
            where = attempt.device if attempt.device != "cpu" else f"cores {attempt.cores}"
            out.say(f"  {attempt.job_id}: epoch {len(epochs)}/{total} done, {where}")
    out.say(f"fingerprint {fingerprint}")
    return 0


def report(parsed: argparse.Namespace, out: Output) -> int:
    """Build the HTML report."""
    from asynckfold.report.page import write_report

    with RunStore.read(parsed.directory) as store:
        path = write_report(store)
    out.data({"report": str(path)})
    out.say(str(path))
    return 0


def doctor(parsed: argparse.Namespace, out: Output) -> int:
    """Say what this machine offers."""
    from asynckfold.engines.machine import WINDOW_SECONDS, Machine

    machine = Machine()
    time.sleep(2 * WINDOW_SECONDS)
    machine.sample()
    found = machine.describe()
    out.data(found)
    for key, value in found.items():
        section = value if isinstance(value, dict) else {"": value}
        table = Table(title=key, title_justify="left", show_header=False, box=None)
        for name, entry in flat(section):
            table.add_row(Text(name, style="dim"), Text(str(entry)))
        out.say(table)
    return 0


VERBS = {
    "run": run,
    "plan": plan,
    "resume": resume,
    "status": status,
    "report": report,
    "doctor": doctor,
}


def _command(parsed: argparse.Namespace) -> str:
    return shlex.join(["asynckfold", *parsed.line])
