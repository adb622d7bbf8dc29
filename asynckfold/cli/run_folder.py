"""A run's folder: naming and opening it, and the command that continues the run."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from asynckfold.system.files import FOLDER_MODE, make_folder, slug, sync_folder

RUNS = Path("runs")
"""Holds the folders of runs that were given none."""


@contextmanager
def own_folder(parsed: argparse.Namespace) -> Iterator[str]:
    """Give a run without ``--root`` a new folder for the length of a block.

    Yields its path; empty where ``--root`` was given, or the run will be refused. The folder is
    removed at the end if nothing was written to it.
    """
    folder = None if parsed.root or parsed.problems else _claimed(_subject(parsed))
    if folder is None:
        parsed.root = parsed.root or str(RUNS / _subject(parsed))
        yield ""
        return
    parsed.root = str(folder)
    # In place: whoever continues the run holds this list.
    parsed.line[:] = with_root(parsed.line, parsed.root)
    try:
        yield parsed.root
    finally:
        with suppress(OSError):
            folder.rmdir()


def with_root(words: Sequence[str], root: str) -> list[str]:
    """Return the words of a command with another folder for its run."""
    words = list(without("--root", words))
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], "--root", root, *words[end:]]


def _subject(parsed: argparse.Namespace) -> str:
    """Return the name of the data for a folder: ``"iris"`` for ``csv:data/iris.csv``."""
    kind, colon, path = (parsed.data or "").partition(":")
    place = Path(parsed.file or path).resolve()
    name = place.name if kind == "folder" else place.stem
    return slug(name if parsed.file or colon else kind or "run")


def _claimed(subject: str) -> Path | None:
    """Make a folder named by the data and the local time; None if the disk refuses."""
    name = f"{subject}-{time.strftime('%Y%m%d-%H%M')}"
    with suppress(OSError):
        make_folder(RUNS)
        for number in count(1):
            folder = RUNS / (name if number == 1 else f"{name}-{number}")
            # Of two runs that begin at once, one finds it made.
            with suppress(FileExistsError):
                folder.mkdir(FOLDER_MODE)
                sync_folder(RUNS)
                return folder
    return None


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
    """Yield the words of a command without ``--resume``.

    Examples
    --------
    >>> list(without_restart(["run", "--resume", "never", "-q", "--resume=never"]))
    ['run', '-q']
    """
    yield from without("--resume", words)


def without(flag: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command without a flag and its value."""
    rest = iter(words)
    for word in rest:
        if word == flag:
            next(rest, None)
        elif not word.startswith(f"{flag}="):
            yield word
