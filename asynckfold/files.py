"""Files that exist whole or not at all, and names that cannot leave their folder.

`write_whole` is the only way in which asynckfold puts a file under its final name: temporary name
in the same folder, all bytes, fsync, rename, fsync of the folder. Each step is there because
leaving it out loses or tears files at a crash (Pillai et al. 2014, "All File Systems Are Not
Created Equal").
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from asynckfold.errors import StorageError

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,39}")


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Replace `path` by `data`: every observer sees the old file or the new one.

    Raises
    ------
    StorageError
        The disk refused; the old file is untouched and the temporary one is gone.
    """
    write_whole_by(path, lambda file: _write_all(file, data))


def write_whole_by(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Like `write_whole`, with a function that writes to the open temporary file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, flags, 0o644), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: OSError, path: Path) -> StorageError:
    """Say what the disk refused, where, how much room there is, and what to do."""
    what = os.strerror(error.errno) if error.errno else str(error)
    text = f"could not write {path}: {what}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += f" ({_free(path)} bytes free)"
    return StorageError(
        error.errno or errno.EIO,
        f"{text}. What was recorded before stays; make room and run the same command again",
    )


def _free(path: Path) -> int:
    for folder in path.absolute().parents:
        if folder.exists():
            return shutil.disk_usage(folder).free
    return 0


def slug(name: str) -> str:
    """Return a file name for any text: plain names as they are, others marked by a digest.

    >>> slug("LeNet5")
    'LeNet5'
    >>> slug("Größe 3")
    'Gr-e-3-6b7e38aabb'
    """
    if _PLAIN.fullmatch(name):
        return name
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:40] or "x"
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
