"""Anonymous arrays that processes share by file descriptor."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asynckfold.data.transforms import Array


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of a shared array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def map(self, fd: int) -> Tensor:
        """Map the array privately; the descriptor may be closed afterwards.

        A write changes this process's own copy of the page, so no worker can damage what others
        read.
        """
        memory = mmap.mmap(fd, max(1, self.nbytes), access=mmap.ACCESS_COPY)
        return torch.from_numpy(self.view(memory))

    def map_writable(self, fd: int) -> Array:
        """Map the array for filling."""
        return self.view(mmap.mmap(fd, max(1, self.nbytes)))

    def view(self, memory: mmap.mmap) -> Array:
        """Return mapped memory as an array."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return np.frombuffer(memory, np.dtype(self.dtype), count).reshape(self.shape)


class SharedArray:
    """An array in anonymous memory (``memfd_create``), or in an unnamed file in `folder`."""

    def __init__(self, spec: ArraySpec, folder: Path | None = None) -> None:
        self.spec = spec
        self.fd = _nameless(max(1, spec.nbytes), folder)

    def writable(self) -> Array:
        """Map the array for filling."""
        return self.spec.map_writable(self.fd)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _nameless(size: int, folder: Path | None) -> int:
    if folder is None and hasattr(os, "memfd_create"):
        fd = os.memfd_create("asynckfold")
        os.ftruncate(fd, size)
        return fd
    with tempfile.TemporaryFile(dir=folder) as file:
        # Reserves the room, so that a full disk is an error here and no SIGBUS later.
        os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())
