"""Arrays that processes share by file descriptor: anonymous ones, and files of the user."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asynckfold.data.transforms.trees import Array

PIECE_BYTES = 4 << 20
"""What is copied at once."""


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of a shared array, and where it begins in its file."""

    shape: tuple[int, ...]
    dtype: str
    # Not shown: where an array is kept does not change the fingerprint of the data.
    offset: int = field(default=0, repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def map(self, fd: int) -> Tensor:
        """Map the array privately; the descriptor may be closed afterwards.

        A write changes this process's copy of the page, so no worker can damage what others
        read.
        """
        return torch.from_numpy(self._mapped(fd, mmap.ACCESS_COPY))

    def map_readable(self, fd: int) -> Array:
        """Map the array for reading."""
        return self._mapped(fd, mmap.ACCESS_READ)

    def map_writable(self, fd: int) -> Array:
        """Map the array for filling."""
        return self._mapped(fd, mmap.ACCESS_WRITE)

    def _mapped(self, fd: int, access: int) -> Array:
        start = self.offset % mmap.ALLOCATIONGRANULARITY
        size = start + max(1, self.nbytes)
        memory = mmap.mmap(fd, size, access=access, offset=self.offset - start)
        count = int(np.prod(self.shape, dtype=np.int64))
        return np.frombuffer(memory, np.dtype(self.dtype), count, start).reshape(self.shape)


class SharedArray:
    """An array in anonymous memory (``memfd_create``), or in an unnamed file in `folder`.

    With `fd`, an array in that file, which is only read.
    """

    fd = -1  # if Ctrl-C comes before it is made

    def __init__(self, spec: ArraySpec, folder: Path | None = None, fd: int = -1) -> None:
        self.spec = spec
        self.fd = _nameless(max(1, spec.nbytes), folder) if fd < 0 else fd

    def writable(self) -> Array:
        """Map the array for filling."""
        return self.spec.map_writable(self.fd)

    def readable(self) -> Array:
        """Map the array for reading."""
        return self.spec.map_readable(self.fd)

    def fill(self, samples: Array, rows: Array | None = None) -> None:
        """Copy samples (n, ...) into it, or those of some rows.

        Written in pieces, which takes half the time of a copy through a mapping: that stops at each
        new page.
        """
        count, end = self.spec.shape[0], 0
        step = max(1, PIECE_BYTES * count // max(1, self.spec.nbytes))
        for low in range(0, count, step):
            part = samples[low : low + step] if rows is None else samples[rows[low : low + step]]
            left = np.ascontiguousarray(part, self.spec.dtype).reshape(-1).view(np.uint8)
            while left.size:
                written = os.pwrite(self.fd, left.data, self.spec.offset + end)
                left, end = left[written:], end + written

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def mapped_file(array: Array) -> SharedArray | None:
    """Return an array that is a read-only mapping of a file; None for any other.

    ``joblib.load`` and ``numpy.load`` return such arrays with ``mmap_mode="r"``. Others may change,
    or hold other values than their file.
    """
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    is_plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    if not (isinstance(whole, np.memmap) and whole.mode == "r" and is_plain and array.size):
        return None
    addresses = [item.__array_interface__["data"][0] for item in (array, whole)]
    spec = ArraySpec(array.shape, str(array.dtype), whole.offset + addresses[0] - addresses[1])
    try:
        mapped = SharedArray(spec, fd=os.open(str(whole.filename), os.O_RDONLY | os.O_CLOEXEC))
        rows = np.linspace(0, len(array) - 1, 64).astype(int)
        same = mapped.readable()[rows].tobytes() == array[rows].tobytes()
    except (OSError, ValueError):  # removed, or replaced by a shorter one
        return None
    return mapped if same else None


def _nameless(size: int, folder: Path | None) -> int:
    if folder is None and hasattr(os, "memfd_create"):
        fd = os.memfd_create("asynckfold")
        os.ftruncate(fd, size)
        return fd
    with tempfile.TemporaryFile(dir=folder) as file:
        # Reserves the room, so that a full disk is an error here and no SIGBUS later.
        os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())
