"""Arrays in Ray's shared memory: the files that workers of a node map. Ray is not imported."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.system import file_descriptors

if TYPE_CHECKING:
    import numpy.typing as npt


def files_of(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Return files that hold these arrays, after one with the offsets in them."""
    found = [_shared_file(array) or (_copied(array), 0) for array in arrays]
    offsets = json.dumps([offset for _, offset in found]).encode()
    return [file_descriptors.nameless_file(offsets), *(file for file, _ in found)]


def _copied(array: npt.NDArray[Any]) -> int:
    return file_descriptors.nameless_file(array.tobytes(), max(1, array.nbytes))


def _shared_file(array: npt.NDArray[Any]) -> tuple[int, int] | None:
    """Return the file of the shared memory that an array lies in, and its offset; None if unknown.

    The raylet, parent of this process, holds that file open; its name is gone.
    """
    if not array.nbytes:
        return None
    first = array.__array_interface__["data"][0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, flags, start, device, inode, *_ = line.split(maxsplit=5)
            low, high = (int(word, 16) for word in addresses.split("-"))
            if low <= first and first + array.nbytes <= high and flags.endswith("s"):
                offset = first - low + int(start, 16)
                found = _opened(Path(f"/proc/{os.getppid()}/fd"), device, int(inode))
                return None if found < 0 else (found, offset)
    return None


def _opened(descriptors: Path, device: str, inode: int) -> int:
    """Open the file of this number that another process holds open; -1 if there is none."""
    for link in descriptors.iterdir():
        with contextlib.suppress(OSError):
            known = link.stat()
            where = f"{os.major(known.st_dev):02x}:{os.minor(known.st_dev):02x}"
            if (known.st_ino, where) == (inode, device):
                return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    return -1
