"""What every worker of a sweep needs, sent once; the log of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.files import storage_error
from asynckfold.folds import Fold
from asynckfold.plan import Job, Plan
from asynckfold.recipe import Recipe
from asynckfold.store import job_folder as job_folder

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
    default_dtype : str
        What ``torch.get_default_dtype`` was in the caller's process.
    deterministic : {0, 1, 2}
        What ``torch.get_deterministic_debug_mode`` was there.
    """

    plan: Plan
    folds: tuple[Fold, ...]
    recipe: Recipe
    data: DataHandle
    root: Path
    ordinary: Any = None
    default_dtype: str = "float32"
    deterministic: int = 0

    def fold_of(self, job: Job) -> Fold:
        """Return the fold that `job` holds out."""
        return next(fold for fold in self.folds if fold.key == (job.repeat, job.fold))


def log_path(root: Path, job: Job) -> Path:
    """Return where the log of a job is."""
    return job_folder(root, job) / "log.txt"


class JobLog:
    """A job's ``log.txt``, open for appending; each line is on its way to the disk when written.

    A disk that refuses is no failure of the job: it raises `StorageError`, so that the run stops
    and can be continued.
    """

    def __init__(self, root: Path, job: Job) -> None:
        self.path = log_path(root, job)
        with _disk(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)

    def write(self, text: str) -> None:
        """Append text; what cannot be encoded is written escaped."""
        with _disk(self.path):
            self._file.write(text.encode("utf-8", "backslashreplace"))

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file.fileno()

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error
