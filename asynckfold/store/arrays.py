"""``.npz`` files in the folder of a run, which may be a stranger's: no small one takes much memory.

Zeros compress a thousandfold. What would unpack to more than `MOST_RATIO` times the size of its
file is written without compression, and refused when it is read.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.decoding import FAULTS
from asynckfold.system.plain_text import one_line
from asynckfold.system.process import free_memory

MOST_RATIO, ALWAYS_BYTES = 100, 256 << 20
"""Sorted indices compress 6-fold, labels in order 800-fold; up to so many bytes anything may."""

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

Arrays = Mapping[str, npt.NDArray[Any]]


def packed(arrays: Arrays) -> bytes:
    """Return the content of a file that `unpacking` accepts."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    if sum(array.nbytes for array in arrays.values()) > _most(buffer.tell()):
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


@contextmanager
def unpacking(data: bytes) -> Iterator[tuple[Arrays, Mapping[str, tuple[int, ...]]]]:
    """Yield the arrays of a file, each unpacked when it is taken, and their shapes.

    Raises
    ------
    ValueError
        The file is damaged, holds more than plain arrays, or they take too much memory.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(item.file_size for item in archive.infolist())
            if size > min(_most(len(data)), free_memory() // 2):
                raise ValueError(f"unpacked it has {size:,} bytes")
            shapes = {item.filename[:-4]: _shape(archive, item) for item in archive.infolist()}
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            yield arrays, shapes
    except (*FAULTS, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(one_line(str(error))) from error


def _most(size: int) -> int:
    return max(ALWAYS_BYTES, MOST_RATIO * size)


def _shape(archive: zipfile.ZipFile, item: zipfile.ZipInfo) -> tuple[int, ...]:
    """Return the shape of an array; its bytes must be those that its header promises."""
    with archive.open(item) as file:
        shape, _, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        size = file.tell() + dtype.itemsize * int(np.prod(shape, dtype=object))
    if size != item.file_size or dtype.hasobject:
        raise ValueError(f"{item.filename} has {item.file_size:,} bytes, by its header {size:,}")
    return tuple(shape)
