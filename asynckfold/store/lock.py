"""The lock of a run: an flock on an open descriptor, released when its process ends."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shlex
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asynckfold.errors import Problem, RunHeldError, refuse
from asynckfold.jobs.decoding import parsed
from asynckfold.store.layout import LOCK
from asynckfold.system.files import make_folder, open_plain, storage_errors

# A tenth of a second in all; a reader holds the lock for microseconds.
_TRIES, _TRY_SECONDS = 20, 0.005


def now_text() -> str:
    """Return the wall-clock time as text."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def take_lock(root: Path) -> int:
    """Lock a run, creating its folder; the lock lasts until the returned descriptor is closed."""
    refuse(shared_problems(root))
    make_folder(root)
    with storage_errors(root / LOCK):
        descriptor = open_plain(root / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            _take(descriptor)
            about = {"pid": os.getpid(), "host": socket.gethostname(), "started": now_text()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
        except BlockingIOError:
            owner = _owner(descriptor)
            os.close(descriptor)
            words = "process {pid} on {host} since {started}" if owner else "another process"
            text = f"{root} is held by {words.format(**owner)}"
            raise RunHeldError(f"{text}. Wait for it, stop it, or use another folder") from None
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def shared_problems(root: Path) -> Iterator[Problem]:
    """Yield why others could change the files of a run in a folder."""
    try:
        status = root.stat()
    except OSError:
        return  # it will be created, or fail to be
    is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid != os.geteuid() or is_open:
        place, me = shlex.quote(str(root)), os.geteuid()
        yield Problem(
            "root_dir must belong to the user who runs, and nobody else may write to it",
            f"{root} of {_user(status.st_uid)} with mode {stat.S_IMODE(status.st_mode):04o}, as "
            f"{_user(me)}",
            f"Use a folder that does not exist yet, or: chown -R {me} {place}; chmod go-w {place} "
            "(where others must add files of their own: chmod +t)",
        )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _take(descriptor: int) -> None:
    """Take the lock, waiting a moment for readers that test it."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_TRY_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _owner(descriptor: int) -> dict[str, Any]:
    """Return who wrote its name into the lock; nothing if none did, or not yet."""
    try:
        about = parsed((os.pread(descriptor, 4096, 0) or b"{}").decode())
    except ValueError:
        return {}
    is_name = isinstance(about, dict) and {"pid", "host", "started"} <= about.keys()
    return about if is_name else {}


def holder_of(root: Path) -> dict[str, Any] | None:
    """Return who holds the run (pid, host, start), or None when nobody does."""
    try:
        descriptor = open_plain(root / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(descriptor) or {"pid": 0}
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None
