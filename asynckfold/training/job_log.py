"""``log.txt`` of a job: log lines, what user code prints, the stack of a crash."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asynckfold.errors import StorageError
from asynckfold.jobs.plan import Job
from asynckfold.store import job_folder
from asynckfold.system.files import make_folders, open_plain, storage_error

LOG_BYTES = 10 << 20
"""Size limit of a log."""

_HEAD, _TAIL, _CHUNK = LOG_BYTES // 2, LOG_BYTES // 4, 1 << 20
_LEFT_OUT = b"\n... the middle of this log was left out: it is kept to 10 MiB ...\n"

WATCH_SECONDS = 0.05
"""Interval between two checks of the size; in between a log may exceed `LOG_BYTES`."""

LOCK_SECONDS = 1.0
"""How long a line waits for another thread that shortens the log, which takes milliseconds."""


def log_path(root: Path, job: Job) -> Path:
    """Return the path of a job's log."""
    return job_folder(root, job) / "log.txt"


class JobLog:
    """A job's ``log.txt``, open for appending and unbuffered.

    User code prints directly to its descriptor: no reader can block it, and the last words of a
    crashing process are kept. Beyond `LOG_BYTES` the first half and the newest quarter remain.

    A disk error raises `StorageError`: it stops the run, which can be resumed, and does not fail
    the job.
    """

    def __init__(self, root: Path, job: Job) -> None:
        self.path = log_path(root, job)
        self._lock = threading.RLock()
        with _storage_errors(self.path):
            self._file = self._open(root)
            self.shorten()

    def _open(self, root: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            return open_plain(self.path, flags, root)
        except FileNotFoundError:
            # The folder was made with the plan, and removed since.
            make_folders(root, self.path.parent)
            return open_plain(self.path, flags, root)

    def write(self, text: str) -> None:
        """Append text; escape what cannot be encoded."""
        self.append(text.encode("utf-8", "backslashreplace"))

    def append(self, data: bytes) -> None:
        """Append bytes."""
        with _storage_errors(self.path):
            for start in range(0, len(data), _CHUNK):
                with self._locked():
                    _append(self._file, data[start : start + _CHUNK])
                    self.shorten()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file

    def shorten(self) -> None:
        """Cut the middle out of a log that is too long; what is printed meanwhile may be lost."""
        with self._locked():
            self._shorten()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other thread shorten the log while a line is appended."""
        # Not forever: this process may have been forked while another thread held the lock.
        held = self._lock.acquire(timeout=LOCK_SECONDS)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def _shorten(self) -> None:
        if os.fstat(self._file).st_size <= LOG_BYTES:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another process is shortening it
        try:
            size = os.fstat(self._file).st_size
            newest = os.pread(self._file, _TAIL, size - _TAIL)
            os.ftruncate(self._file, _HEAD)
            _append(self._file, _LEFT_OUT + newest)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def kept_short(self) -> Iterator[None]:
        """Enforce the size limit from a thread: user code writes to the descriptor directly."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_SECONDS):
                # The next `write` reports a disk error.
                with suppress(OSError):
                    self.shorten()

        watcher = threading.Thread(target=watch, name="asynckfold-log", daemon=True)
        # If no thread can be started, the log is shortened once, at the end.
        with suppress(RuntimeError):
            watcher.start()
        try:
            yield
        finally:
            done.set()
            if watcher.ident is not None:
                watcher.join()
            with _storage_errors(self.path):
                self.shorten()

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)


class NoLog(JobLog):
    """A log that discards everything."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)
        self._lock = threading.RLock()
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)


def _append(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path) from error
