"""Atomic files, and names that cannot leave their folder.

`write_whole` is the only way a file gets its final name: temporary name in the same folder, all
bytes, fsync, rename, fsync of the folder. Omitting any step loses or tears files at a crash (Pillai
et al. 2014, "All File Systems Are Not Created Equal").

Others may have put things into a run's folder: below it no link is followed, and only plain files
are opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from asynckfold.errors import StorageError

TEMPORARY = re.compile(r".+\.\d+\.tmp")
"""Names of files that are being written, or that a crash has left."""

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Of what is new, less the umask: nobody else may write to a run."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,39}")

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO waits for its other end.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR)

_KINDS = {
    stat.S_IFLNK: ("a symbolic link", errno.ELOOP),
    stat.S_IFDIR: ("a folder", errno.EISDIR),
    stat.S_IFREG: ("a file", errno.ENOTDIR),
    stat.S_IFIFO: ("a FIFO", errno.ENXIO),
    stat.S_IFSOCK: ("a socket", errno.ENXIO),
    stat.S_IFCHR: ("a device", errno.ENXIO),
    stat.S_IFBLK: ("a device", errno.ENXIO),
}


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    errno.EFBIG: "raise the limit (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "put back what was moved or removed"),
    errno.EIO: "look for a broken disk (dmesg)",
    **dict.fromkeys((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS), "move it to a local disk"),
}


def write_whole(path: Path, data: bytes | memoryview, root: Path | None = None) -> None:
    """Replace `path` by `data`: every observer sees the old file or the new one, with its mode.

    No link is followed below `root`, the run's folder.

    Raises
    ------
    StorageError
        The disk refused. The old file is untouched unless only the last step failed: then the new
        one is in place, but may not survive a power loss.
    """
    try:
        with opened_folder(root or path.parent, path.parent) as folder:
            _write_in(folder, path.name, data)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path, memoryview(data).nbytes) from error


def _write_in(folder: int, name: str, data: bytes | memoryview) -> None:
    temporary = f"{name}.{os.getpid()}.tmp"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _FILE_FLAGS
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        with os.fdopen(os.open(temporary, flags, FILE_MODE, dir_fd=folder), "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                if stat.S_ISREG(mode):
                    os.fchmod(file.fileno(), mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        # If the disk refuses this too, `settle` does it later.
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def remove(path: Path) -> None:
    """Remove a file if it exists; raise `StorageError` if the disk refuses."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path) from error


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, with durable names."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):
            place.mkdir(FOLDER_MODE)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    for made in missing:
        sync_folder(made.parent)


def make_folders(root: Path, folder: Path) -> None:
    """Create a folder below `root`, which exists; no link is followed.

    Raises
    ------
    StorageError
        The disk refused, or something else has that name.
    """
    try:
        with opened_folder(root, folder, make=True):
            pass
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, folder) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, _FOLDER_FLAGS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_folder(root: Path, folder: Path, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of `folder`, in or below `root`.

    Parameters
    ----------
    root : Path
        The run's folder, which is trusted and must exist.
    folder : Path
        The target; no link is followed on the way.
    make : bool
        Create missing folders on the way; their names are not durable yet.

    Raises
    ------
    StorageError
        A link or a file has the name of a folder.
    OSError
        A folder is missing, or the disk refused.
    """
    descriptor = os.open(root, _FOLDER_FLAGS)
    place = root
    try:
        for part in folder.relative_to(root).parts:
            outer, place = descriptor, place / part
            descriptor = _step(outer, place, make)
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


def _step(outer: int, place: Path, make: bool) -> int:
    try:
        return os.open(place.name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=outer)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(place.name, FOLDER_MODE, dir_fd=outer)
        return _step(outer, place, make=False)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise _planted(place, outer, "a folder") from error
        raise


def _planted(path: Path, folder: int, wanted: str) -> StorageError:
    """Return the error for an entry that has the name of a file or folder of the run."""
    mode = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode
    kind, number = _KINDS[stat.S_IFMT(mode)]
    return StorageError(
        number if wanted == "a file" else errno.ENOTDIR,
        f"{path} is {kind} where {wanted} of the run belongs, and is neither followed nor opened. "
        "Remove it and run the same command again",
    )


def open_plain(path: Path, flags: int, root: Path | None = None) -> int:
    """Open a plain file, never a link, a FIFO or a device; return the descriptor.

    No link is followed below `root`, the run's folder.

    Raises
    ------
    StorageError
        It is no plain file.
    OSError
        The disk refused.
    """
    with opened_folder(root or path.parent, path.parent) as folder:
        try:
            descriptor = os.open(path.name, flags | _FILE_FLAGS, FILE_MODE, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _planted(path, folder, "a file") from error
            raise
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise _planted(path, folder, "a file")


def read_plain(path: Path, root: Path | None = None) -> bytes:
    """Return the content of a plain file; see `open_plain`."""
    with os.fdopen(open_plain(path, os.O_RDONLY, root), "rb") as file:
        return file.read()


def settle(
    root: Path, folder: Path, ours: re.Pattern[str], recorded: Mapping[str, str | None]
) -> dict[str, str]:
    """Clean up a folder after a crash; idempotent.

    Unrecorded files whose names match `ours` are removed; files that differ from their record are
    renamed to ``*.bad``. Everything else is left alone, and no link is followed.

    Parameters
    ----------
    root, folder : Path
        The run's folder, which is trusted, and one below it.
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
    try:
        with opened_folder(root, folder) as descriptor:
            for name in os.listdir(descriptor):  # noqa: PTH208
                if ours.fullmatch(name) and name not in recorded and _is_file(name, descriptor):
                    os.unlink(name, dir_fd=descriptor)
            return _wrong(descriptor, recorded)
    except OSError as error:
        if error.errno in _NO_FOLDER and root.is_dir():
            return dict.fromkeys(recorded, "its folder is missing")
        raise storage_error(error, folder) from error


@contextlib.contextmanager
def alone(root: Path, folder: Path, ours: re.Pattern[str], wait_s: float = 10.0) -> Iterator[None]:
    """Lock a folder against other writers; first remove files that killed ones left.

    The lock is on the folder itself, so no lock file can be left behind. On a file system without
    such locks nothing is removed.

    Raises
    ------
    StorageError
        Another process still writes there, it is no folder, or the disk refused.
    """
    try:
        with opened_folder(root, folder) as descriptor:
            if _locked(descriptor, folder, wait_s):
                settle(root, folder, ours, {})
            yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, folder) from error


def _locked(descriptor: int, folder: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StorageError(
                    errno.EAGAIN, f"another process writes to {folder}. Try again when it is done"
                ) from None
            time.sleep(0.02)
        except OSError:
            return False
        else:
            return True


def _wrong(folder: int, recorded: Mapping[str, str | None]) -> dict[str, str]:
    problems = {}
    for name, digest in recorded.items():
        if not _is_file(name, folder):
            problems[name] = "it is missing or not a regular file"
        elif digest is not None and _digest(name, folder) != digest:
            os.rename(name, f"{name}.bad", src_dir_fd=folder, dst_dir_fd=folder)
            problems[name] = f"its SHA-256 differs; it was renamed to {name}.bad"
    return problems


def _is_file(name: str, folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _digest(name: str, folder: int) -> str:
    with os.fdopen(os.open(name, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder), "rb") as file:
        return _sha256(file)


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
    with path.open("rb") as file:
        return _sha256(file)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
