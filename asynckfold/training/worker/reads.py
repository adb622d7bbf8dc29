"""Reading a range of a dataset, as a task of a worker process.

It is the first to run the user's code, and the one to die of it: which sample it has in hand stands
in memory that the caller looks at.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from asynckfold.data.shared_arrays import ArraySpec
from asynckfold.system.heartbeat import Heartbeat

STOP = -1
"""Behind the places of all readers: the number, from 1, of the last sample that need be read."""

STEPS = -1
"""The place of a reader that sends samples through the transforms."""


@dataclass(frozen=True, eq=False)
class Files:
    """What comes beside `Reads` by descriptor.

    Parameters
    ----------
    specs : tuple of ArraySpec
        Of the arrays that are written, the places of all readers first.
    """

    specs: tuple[ArraySpec, ...]

    def open(self, fds: Sequence[int]) -> Inputs:
        """Map the arrays, and keep the packed task until it is carried out."""
        arrays = [spec.map_writable(fd) for spec, fd in zip(self.specs, fds[1:], strict=True)]
        return Inputs(os.dup(fds[0]), arrays[0], arrays[1:])


@dataclass(eq=False)
class Inputs:
    """What a reader has: the packed task, everyone's places, the arrays that it writes."""

    task: int
    places: npt.NDArray[np.int64]
    arrays: list[npt.NDArray[Any]]

    def close(self) -> None:
        """Let go of the packed task."""
        if self.task >= 0:
            os.close(self.task)
            self.task = -1

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class Reads:
    """What a worker gets to read a range of samples; takes the place of a `Bundle`.

    Parameters
    ----------
    root : Path
        The run's folder.
    data : Files
        Opened by the worker with the descriptors that travel beside it.
    reader : int
        Which of the readers it is.
    low, high : int
        The samples.
    default_dtype : str
        What ``torch.get_default_dtype`` was in the caller's process.
    """

    root: Path
    data: Files
    reader: int
    low: int
    high: int
    default_dtype: str


@dataclass(frozen=True)
class NotUnpacked:
    """In place of an answer: the task could not be unpacked, and what was raised."""

    line: str


def read_range(work: Reads, inputs: Inputs, heartbeat: Heartbeat) -> bytes:
    """Carry out the task for a range; return its answer, packed.

    The samples are those that the caller's own process would read: with denormals, and with one
    thread, so that the sum of a sample has the same last digits on every machine.
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

    # Unpacking runs the user's code, which may raise anything.
    try:
        with mmap.mmap(inputs.task, 0, access=mmap.ACCESS_READ) as packed:
            task = cloudpickle.loads(packed)
    except BaseException as error:  # noqa: BLE001
        return pickle.dumps(NotUnpacked(f"{type(error).__name__}: {error}"))
    inputs.close()
    found = task(work.low, work.high, inputs.arrays, beat)
    at, end = getattr(found, "at", -1), inputs.places[STOP]
    if at >= 0 and (not end or at + 1 < end):
        inputs.places[STOP] = at + 1
    # By value: the pipe would send tensors as files.
    packed_answer: bytes = cloudpickle.dumps(found)
    return packed_answer
