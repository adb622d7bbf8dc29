"""What every worker of a sweep needs, sent once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.files import slug
from asynckfold.folds import Fold
from asynckfold.plan import Job, Plan
from asynckfold.recipe import Recipe

if TYPE_CHECKING:
    from asynckfold.data import DataHandle


@dataclass(frozen=True, eq=False)
class Bundle:
    """Plan, folds, live objects and the way to the data.

    Parameters
    ----------
    plan : Plan
        Jobs and trainer parameters.
    folds : tuple of Fold
        Who is held out when.
    recipe : Recipe
        Models, LR schedules, optimizer function, criterion.
    data : DataHandle
        Opened by each worker with the descriptors that travel beside it.
    root : Path
        The run's folder, where checkpoints and logs go.
    ordinary : tuple of two torch Datasets, optional
        The train view and the eval view as the user's own data sets, sample by sample; only the
        serial baseline needs them.
    """

    plan: Plan
    folds: tuple[Fold, ...]
    recipe: Recipe
    data: DataHandle
    root: Path
    ordinary: Any = None

    def fold_of(self, job: Job) -> Fold:
        """Return the fold that `job` holds out."""
        return next(fold for fold in self.folds if fold.key == (job.repeat, job.fold))


def job_folder(root: Path, job: Job) -> Path:
    """Return the folder of a job's checkpoint and log."""
    repeat = [f"repeat-{job.repeat}"] if job.repeated else []
    return root.joinpath(slug(job.model), slug(job.lr_schedule), *repeat, f"fold-{job.fold}")
