"""The command ``asynckfold``: each verb is a function and a file of the same name."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from asynckfold.cli.flags import imports_user_code, with_flag_names
from asynckfold.cli.output import Output
from asynckfold.cli.parser import VERBS, parse
from asynckfold.cli.run_folder import continue_with
from asynckfold.errors import AsyncKFoldError, InputError, InterruptedRunError, StorageError
from asynckfold.system import terminal
from asynckfold.system.files import reading_error
from asynckfold.system.signals import ENDINGS, Interruption, listening

PRINTING = ("compare", "completion", "doctor", "plan", "status")
"""Verbs that only print."""

READING = ("compare", "export", "report", "status")
"""Verbs that read a run and execute no code of the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; ``sys.argv`` by default.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run_verb(_parsed(words))
    except InputError as error:
        return _refused(error)


def program() -> int:
    """Run the command as a process; return the exit code, or exit."""
    terminal.open_standard()
    # Called after the exit handlers of what is imported from here on.
    atexit.register(terminal.flush)
    words = sys.argv[1:]
    try:
        with listening():
            try:
                return _program(words)
            except InterruptedRunError as interrupt:
                return _interrupted(interrupt, words)
    except InterruptedRunError as interrupt:
        # While the handlers were being installed.
        return _interrupted(interrupt, words)


def _program(words: list[str]) -> int:
    exits_fast = True
    try:
        parsed = _parsed(words)
        words[:] = parsed.line
        exits_fast = not imports_user_code(parsed)
        code = _run_verb(parsed)
    except InputError as error:
        code = _refused(error)
    _ignore_signals()
    if exits_fast:
        _exit_fast(code)
    return code


def _interrupted(interrupt: InterruptedRunError, words: Sequence[str]) -> int:
    """Before anything began, or after everything was printed."""
    _ignore_signals()
    terminal.complain(f"{interrupt}\n{continue_with(words)}")
    return interrupt.exit_code


def load(words: Sequence[str]) -> None:
    """Import the file of the verb, before there is anything that a signal could interrupt."""
    verb = next((word for word in words if word in VERBS), None)
    if verb is not None and not {"-h", "--help", "--help-all"} & {*words}:
        _function(verb)


def _function(verb: str) -> Callable[[argparse.Namespace, Output], int]:
    module = {"train": "run", "resume": "run", "export": "predict"}.get(verb, verb)
    function: Callable[[argparse.Namespace, Output], int] = getattr(
        import_module(f"{__name__}.{module}"), "run" if verb == "train" else verb
    )
    return function


def _ignore_signals() -> None:
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def _exit_fast(code: int) -> NoReturn:
    """Exit without tearing down modules, which takes a second with torch.

    Not for code of the user, which may write files or end processes at exit.
    """
    atexit._run_exitfuncs()
    terminal.flush()
    os._exit(code)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    with terminal.steady_streams():
        return parse(words)


def _refused(error: InputError) -> int:
    terminal.complain(f"asynckfold: {error}")
    return error.exit_code


def _run_verb(parsed: argparse.Namespace) -> int:
    """Run the verb and flush its output."""
    # Sweep files and libraries print, too, and the reader may be gone.
    with terminal.steady_streams(), listening() as signals:
        code = _exit_code(parsed, signals)
        terminal.flush()
        lost = terminal.lost_output()
        if lost:
            terminal.complain(f"asynckfold: standard output is not complete: {lost}")
            # Lost output fails a verb that only prints; a run sets the exit code.
            code = code or StorageError.exit_code * (parsed.verb in PRINTING)
    return code


def _exit_code(parsed: argparse.Namespace, signals: Interruption) -> int:
    """Run the verb; turn errors into messages and exit codes."""
    out = Output(parsed)
    try:
        return _function(parsed.verb)(parsed, out)
    except KeyboardInterrupt as interrupt:
        with signals.noted():
            out.error(str(interrupt) or "interrupted; the results of finished jobs are kept")
            if parsed.verb not in PRINTING:
                out.error(continue_with(parsed.line))
            return interrupt.exit_code if isinstance(interrupt, InterruptedRunError) else 130
    except AsyncKFoldError as error:
        uses_flags = getattr(parsed, "data", None) or parsed.verb in ("data", "resume", "doctor")
        shown = with_flag_names(error) if isinstance(error, InputError) and uses_flags else error
        out.error(f"asynckfold: {getattr(shown, 'strerror', None) or shown}")
        if error.exit_code == StorageError.exit_code and parsed.verb not in (*READING, *PRINTING):
            out.error(continue_with(parsed.line))
        return error.exit_code
    except OSError as error:
        if parsed.verb not in READING:
            raise
        out.error(f"asynckfold: {reading_error(error, error.filename or 'a file').strerror}")
        return StorageError.exit_code
