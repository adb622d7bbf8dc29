"""Names and paths in the folder of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from asynckfold.errors import Problem
from asynckfold.jobs.plan import Job
from asynckfold.system.files import slug

DATABASE = "run.db"
LOCK = "run.lock"
SPLITS = "splits.npz"
REFIT = "refit"
"""Holds one run per candidate that was trained on all samples."""
INITIAL = "initial"
"""Holds the initial weights of models that were passed as instances."""
CHECKPOINT = re.compile(r"checkpoint-.+\.safetensors")
FINAL = "final.safetensors"
"""The trained weights of a job, under their names; its last checkpoint holds the rest."""
SUMMARY = "summary.json"

_OWN = re.compile(
    rf"(?:{DATABASE}(?:-journal|-wal|-shm)?|{LOCK}|{SPLITS}|oof|{REFIT}|{INITIAL}|report"
    # What `DistributedTester` and `export` add to the folder of a run.
    r"|test\.json|confusion_matrix\.npy|train_data_\d+\.csv)(?:\.\d+\.tmp)?"
)

MOST_PATH = 504 - len(f"/{DATABASE}")
"""Bytes of a run's absolute path: SQLite opens up to 512, and appends ``-journal``."""

MOST_NAME = 255
"""Bytes of one name: the limit of Linux file systems."""


def path_problems(root: Path, refit: bool = False) -> Iterator[Problem]:
    """Yield why a path is too long for a run, or for a refit inside it."""
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


def foreign_names(root: Path, jobs: Iterable[Job]) -> list[str]:
    """Return the names in the folder of a run that no run writes."""
    ours = {slug(job.model) for job in jobs}
    names = sorted(path.name for path in root.iterdir())
    return [name for name in names if name not in ours and not _OWN.fullmatch(name)]


def refit_folder(root: Path, model: str, lr_schedule: str) -> Path:
    """Return the folder of the run that trains a candidate on all samples."""
    return root / REFIT / slug(model) / slug(lr_schedule)


def initial_weights(root: Path, model: str) -> Path:
    """Return the file of the initial weights of a model that was passed as an instance."""
    return root / INITIAL / f"{slug(model)}.safetensors"


def refit_folders(root: Path) -> list[Path]:
    """Return the folders of all refits; a link could lead back here, so none is followed."""
    folders = sorted(path.parent for path in (root / REFIT).glob(f"*/*/{DATABASE}"))
    return [
        path
        for path in folders
        if not any(item.is_symlink() for item in (path, path.parent, root / REFIT))
    ]


def up_to(root: Path, folder: Path) -> Iterator[Path]:
    """Yield the folders above `folder`, up to `root`."""
    for outer in folder.parents:
        yield outer
        if outer == root:
            return
