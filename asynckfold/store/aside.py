"""Rename the folder of an earlier run to make room for a new one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from asynckfold.errors import Problem, StorageError, refuse
from asynckfold.jobs.plan import Job
from asynckfold.store.layout import foreign_names
from asynckfold.system.files import make_folder, storage_error, sync_folder

MOST_NAMED = 5
"""A message names this many files."""


def aside_of(root: Path) -> Path:
    """Return the first free name for the folder of an earlier run.

    Examples
    --------
    >>> aside_of(Path("/nowhere/mnist")).as_posix()
    '/nowhere/mnist.earlier-1'
    """
    number = 1
    while os.path.lexists(found := root.with_name(f"{root.name}.earlier-{number}")):
        number += 1
    return found


def aside_problems(root: Path, jobs: Iterable[Job]) -> Iterator[Problem]:
    """Yield why the folder of a run must keep its name: it may be that of the user's script."""
    if names := foreign_names(root, jobs):
        more = f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED)
        yield Problem(
            "resume='never' renames the folder of the run, which must hold nothing else",
            f"{root} with {', '.join(names[:MOST_NAMED])}{more}",
            "Use another folder, or move what is not the run's out of it.",
        )


def set_aside(root: Path) -> Path:
    """Rename the folder of a run and create an empty one in its place.

    A kill at any instant leaves the earlier run whole, under its old or its new name.

    Parameters
    ----------
    root : Path
        The folder, which the caller holds. A link is kept: its target is renamed.

    Returns
    -------
    Path
        The new name.

    Raises
    ------
    InputError
        The folder cannot be renamed; nothing was changed.
    StorageError
        The disk refuses the new folder; the run has its new name already.
    """
    place = Path(os.path.realpath(root))
    mode = place.stat().st_mode & 0o7777
    aside = aside_of(place)
    try:
        place.rename(aside)
    except OSError as error:
        # A mount point, or inside a folder that only others may write to.
        problem = Problem(
            "resume='never' needs a folder that can be renamed, to keep the run in it",
            f"{place}: {error.strerror}",
            "Use another folder.",
        )
        refuse([problem])
    try:
        make_folder(place)
        place.chmod(mode)
        sync_folder(place.parent)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, place) from error
    return aside
