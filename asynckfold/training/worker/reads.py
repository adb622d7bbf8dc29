"""Read a range of a dataset, as a task of a worker.

Reading is the first to run user code, and may kill the worker: the current sample is kept in shared
memory, where the caller can see it.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from asynckfold.data.shared_arrays import ArraySpec
from asynckfold.system.heartbeat import Heartbeat

STOP = -1
"""Index behind the positions of all readers: the last sample, from 1, that need be read."""

STEPS = -1
"""Position of a reader that runs the transforms."""


@dataclass(frozen=True, eq=False)
class Files:
    """Sent beside `Reads` as descriptors: the packed task, the readers' positions, arrays to write.

    `specs` describes the arrays, the positions first.
    """

    specs: tuple[ArraySpec, ...]

    def open(self, fds: Sequence[int]) -> Inputs:
        """Map the arrays, and keep the packed task open."""
        arrays = [spec.map_writable(fd) for spec, fd in zip(self.specs, fds[1:], strict=True)]
        return Inputs(os.fdopen(os.dup(fds[0]), "rb"), arrays[0], arrays[1:])


@dataclass(eq=False)
class Inputs:
    """What a reader has open: the packed task, all readers' positions, arrays to write."""

    task: BinaryIO
    places: npt.NDArray[np.int64]
    arrays: list[npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Reads:
    """A task to read the samples from `low` to `high`; takes the place of a `Bundle`.

    `reader` is the reader's index, `default_dtype` that of the caller's process.
    """

    root: Path
    data: Files
    reader: int
    low: int
    high: int
    default_dtype: str


@dataclass(frozen=True)
class UnpackFailure:
    """Answer if the task could not be unpacked, with the exception."""

    line: str


def read_range(work: Reads, inputs: Inputs, heartbeat: Heartbeat) -> bytes:
    """Carry out the task for a range; return its answer, pickled.

    Settings are such that samples are the same as in the caller's process and on every machine:
    with denormals, and with one thread, since sums depend on their order.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    torch.set_default_dtype(getattr(torch, work.default_dtype))

    def beat(index: int) -> bool:
        if index < 0:
            heartbeat.begin_long_phase()
            inputs.places[work.reader] = STEPS
            return True
        heartbeat.beat()
        inputs.places[work.reader] = index + 1
        end = inputs.places[STOP]
        return not end or index < end

    # Unpacking runs user code, which may raise anything.
    try:
        with mmap.mmap(inputs.task.fileno(), 0, access=mmap.ACCESS_READ) as packed:
            task = cloudpickle.loads(packed)
    except BaseException as error:  # noqa: BLE001
        return pickle.dumps(UnpackFailure(f"{type(error).__name__}: {error}"))
    inputs.task.close()
    answer = task(work.low, work.high, inputs.arrays, beat)
    at, end = getattr(answer, "at", -1), inputs.places[STOP]
    if at >= 0 and (not end or at + 1 < end):
        inputs.places[STOP] = at + 1
    # cloudpickle sends tensors by value, the pipe would send them as files.
    packed_answer: bytes = cloudpickle.dumps(answer)
    return packed_answer
