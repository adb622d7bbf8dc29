"""Clean up the folder of a run after a crash; every step may be killed and repeated."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from asynckfold.errors import StorageError
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.jobs.plan import Job
from asynckfold.store.layout import CHECKPOINT, SPLITS, SUMMARY, job_folder, up_to
from asynckfold.system.files import (
    TEMPORARY,
    alone,
    make_folders,
    settle,
    storage_error,
    sync_folder,
)


def make_job_folders(root: Path, jobs: Iterable[Job]) -> None:
    """Create the folders of jobs, durably: a checkpoint is no safer than its folder."""
    folders = {job_folder(root, job) for job in jobs}
    inner = {outer for folder in folders for outer in up_to(root, folder)}
    for folder in folders:
        make_folders(root, folder)
    try:
        for outer in inner:
            sync_folder(outer)
    except OSError as error:
        raise storage_error(error, root) from error


def damaged(
    root: Path, job: Job, refs: Sequence[CheckpointRef]
) -> Iterator[tuple[CheckpointRef, str]]:
    """Set aside checkpoints that differ from what was recorded; yield each with the reason."""
    folder = job_folder(root, job)
    wrong = settle(root, folder, TEMPORARY, {Path(ref.file).name: ref.sha256 for ref in refs})
    for ref in refs:
        name = Path(ref.file).name
        reason = wrong.get(name)
        if root / ref.file != folder / name:
            reason = "it is not in the folder of its job"
        if reason:
            yield ref, reason


def clear_up(
    root: Path, jobs: Iterable[Job], recorded: Mapping[str, Iterable[str]]
) -> tuple[Job, ...]:
    """Remove temporary files, and checkpoints and summaries that are not in `recorded`, by job id.

    Returns the jobs whose summary is recorded and missing.
    """
    ours = re.compile(f"{TEMPORARY.pattern}|{CHECKPOINT.pattern}|{re.escape(SUMMARY)}")
    without = []
    for job in jobs:
        names = {Path(file).name: None for file in recorded.get(job.id, ())}
        if SUMMARY in settle(root, job_folder(root, job), ours, names):
            without.append(job)
    settle(root, root, re.compile(rf"{SPLITS}\.\d+\.tmp"), {})
    settle(root, root / "oof", TEMPORARY, {})
    try:
        with alone(root, root / "report", TEMPORARY, wait_s=0):
            pass
    except StorageError as error:
        # It is missing, no folder, or being written at this moment.
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EAGAIN):
            raise
    return tuple(without)
