"""Files that exist whole or not at all, and names that cannot leave their folder.

`write_whole` is the only way in which asynckfold puts a file under its final name: temporary name
in the same folder, all bytes, fsync, rename, fsync of the folder. Each step is there because
leaving it out loses or tears files at a crash (Pillai et al. 2014, "All File Systems Are Not
Created Equal").
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from asynckfold.errors import StorageError

TEMPORARY = re.compile(r".+\.\d+\.tmp")
"""Names of files that are being written; of a crash, when nobody writes them any more."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,39}")


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Replace `path` by `data`: every observer sees the old file or the new one.

    Raises
    ------
    StorageError
        The disk refused. The old file is untouched, unless it was only the last step that failed:
        then the new one stands in its place, but may not survive a power loss.
    """
    write_whole_by(path, lambda file: _write_all(file, data), memoryview(data).nbytes)


def write_whole_by(path: Path, write: Callable[[BinaryIO], None], needed: int = 0) -> None:
    """Like `write_whole`, with a function that writes to the open temporary file.

    `needed` is how many bytes it writes, where that is known before.
    """
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
        _discard(temporary)
        raise storage_error(error, path, needed) from error
    except BaseException:
        _discard(temporary)
        raise


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


def _discard(temporary: Path) -> None:
    """Remove a temporary file; where the disk refuses this too, `settle` does it later."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, which may be gone.

    Raises
    ------
    StorageError
        The disk refused.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path) from error


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, so that their names are durable."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(
    root: Path, folder: Path, ours: re.Pattern[str], recorded: Mapping[str, str | None]
) -> dict[str, str]:
    """Make a folder agree with what was recorded of it: the clean-up after a crash.

    Files of ours that nobody recorded are removed; one that is not what was recorded is renamed to
    ``*.bad``. Links, folders and everything else are left alone, and no link is followed on the way
    from `root` to `folder`. Doing it twice is the same as doing it once.

    Parameters
    ----------
    root, folder : Path
        The run's folder, which is trusted to be where it is, and one below it.
    ours : re.Pattern
        Which names may be removed.
    recorded : Mapping of str to str or None
        The SHA-256 of each file that must be there; None where only its name matters.

    Returns
    -------
    dict of str to str
        What is wrong, by name, with files that were recorded.

    Raises
    ------
    StorageError
        The disk refused.
    """
    try:
        with _opened_folder(root, folder) as descriptor:
            if descriptor is None:
                return dict.fromkeys(recorded, "its folder is gone")
            for name in os.listdir(descriptor):  # noqa: PTH208
                if ours.fullmatch(name) and name not in recorded and _is_file(name, descriptor):
                    os.unlink(name, dir_fd=descriptor)
            return _wrong(descriptor, recorded)
    except OSError as error:
        raise storage_error(error, folder) from error


def _wrong(folder: int, recorded: Mapping[str, str | None]) -> dict[str, str]:
    found = {}
    for name, digest in recorded.items():
        if not _is_file(name, folder):
            found[name] = "it is gone"
        elif digest is not None and _digest(name, folder) != digest:
            os.rename(name, f"{name}.bad", src_dir_fd=folder, dst_dir_fd=folder)
            found[name] = f"its SHA-256 differs; it was renamed to {name}.bad"
    return found


@contextlib.contextmanager
def _opened_folder(root: Path, folder: Path) -> Iterator[int | None]:
    """Yield a descriptor of `folder`, or None where the way to it is missing or no folder."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor: int | None = os.open(root, flags)
    try:
        for part in folder.relative_to(root).parts:
            assert descriptor is not None
            outer, descriptor = descriptor, None
            try:
                descriptor = os.open(part, flags | os.O_NOFOLLOW, dir_fd=outer)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                break
            finally:
                os.close(outer)
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_file(name: str, folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _digest(name: str, folder: int) -> str:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        return _sha256(file)


def storage_error(error: OSError, path: Path, needed: int = 0) -> StorageError:
    """Say what the disk refused, where, how much room it takes and there is, and what to do."""
    what = os.strerror(error.errno) if error.errno else str(error)
    text = f"could not write {path}: {what}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        room = f"{_free(path)} bytes free at {path.parent}"
        text += f" (needs {needed} bytes, {room})" if needed else f" ({room})"
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
    with path.open("rb") as file:
        return _sha256(file)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
