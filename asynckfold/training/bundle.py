"""What every worker of a sweep needs, sent once; the log of a job."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.errors import StorageError
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.planning.fusion_groups import Fuse
from asynckfold.store import job_folder as job_folder
from asynckfold.system.files import make_folders, open_plain, storage_error

if TYPE_CHECKING:
    from asynckfold.data.batches import DataHandle


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
    numerics : Mapping
        What `numerics.current` returned there.
    fuse : "auto", bool or int
        Which models a dry run has to check for whether they can be trained as one.
    job_timeout_s : float or None
        Seconds that a job may train, see `Stopwatch`.
    code : Mapping
        What the live objects are by value, see `asynckfold.jobs.digests`; empty where no module of
        the user's own is imported for them.
    highest : int
        The greatest class index of a sample; -1 where a dry run need not look at it.
    may_be_numbered : bool
        Whether class indices beyond a model's outputs can be numbered anew.
    """

    plan: Plan
    folds: tuple[Fold, ...]
    recipe: Recipe
    data: DataHandle
    root: Path
    ordinary: Any = None
    default_dtype: str = "float32"
    deterministic: int = 0
    numerics: Mapping[str, Any] = field(default_factory=dict)
    fuse: Fuse = False
    job_timeout_s: float | None = None
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    highest: int = -1
    may_be_numbered: bool = False

    def fold_of(self, job: Job) -> Fold:
        """Return the fold that `job` holds out."""
        return next(fold for fold in self.folds if fold.key == (job.repeat, job.fold))


def log_path(root: Path, job: Job) -> Path:
    """Return where the log of a job is."""
    return job_folder(root, job) / "log.txt"


LOG_BYTES = 10 << 20
"""What a job's log is kept to, whatever its user code prints."""

_HEAD, _TAIL, _CHUNK = LOG_BYTES // 2, LOG_BYTES // 4, 1 << 20
_LEFT_OUT = b"\n... the middle of this log was left out: it is kept to 10 MiB ...\n"

WATCH_SECONDS = 0.05
"""What is printed in this time may stand above `LOG_BYTES` until the next look."""


class JobLog:
    """A job's ``log.txt``, open for appending; each line is on its way to the disk when written.

    What user code prints goes to its descriptor directly, so that nothing ever waits for a reader,
    and the last words of a crashing process are there. Beyond `LOG_BYTES` the first half stays,
    and of the rest the newest part.

    A disk that refuses is no failure of the job: it raises `StorageError`, so that the run stops
    and can be continued.
    """

    def __init__(self, root: Path, job: Job) -> None:
        self.path = log_path(root, job)
        with _disk(self.path):
            self._file = self._opened(root)
            self.shorten()

    def _opened(self, root: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            return open_plain(self.path, flags, root)
        except FileNotFoundError:
            # Its folder was made with the plan, and may have been removed since.
            make_folders(root, self.path.parent)
            return open_plain(self.path, flags, root)

    def write(self, text: str) -> None:
        """Append text; what cannot be encoded is written escaped."""
        data = text.encode("utf-8", "backslashreplace")
        with _disk(self.path):
            for start in range(0, len(data), _CHUNK):
                _append(self._file, data[start : start + _CHUNK])
                self.shorten()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file

    def shorten(self) -> None:
        """Leave out the middle of a log that is too long; a line written meanwhile may be lost."""
        if os.fstat(self._file).st_size <= LOG_BYTES:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # somebody else does it
        try:
            size = os.fstat(self._file).st_size
            newest = os.pread(self._file, _TAIL, size - _TAIL)
            os.ftruncate(self._file, _HEAD)
            _append(self._file, _LEFT_OUT + newest)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def kept_short(self) -> Iterator[None]:
        """Look after the length meanwhile: descriptors given to user code know no limit."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_SECONDS):
                # A disk that refuses here is told by the next line of the log.
                with suppress(OSError):
                    self.shorten()

        watcher = threading.Thread(target=watch, name="asynckfold-log", daemon=True)
        # Where no thread can be started, it is shortened in the end.
        with suppress(RuntimeError):
            watcher.start()
        try:
            yield
        finally:
            done.set()
            if watcher.ident is not None:
                watcher.join()
            with _disk(self.path):
                self.shorten()

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)


def _append(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


class NoLog(JobLog):
    """The log of what is no job: nothing is kept."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path) from error
