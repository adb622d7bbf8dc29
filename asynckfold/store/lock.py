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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asynckfold.errors import Problem, RunHeldError, StorageError, refuse
from asynckfold.jobs.decoding import parsed
from asynckfold.store.layout import LOCK, path_problems
from asynckfold.system.files import make_folder, open_plain, storage_error

# A tenth of a second in all; a reader holds the lock for microseconds.
_TRIES, _TRY_SECONDS = 20, 0.005


def now_text() -> str:
    """Return the wall-clock time as text."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def take_lock(root: Path) -> int:
    """Lock a run, creating its folder; the lock lasts until the returned descriptor is closed."""
    path = root / LOCK
    refuse(path_problems(root))
    refuse(shared_problems(root))
    try:
        make_folder(root)
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT, root)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        _take(descriptor)
    except BlockingIOError:
        owner = _owner_text(descriptor)
        os.close(descriptor)
        raise RunHeldError(
            f"{root} is held by {owner}. Wait for it, stop it, or use another folder"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise storage_error(error, path) from error
    about = {"pid": os.getpid(), "host": socket.gethostname(), "started": now_text()}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise storage_error(error, path) from error
    return descriptor


def shared_problems(root: Path) -> Iterator[Problem]:
    """Yield why others could change the files of a run in a folder."""
    try:
        status = root.stat()
    except OSError:
        return  # it will be created, or fail to be
    if status.st_uid != os.geteuid():
        yield Problem(
            "root_dir must belong to the user who runs, or others could change the run",
            f"{root}, which belongs to {_user(status.st_uid)}, as {_user(os.geteuid())}",
            f"Use another folder, run as {_user(status.st_uid)}, or: "
            f"chown -R {os.geteuid()} {shlex.quote(str(root))}",
        )
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        who = "everyone" if status.st_mode & stat.S_IWOTH else "its group"
        yield Problem(
            "root_dir must not be writable for others, who could replace files of the run",
            f"{root} with mode {stat.S_IMODE(status.st_mode):04o}, which {who} may write to",
            f"Use a folder that does not exist yet, or: chmod go-w {shlex.quote(str(root))} "
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


def _owner_text(descriptor: int) -> str:
    about = _owner(descriptor)
    for _ in range(5 * _TRIES):
        if about and not _is_gone(about):
            break
        # The new holder writes its name a moment after locking; until then it is the last one's.
        time.sleep(_TRY_SECONDS)
        about = _owner(descriptor)
    if not about:
        return "another process"
    return "process {pid} on {host} since {started}".format(
        **{"pid": "?", "host": "?", "started": "?", **about}
    )


def _owner(descriptor: int) -> dict[str, Any]:
    try:
        about = parsed((os.pread(descriptor, 4096, 0) or b"{}").decode())
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _is_gone(about: Mapping[str, Any]) -> bool:
    here = about.get("host") == socket.gethostname()
    return here and not Path(f"/proc/{about.get('pid')}").exists()


def holder_of(root: Path) -> dict[str, Any] | None:
    """Return who holds the run (pid, host, start), or None when nobody does."""
    try:
        descriptor = open_plain(root / LOCK, os.O_RDONLY, root)
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
