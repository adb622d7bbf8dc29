"""The folder of a run: job folders, summaries, what a crash left, and a new name for all of it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.candidate_names import base_of
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Result
from asynckfold.store.layout import CHECKPOINT, SPLITS, SUMMARY, foreign_names, job_folder
from asynckfold.system.files import (
    TEMPORARY,
    is_plain,
    make_folder,
    read_plain,
    remove,
    settle,
    storage_errors,
    sync_folder,
    write_whole,
)

MOST_NAMED = 5
"""A message names this many files."""


def make_job_folders(root: Path, jobs: Iterable[Job]) -> None:
    """Create the folders of jobs, durably: a checkpoint is no safer than its folder."""
    folders = {job_folder(root, job) for job in jobs}
    for folder in folders:
        make_folder(folder, durable=False)
    with storage_errors(root):
        for outer in {outer for folder in folders for outer in folder.parents}:
            if outer.is_relative_to(root):
                sync_folder(outer)


# After a crash: every step may be killed and repeated


def damaged(
    root: Path, job: Job, refs: Sequence[CheckpointRef]
) -> Iterator[tuple[CheckpointRef, str]]:
    """Set aside checkpoints that differ from what was recorded; yield each with the reason."""
    folder = job_folder(root, job)
    wrong = settle(folder, TEMPORARY, {Path(ref.file).name: ref.sha256 for ref in refs})
    for ref in refs:
        name = Path(ref.file).name
        reason = wrong.get(name)
        if root / ref.file != folder / name:
            reason = "it is not in the folder of its job"
        if reason:
            yield ref, reason


def clear_up(root: Path, jobs: Iterable[Job], recorded: Mapping[str, Iterable[str]]) -> None:
    """Remove temporary files, and checkpoints and summaries that are not in `recorded`, by job."""
    ours = re.compile(f"{TEMPORARY.pattern}|{CHECKPOINT.pattern}|{re.escape(SUMMARY)}")
    for job in jobs:
        names = {Path(file).name: None for file in recorded.get(job.id, ())}
        settle(job_folder(root, job), ours, names)
    settle(root, re.compile(rf"{SPLITS}\.\d+\.tmp"), {})
    settle(root / "oof", TEMPORARY, {})
    for path in (root / "report").glob("*.tmp"):
        # A process beside the sweep may be drawing at this moment.
        if TEMPORARY.fullmatch(path.name) and not Path("/proc", path.name.split(".")[-2]).exists():
            remove(path)


def remove_out_of_fold(root: Path) -> None:
    """Remove the files of out-of-fold outputs; the end of a call writes them again."""
    if not (root / "oof").is_symlink():
        settle(root / "oof", re.compile(r".+\.npz"), {})


# summary.json: what one would look up or grep; nothing reads it back


def write_summary(root: Path, job: Job, result: Result) -> None:
    """Write the summary of a job that has ended; raise `StorageError` if the disk refuses."""
    folder = job_folder(root, job)
    make_folder(folder)
    text = json.dumps(_summary(job, result), indent=1, allow_nan=False)
    write_whole(folder / SUMMARY, f"{text}\n".encode())


def _summary(job: Job, result: Result) -> dict[str, Any]:
    last = result.epochs[-1] if result.epochs else None
    return {
        "job": job.id,
        "model": base_of(job.model),
        "scheduler": base_of(job.lr_schedule),
        **({"params": job.params} if job.params else {}),
        "repeat": job.repeat,
        "fold": job.fold,
        **({} if job.inner is None else {"inner": job.inner}),
        "status": result.status,
        "error": result.error,
        "scores": {name: _finite(value) for name, value in result.scores.items()},
        "train_loss": _finite(last.train_loss) if last else None,
        "valid_loss": _finite(last.valid_loss) if last else None,
        "epochs": len(result.epochs),
        "seconds": _finite(result.fit_seconds),
        "attempts": result.attempt,
        **({"node": result.node} if result.node else {}),
        "device": result.device,
        "cores": list(result.cores),
        "threads": result.threads,
        "peak_memory": result.peak_memory,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def take_files(source: Path, target: Path) -> None:
    """Copy what lies in the folder of a job into that of the same job in another run."""
    for path in sorted(source.iterdir()):
        if path.name != SUMMARY and is_plain(path) and not TEMPORARY.fullmatch(path.name):
            write_whole(target / path.name, read_plain(path))


# resume="never"


def name_aside(root: Path) -> Path:
    """Return the first free name for the folder of an earlier run.

    Examples
    --------
    >>> name_aside(Path("/nowhere/mnist")).as_posix()
    '/nowhere/mnist.earlier-1'
    """
    number = 1
    while os.path.lexists(aside := root.with_name(f"{root.name}.earlier-{number}")):
        number += 1
    return aside


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
    aside = name_aside(place)
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
    with storage_errors(place):
        make_folder(place)
        place.chmod(mode)
        sync_folder(place.parent)
    return aside
