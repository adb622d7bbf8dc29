"""Who holds a run: an flock on an open descriptor, free the moment its process is gone."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from asynckfold.errors import RunHeldError
from asynckfold.files import make_folder, storage_error
from asynckfold.store.layout import LOCK

# A tenth of a second in all: thousands of times what a reader needs to look at the lock.
_TRIES, _TRY_SECONDS = 20, 0.005


def now_text() -> str:
    """Return the wall time, for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def take_lock(root: Path) -> int:
    """Take the run, making its folder; return the descriptor that holds it while it is open."""
    path = root / LOCK
    try:
        make_folder(root)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
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


def _take(descriptor: int) -> None:
    """Take the lock; wait a moment for readers, who hold it for microseconds to look at it."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_TRY_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _owner_text(descriptor: int) -> str:
    about = _owner(descriptor)
    if not about:
        return "another process"
    return "process {pid} on {host} since {started}".format(
        **{"pid": "?", "host": "?", "started": "?", **about}
    )


def _owner(descriptor: int) -> dict[str, Any]:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def holder_of(root: Path) -> dict[str, Any] | None:
    """Say who holds the run, or None when nobody does."""
    try:
        descriptor = os.open(root / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
