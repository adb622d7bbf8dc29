"""Atomic files, and names that cannot leave their folder.

`write_whole` is the only way a file gets its final name: temporary name in the same folder, all
bytes, fsync, rename, fsync of the folder. Omitting any step loses or tears files at a crash (Pillai
et al. 2014, "All File Systems Are Not Created Equal"). Where a file of a run belongs, a link or a
FIFO is replaced or refused, never opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from asynckfold.errors import StorageError

TEMPORARY = re.compile(r".+\.\d+\.tmp")
"""Names of files that are being written, or that a crash has left."""

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Of what is new, less the umask: nobody else may write to a run."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,39}")

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    errno.EFBIG: "raise the limit (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "put back what was moved or removed"),
    errno.EIO: "look for a broken disk (dmesg)",
    **dict.fromkeys((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS), "move it to a local disk"),
}


@contextlib.contextmanager
def storage_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise `StorageError` where the disk refuses; see `storage_error`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path, needed) from error


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Replace `path` by `data`: every observer sees the old file or the new one, with its mode.

    Raises
    ------
    StorageError
        The disk refused. The old file is untouched unless only the last step failed: then the new
        one is in place, but may not survive a power loss.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    with storage_errors(path, memoryview(data).nbytes):
        try:
            temporary.unlink(missing_ok=True)
            with os.fdopen(os.open(temporary, flags, FILE_MODE), "wb") as file:
                if is_plain(path):
                    os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            sync_folder(path.parent)
        except BaseException:
            # If the disk refuses this too, `settle` does it later.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def remove(path: Path) -> None:
    """Remove a file if it exists; raise `StorageError` if the disk refuses."""
    with storage_errors(path):
        path.unlink(missing_ok=True)


def make_folder(folder: Path, *, durable: bool = True) -> None:
    """Create a folder and its missing parents, by default with durable names.

    Raises
    ------
    StorageError
        The disk refused, or something else has that name.
    """
    with storage_errors(folder):
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):
                place.mkdir(FOLDER_MODE)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        for made in missing if durable else ():
            sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_plain(path: Path) -> bool:
    """Whether there is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file, never a link, a FIFO or a device; return the descriptor.

    Raises
    ------
    StorageError
        It is no plain file.
    OSError
        The disk refused.
    """
    # Without O_NONBLOCK, opening a FIFO waits for its other end.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, FILE_MODE)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    text = f"{path} is not a regular file and was not opened. Remove it and run the same command"
    raise StorageError(errno.EINVAL, f"{text} again")


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file; see `open_plain`."""
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def settle(
    folder: Path, ours: re.Pattern[str], recorded: Mapping[str, str | None]
) -> dict[str, str]:
    """Clean up a folder after a crash; idempotent.

    Unrecorded files whose names match `ours` are removed; files that differ from their record are
    renamed to ``*.bad``. Everything else is left alone.

    Parameters
    ----------
    folder : Path
        It may be missing.
    ours : re.Pattern
        Names that may be removed.
    recorded : Mapping of str to str or None
        The SHA-256 of each expected file; None if only its name matters.

    Returns
    -------
    dict of str to str
        Problems of recorded files, by name.

    Raises
    ------
    StorageError
        The disk refused.
    """
    problems = {}
    with storage_errors(folder):
        for path in [*folder.iterdir()] if folder.is_dir() else ():
            if ours.fullmatch(path.name) and path.name not in recorded and is_plain(path):
                path.unlink()
        for name, digest in recorded.items():
            path = folder / name
            if not is_plain(path):
                problems[name] = "it is missing or not a regular file"
            elif digest is not None and sha256(path) != digest:
                path.rename(f"{path}.bad")
                problems[name] = f"its SHA-256 differs; it was renamed to {name}.bad"
    return problems


def storage_error(error: OSError, path: Path, needed: int = 0) -> StorageError:
    """Return the error for a failed write: place, cause, space needed and free, remedy."""
    what = os.strerror(error.errno) if error.errno else str(error)
    text = f"could not write {path}: {what}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        room = f"{_free(path)} bytes free at {path.parent}"
        text += f" (needs {needed} bytes, {room})" if needed else f" ({room})"
    remedy = _REMEDIES.get(error.errno or 0, "remove the cause")
    return StorageError(
        error.errno or errno.EIO,
        f"{text}. What was recorded before stays; {remedy} and run the same command again",
    )


def reading_error(error: OSError, path: Path | str) -> StorageError:
    """Return the error for a failed read."""
    number = error.errno or errno.EIO
    return StorageError(number, f"could not read {path}: {os.strerror(number)}")


def _free(path: Path) -> int:
    for folder in path.absolute().parents:
        if folder.exists():
            return shutil.disk_usage(folder).free
    return 0


def slug(name: str) -> str:
    """Return a file name for any text: plain names unchanged, others with a digest.

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
