"""The command ``asynckfold``: one verb for each stage; `asynckfold.cli.parser` lists them."""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from asynckfold.api.arguments import Settings
from asynckfold.cli import status as states
from asynckfold.cli.flags import given, in_flags, names_code
from asynckfold.cli.output import Output, partial_report, patience, tell_results
from asynckfold.cli.parser import make_parser, stored_command
from asynckfold.cli.sweep_file import make_kfold, sweep_parts
from asynckfold.errors import (
    OUT_OF_TIME,
    AllJobsFailedError,
    AsyncKFoldError,
    InputError,
    InterruptedRunError,
    JobFailedError,
    Problem,
    RefitFailedError,
    StorageError,
    nearest,
    refuse,
)
from asynckfold.store import RunReader, RunStore
from asynckfold.store.layout import path_problems
from asynckfold.system import terminal
from asynckfold.system.files import reading_error, write_whole
from asynckfold.system.signals import ENDINGS, Interruption, listening

if TYPE_CHECKING:
    from asynckfold.results.compare import Comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; ``sys.argv`` by default.
    """
    return _told(_parsed(sys.argv[1:] if arguments is None else arguments))


def program() -> int:
    """Run the command as its own process; return the exit code, or leave."""
    terminal.open_standard()
    # Called after the exit handlers of what is imported from here on.
    atexit.register(terminal.flush)
    words, leaves = sys.argv[1:], False
    with listening(*ENDINGS):
        try:
            parsed = _parsed(words)
            leaves = not names_code(parsed)
            code = _told(parsed)
            _hear_no_more()
        except InterruptedRunError as interrupt:
            # Nothing had begun, or everything had been printed.
            _hear_no_more()
            terminal.complain(f"{interrupt}\n{_continue_with(words)}")
            code = interrupt.exit_code
        if leaves:
            _leave(code)
    return code


def _hear_no_more() -> None:
    """Ignore signals from here on: nothing is left to save."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def _leave(code: int) -> NoReturn:
    """Exit without tearing down modules, which takes a second with torch.

    Only without code of the user, which may write files or end processes at exit.
    """
    atexit._run_exitfuncs()
    terminal.flush()
    os._exit(code)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    with terminal.steady_streams():
        parsed = make_parser().parse_args(words)
    parsed.line = list(words)
    return parsed


def _told(parsed: argparse.Namespace) -> int:
    """Run the verb and flush what it printed."""
    # Sweep files and libraries print, too, and the reader may have gone.
    with terminal.steady_streams(), listening(*ENDINGS) as signals:
        code = _carried_out(parsed, signals)
        terminal.flush()
        lost = terminal.lost_output()
        if lost:
            terminal.complain(f"asynckfold: standard output is not complete: {lost}")
            # Lost output fails a verb that only prints; a run has its own code.
            code = code or StorageError.exit_code * (parsed.verb in TELLING)
    return code


def _carried_out(parsed: argparse.Namespace, signals: Interruption) -> int:
    """Run the verb; turn errors into messages and exit codes."""
    out = Output(parsed)
    try:
        return VERBS[parsed.verb](parsed, out)
    except KeyboardInterrupt as interrupt:
        with signals.noted():
            _tell_interruption(interrupt, parsed, out)
            return interrupt.exit_code if isinstance(interrupt, InterruptedRunError) else 130
    except AsyncKFoldError as error:
        told = in_flags(error) if isinstance(error, InputError) and _by_flags(parsed) else error
        out.error(f"asynckfold: {getattr(told, 'strerror', None) or told}")
        if error.exit_code == 5 and parsed.verb not in READING:
            out.error(_continue_with(parsed.line))
        return error.exit_code
    except OSError as error:
        if parsed.verb not in READING:
            raise
        out.error(f"asynckfold: {reading_error(error, error.filename or 'a file').strerror}")
        return StorageError.exit_code


def _tell_interruption(
    interrupt: KeyboardInterrupt, parsed: argparse.Namespace, out: Output
) -> None:
    out.error(str(interrupt) or "interrupted; finished jobs stay")
    out.error(_continue_with(parsed.line))


def run(parsed: argparse.Namespace, out: Output) -> int:
    """Cross-validate a sweep, or train one model alone."""
    from asynckfold.engines import warm_pool

    warm_pool.start_early(["torchvision"], _level(parsed))
    with patience(parsed, "importing torch"):
        sweep = sweep_parts(parsed)
        kfold = make_kfold(parsed, sweep)
    try:
        with warnings.catch_warnings():
            # The table and the exit code report failed jobs.
            warnings.simplefilter("ignore", category=UserWarning)
            results = kfold(sweep.models, sweep.schedulers, sweep.opt_fn, sweep.trainer_params)
    except (AllJobsFailedError, JobFailedError) as error:
        tell_results(Path(parsed.root), out, not parsed.no_report)
        if isinstance(error, RefitFailedError):
            out.error(str(error))
        return AllJobsFailedError.exit_code
    except InterruptedRunError as interrupt:
        # First: whoever interrupted may not wait for a report.
        _tell_interruption(interrupt, parsed, out)
        with suppress(InterruptedRunError), listening() as signals, signals.anew():
            partial_report(Path(parsed.root), out)
        return interrupt.exit_code
    code = tell_results(Path(parsed.root), out, not parsed.no_report)
    is_refitted = not kfold.settings.refit or results.refitted or not results.has_best
    if not results.counts["pending"] and is_refitted:
        return code
    out.error(f"the time budget is over; {_continue_with(parsed.line)}")
    return OUT_OF_TIME


def plan(parsed: argparse.Namespace, out: Output) -> int:
    """Print what a run would do."""
    from asynckfold.cli.plan import plan

    return plan(parsed, out)


def data(parsed: argparse.Namespace, out: Output) -> int:
    """Print what a source of data holds."""
    from asynckfold.cli.data import data

    return data(parsed, out)


def resume(parsed: argparse.Namespace, out: Output) -> int:
    """Continue a run by its folder."""
    root = Path(parsed.directory)
    with _opened(parsed.directory) as store:
        words, again = stored_command(store.about)
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
    again.root, again.line, again.resume = str(root), words, "must"
    again.json, again.verbose, again.quiet = parsed.json, parsed.verbose, parsed.quiet
    again.allow_different_software = parsed.allow_different_software
    return run(again, out)


def status(parsed: argparse.Namespace, out: Output) -> int:
    """Print the progress of a run."""
    with _opened(parsed.directory) as store:
        found = states.with_refits(store)
    out.data(found)
    for line in states.lines(found):
        out.say(line)
    return 0


def report(parsed: argparse.Namespace, out: Output) -> int:
    """Build the HTML report."""
    from asynckfold.results.report.page import write_report

    with _opened(parsed.directory) as store:
        path = write_report(store)
    out.data({"report": str(path)})
    out.say(str(path))
    return 0


def export(parsed: argparse.Namespace, out: Output) -> int:
    """Write the weights that a job trained."""
    from asynckfold.cli.export import export

    with _opened(parsed.directory) as store:
        return export(parsed, store, out)


def predict(parsed: argparse.Namespace, out: Output) -> int:
    """Predict other samples with the models of all folds of a candidate."""
    from asynckfold.cli.predict import predict

    with _opened(parsed.directory) as store:
        return predict(parsed, store, out)


def compare(parsed: argparse.Namespace, out: Output) -> int:
    """Compare two runs; return 0 if they are the same, else 1."""
    from asynckfold.results.compare import compare_runs

    with _opened(parsed.directory) as first, _opened(parsed.other) as second:
        found = compare_runs(first, second)
    out.data(asdict(found))
    if found.identical:
        out.say(f"identical: {found.jobs} jobs, fingerprint {found.fingerprints[0]}")
    else:
        _say_differences(found, out)
    for name, claim in zip((parsed.directory, parsed.other), found.claims, strict=True):
        out.say(f"{name}: {claim}")
    return 0 if found.identical else 1


def _say_differences(found: Comparison, out: Output) -> None:
    out.say(f"not identical: {found.equal_jobs} of {found.jobs} jobs have equal results")
    for what, text in (("plan", found.plan), ("results", found.results)):
        out.say(f"{what}: {text or 'no difference among what both have'}")
    if found.software:
        out.say(f"what may explain it: {'; '.join(found.software)}")


def doctor(parsed: argparse.Namespace, out: Output) -> int:
    """Print what this machine offers."""
    from rich.table import Table
    from rich.text import Text

    from asynckfold.api.resources import Sharing
    from asynckfold.cli.doctor import lines, now
    from asynckfold.system.machine import resolve_n_jobs, watched

    sharing = Sharing(**given(parsed, Settings))
    refuse(sharing.problems())
    machine = watched(sharing.machine())
    machine.try_gpus()
    n_jobs = resolve_n_jobs(sharing.n_jobs, machine.max_cores)
    found, load = machine.describe(n_jobs), machine.load(n_jobs)
    would = now(found["cpu"], load)
    out.data({**found, "now": {"jobs": would.jobs, "cores": would.cores, "why": would.why}})
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for subject, sentence in lines(found, load):
        table.add_row(Text(subject, style="dim"), Text(sentence))
    out.say(table)
    return 0


def bench(parsed: argparse.Namespace, out: Output) -> int:
    """Measure, and print the table."""
    from rich.table import Table

    from asynckfold.cli.bench import measure

    refuse(_bench_problems(parsed))
    data = Path(parsed.data) if parsed.data else None
    given = {"data": data, "with_peers": parsed.peers, "tell": out.error}
    table = measure(parsed.subject, quick=parsed.quick, **given)
    out.data(table.to_json())
    shown = Table(*table.columns, title=table.title, box=None, pad_edge=False)
    for row in table.cells():
        shown.add_row(*row)
    out.say(shown)
    for note in table.notes:
        out.say(note)
    if parsed.save:
        write_whole(Path(parsed.save), table.to_markdown(_bench_command(parsed)).encode())
        out.say(f"page: {parsed.save}")
    return 0


def _bench_command(parsed: argparse.Namespace) -> str:
    """Return the command for a page, without paths of this machine."""
    words = ["asynckfold", "bench", parsed.subject]
    for flag, wanted in (("--quick", parsed.quick), ("--peers", parsed.peers)):
        words += [flag] * bool(wanted)
    return shlex.join([*words, *(["--data", "DIR"] if parsed.data else [])])


def _bench_problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    subjects = {"--data": ("nodes", "speed", "trainers"), "--peers": ("speed",)}
    for flag, wanted in (("--data", parsed.data), ("--peers", parsed.peers)):
        if wanted and parsed.subject not in subjects[flag]:
            only = ", ".join(subjects[flag])
            yield Problem(f"{flag} applies to {only} only", f"bench {parsed.subject}", "Drop it.")


def simulate(parsed: argparse.Namespace, out: Output) -> int:
    """Place a large random sweep in virtual time."""
    from asynckfold.cli.simulate import simulate

    return simulate(parsed, out)


TELLING = ("bench", "compare", "doctor", "plan", "simulate", "status")
"""Verbs that only print."""

READING = ("compare", "export", "report", "status")
"""Verbs that read a run and execute no code of the user."""

VERBS = {
    "bench": bench,
    "compare": compare,
    "run": run,
    "train": run,
    "plan": plan,
    "data": data,
    "resume": resume,
    "status": status,
    "report": report,
    "export": export,
    "predict": predict,
    "doctor": doctor,
    "simulate": simulate,
}


def _level(parsed: argparse.Namespace) -> int:
    """Return the niceness by flags; a wrong one is refused later."""
    return parsed.nice if parsed.nice in range(20) else 0


def _opened(directory: str) -> RunReader:
    root = Path(directory)
    refuse(path_problems(root))
    try:
        is_run = (root / "run.db").is_file()
    except OSError as error:
        raise reading_error(error, root) from error
    if not is_run:
        runs = [item.parent.name for item in root.parent.glob("*/run.db")]
        rule = "DIR must be the folder of a run"
        refuse(
            [
                Problem(
                    rule,
                    f"{root}, which holds no run.db",
                    f"Check the path.{nearest(root.name, runs)}",
                )
            ]
        )
    return RunStore.read(root)


def _by_flags(parsed: argparse.Namespace) -> bool:
    return bool(getattr(parsed, "data", None)) or parsed.verb in ("data", "resume", "doctor")


def _continue_with(words: Sequence[str]) -> str:
    return f"continue with: {shlex.join(['asynckfold', *_continuing(words)])}"


def _continuing(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command that continues what another one began.

    Examples
    --------
    >>> list(_continuing(["run", "--resume", "never", "-q", "--resume=never"]))
    ['run', '-q']
    """
    rest = iter(words)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith("--resume="):
            yield word
