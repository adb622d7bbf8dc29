"""``log.txt`` of a job: log lines, what user code prints, the stack of a crash."""

from __future__ import annotations

import os
from pathlib import Path

from asynckfold.jobs.plan import Job
from asynckfold.store import job_folder
from asynckfold.system.files import make_folder, open_plain, storage_errors

LOG_BYTES = 10 << 20
"""Size of a log from which its middle is cut out: the first half and the newest quarter stay."""

_CUT = b"\n... the middle of this log was left out ...\n"


def log_path(root: Path, job: Job) -> Path:
    """Return the path of a job's log."""
    return job_folder(root, job) / "log.txt"


class JobLog:
    """A job's ``log.txt``, open for appending and unbuffered.

    User code prints directly to its descriptor: no reader can block it, and the last words of a
    crashing process are kept.

    A disk error raises `StorageError`: it stops the run, which can be resumed, and does not fail
    the job.
    """

    def __init__(self, root: Path, job: Job) -> None:
        self.path = log_path(root, job)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        with storage_errors(self.path):
            # The folder was made with the plan, and may have been removed since.
            make_folder(self.path.parent)
            self._file = open_plain(self.path, flags)

    def write(self, text: str) -> None:
        """Append text; escape what cannot be encoded."""
        self.append(text.encode("utf-8", "backslashreplace"))

    def append(self, data: bytes) -> None:
        """Append bytes; cut the middle out of a log that has become too long."""
        with storage_errors(self.path):
            _append(self._file, data)
            size, tail = os.fstat(self._file).st_size, LOG_BYTES // 4
            if size > LOG_BYTES:
                newest = os.pread(self._file, tail, size - tail)
                os.ftruncate(self._file, LOG_BYTES // 2)
                _append(self._file, _CUT + newest)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)


class NoLog(JobLog):
    """A log that discards everything."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)


def _append(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
