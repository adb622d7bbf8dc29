"""Where things lie in the folder of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from asynckfold.files import slug
from asynckfold.plan import Job

DATABASE = "run.db"
LOCK = "run.lock"
SPLITS = "splits.npz"
CHECKPOINT = re.compile(r"checkpoint-.+\.safetensors")


def job_folder(root: Path, job: Job) -> Path:
    """Return the folder of a job's checkpoints and log."""
    repeat = [f"repeat-{job.repeat}"] if job.repeated else []
    return root.joinpath(slug(job.model), slug(job.lr_schedule), *repeat, f"fold-{job.fold}")


def up_to(root: Path, folder: Path) -> Iterator[Path]:
    """Yield the folders above `folder`, the last is `root`."""
    for outer in folder.parents:
        yield outer
        if outer == root:
            return
