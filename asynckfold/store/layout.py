"""Where things lie in the folder of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from asynckfold.errors import Problem
from asynckfold.jobs.plan import Job
from asynckfold.system.files import slug

DATABASE = "run.db"
LOCK = "run.lock"
SPLITS = "splits.npz"
REFIT = "refit"
"""Below it are runs of their own, of one candidate on all samples each."""
INITIAL = "initial"
"""Below it are the weights that models had at first which were given as instances."""
CHECKPOINT = re.compile(r"checkpoint-.+\.safetensors")


MOST_PATH = 504 - len(f"/{DATABASE}")
"""Bytes of a run's folder as an absolute path: with those of a journal, SQLite opens up to 512."""

MOST_NAME = 255
"""Bytes of one name in it: no file system of Linux has longer ones."""


def path_problems(root: Path, refit: bool = False) -> Iterator[Problem]:
    """Yield why a folder cannot be that of a run, whatever is there, nor of one in it."""
    most = MOST_PATH - refit * (len(f"/{REFIT}") + 2 * len(f"/{slug('x' * 300)}"))
    place = os.fsencode(os.path.abspath(root))  # noqa: PTH100
    longest = max(map(len, place.split(b"/")))
    if len(place) > most or longest > MOST_NAME:
        yield Problem(
            f"the folder of a run has a path of at most {most} bytes, {MOST_NAME} a name",
            f"one of {len(place)} bytes, {longest} in its longest name",
            "Choose a folder with a shorter path.",
        )


_NETWORKS = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|fuse\.(sshfs|s3fs|gcsfuse|rclone)")


def network_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the network file system that a folder lies on, or ``""``."""
    try:
        device = folder.stat().st_dev
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    place = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [place] and _NETWORKS.fullmatch(after.split()[0]):
            return after.split()[0]
    return ""


def network_notes(root: Path) -> tuple[str, ...]:
    """Return what a user should know about the file system of a run."""
    name = network_of(root)
    if not name:
        return ()
    return (
        f"{root} is on {name}, where locks and fsync are only as good as the server: prefer a "
        "local disk, and start no second run in it from another machine",
    )


def job_folder(root: Path, job: Job) -> Path:
    """Return the folder of a job's checkpoints and log."""
    repeat = [f"repeat-{job.repeat}"] if job.repeated else []
    return root.joinpath(slug(job.model), slug(job.lr_schedule), *repeat, f"fold-{job.fold}")


def refit_folder(root: Path, model: str, lr_schedule: str) -> Path:
    """Return the folder of the run that trains a candidate on all samples."""
    return root / REFIT / slug(model) / slug(lr_schedule)


def initial_weights(root: Path, model: str) -> Path:
    """Return the file of the weights that a model had at first, where it was given as one."""
    return root / INITIAL / f"{slug(model)}.safetensors"


def refit_folders(root: Path) -> list[Path]:
    """Return the folders of all such runs; no link is followed, which may lead to this one."""
    found = sorted(path.parent for path in (root / REFIT).glob(f"*/*/{DATABASE}"))
    return [
        path
        for path in found
        if not any(item.is_symlink() for item in (path, path.parent, root / REFIT))
    ]


def up_to(root: Path, folder: Path) -> Iterator[Path]:
    """Yield the folders above `folder`, the last is `root`."""
    for outer in folder.parents:
        yield outer
        if outer == root:
            return
