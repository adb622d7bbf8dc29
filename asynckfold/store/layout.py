"""Names and paths in the folder of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asynckfold.jobs.plan import Job
from asynckfold.system.files import slug

DATABASE = "run.db"
LOCK = "run.lock"
SPLITS = "splits.npz"
PARTS = "parts"
"""Holds one run for each part of a run that is trained in several."""
REFIT = "refit"
"""Holds one run per candidate that was trained on all samples."""
INITIAL = "initial"
"""Holds the initial weights of models that were passed as instances."""
CHECKPOINT = re.compile(r"checkpoint-.+\.safetensors")
FINAL = "final.safetensors"
"""The trained weights of a job, under their names; its last checkpoint holds the rest."""
SUMMARY = "summary.json"

_OWN = re.compile(
    rf"(?:{DATABASE}(?:-journal|-wal|-shm)?|{LOCK}|{SPLITS}|oof|{PARTS}|{REFIT}|{INITIAL}|report"
    # What `DistributedTester` and `export` add to the folder of a run.
    r"|test\.json|confusion_matrix\.npy|train_data_\d+\.csv)(?:\.\d+\.tmp)?"
)


def job_folder(root: Path, job: Job) -> Path:
    """Return the folder of a job's checkpoints and log."""
    return root.joinpath(slug(job.model), slug(job.lr_schedule), *job.place)


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
