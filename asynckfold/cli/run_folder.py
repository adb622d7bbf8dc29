"""Opening a run's folder, and the command that continues the run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckfold.errors import Problem
    from asynckfold.store import RunReader

REMOVED = ("--elastic",)
"""Flags of earlier versions; none of them took a value. Commands with them are still accepted."""


def open_run(directory: str, problems: Iterable[Problem] = ()) -> RunReader:
    """Open the run in a folder.

    Parameters
    ----------
    directory : str
        The run's folder.
    problems : iterable of Problem
        Problems of the command that were found before.

    Raises
    ------
    InputError
        There are problems, or the folder holds no run.
    StorageError
        The folder cannot be read.
    """
    from asynckfold.store import open_run

    return open_run(directory, "DIR", problems)


def stored_words(about: Mapping[str, Any]) -> list[str]:
    """Return the words of the command that started a run; empty for a script."""
    stored = about.get("cli")
    return [str(word) for word in stored] if isinstance(stored, list) else []


def stored_command(about: Mapping[str, Any]) -> str:
    """Return the command that continues a run, from its ``about``."""
    words, command = stored_words(about), about.get("command")
    if words:
        return shlex.join(["asynckfold", *without_restart(words)])
    shown = shlex.join(map(str, command)) if isinstance(command, list) and command else ""
    return f"the same call{f' ({shown})' if shown else ''}"


def continue_with(words: Sequence[str]) -> str:
    """Return the line that names the command that continues an interrupted one."""
    return f"continue with: {shlex.join(['asynckfold', *without_restart(words)])}"


def without_restart(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command without ``--resume`` and without removed flags.

    Examples
    --------
    >>> list(without_restart(["run", "--resume", "never", "-q", "--resume=never", "--elastic"]))
    ['run', '-q']
    """
    rest = iter(words)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith("--resume=") and word not in REMOVED:
            yield word
