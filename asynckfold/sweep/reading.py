"""Reads a dataset in worker processes, before there is a plan.

::

    dataset ── pickled once ──► one reader per range ──► shared arrays
                                     └─ dies or hangs: the error names its present sample
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine, named
from asynckfold.errors import InputError, Problem, UnpackError, WorkerDiedError
from asynckfold.jobs.placement import Command, Placement
from asynckfold.jobs.recipe import dump
from asynckfold.planning.process_rule import reads_here
from asynckfold.sweep.tasks import TICK_SECONDS
from asynckfold.system import file_descriptors
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.passes import Task
    from asynckfold.data.shared_arrays import SharedArray

SECONDS_EACH = 0.25
"""Least work of a reader: starting one costs 20 ms and unpickling the dataset."""

MEMORY_SHARE = 4
"""The unpickled datasets of all readers may take 1 / MEMORY_SHARE of the free memory."""

SAY_SECONDS = 1.0
"""Interval between progress messages."""


class WorkerReaders:
    """Reads in worker processes; the `Readers` of `asynckfold.data`.

    `take_pool` is called when the workers are needed, `doing` with the progress. `may_be_here`:
    this process reads what it has read before workers could start.
    """

    def __init__(
        self,
        take_pool: Callable[[], WorkerPool],
        machine: Machine,
        most: int,
        stall_timeout: float | str | None,
        root: Path,
        signals: Interruption,
        doing: Callable[[str], None],
        *,
        may_be_here: bool,
    ) -> None:
        self.notes: list[str] = []
        self._take_pool, self._machine, self._most = take_pool, machine, most
        self._stall_timeout, self._root = stall_timeout, root
        self._signals, self._doing = signals, doing
        self._may_be_here = may_be_here

    def __call__(
        self, task: Task, count: int, arrays: Sequence[SharedArray], seconds: float
    ) -> list[Any]:
        """Return the task's results for consecutive ranges, see `Readers`.

        Raises
        ------
        InputError
            A reader died or hung.
        """
        from asynckfold.data.reading import Here

        here = Here()
        if self._may_be_here and reads_here(seconds, self._take_pool().server.seconds_to_serve):
            if count:
                self._say_here("workers start later; engine='process' asks for them")
            return here(task, count, arrays, seconds)
        packed = file_descriptors.nameless_file()
        room = self._machine.free_memory({}) // MEMORY_SHARE
        try:
            with os.fdopen(os.dup(packed), "wb") as file:
                dump(task, _SizeLimit(file, room))
        # Pickling runs code of the user, which may raise anything.
        except Exception as error:  # noqa: BLE001
            os.close(packed)
            self._say_here(f"it cannot be sent to another: {type(error).__name__}: {error}")
            return here(task, count, arrays, seconds)
        try:
            fitting = room // max(1, os.fstat(packed).st_size)
            number = max(1, min(int(seconds / SECONDS_EACH), count, self._most, fitting))
            return self._read(packed, number, count, arrays)
        except UnpackError as error:
            self._say_here(f"it cannot be unpacked in another: {error.line}")
            return here(task, count, arrays, seconds)
        finally:
            os.close(packed)

    def _say_here(self, why: str) -> None:
        text = f"the dataset is read in this process, which a crash would end: {why}"
        if text not in self.notes:
            self.notes.append(text)

    def _read(
        self, packed: int, number: int, count: int, arrays: Sequence[SharedArray]
    ) -> list[Any]:
        deaths: list[_ReaderDiedError] = []
        # Ended from outside, perhaps out of memory: again, with a single reader, as jobs are.
        for readers in (number, 1, 1):
            try:
                return self._attempt(packed, readers, count, arrays)
            except _ReaderDiedError as death:
                deaths.append(death)
                if _is_its_sample(deaths):
                    break
        raise InputError([_problem(deaths)]) from deaths[-1].death

    def _attempt(
        self, packed: int, number: int, count: int, arrays: Sequence[SharedArray]
    ) -> list[Any]:
        import torch

        from asynckfold.data.shared_arrays import ArraySpec, SharedArray
        from asynckfold.training.worker.reads import Files, Reads, UnpackFailure

        edges = np.linspace(0, count, number + 1).round().astype(int).tolist()
        pool = self._take_pool()
        if not pool.workers:
            pool.preload(named(packed))
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        engines, futures = list[ProcessEngine](), list[Future[Answer]]()
        with ExitStack() as stack:
            shared = stack.enter_context(closing(SharedArray(ArraySpec((number + 1,), "int64"))))
            written, places = [shared, *arrays], shared.writable()
            files = Files(tuple(array.spec for array in written))
            for reader in range(number):
                low, high = edges[reader : reader + 2]
                bundle: Any = Reads(self._root, files, reader, low, high, dtype)
                engine = ProcessEngine(
                    bundle,
                    [packed, *(array.fd for array in written)],
                    lambda running, pins: self._machine.load(None, running, pins),
                    lambda event: None,
                    pool,
                    self._stall_timeout,
                    self._signals,
                )
                stack.callback(engine.close)
                placement = Placement((), self._machine.unreserved(), 1, command=Command.READ)
                engines.append(engine)
                futures.append(engine.submit(placement, []))
            self._wait(engines, futures, places, edges)
            for reader, future in enumerate(futures):
                death = future.exception() if future.done() else None
                if isinstance(death, WorkerDiedError):
                    raise _ReaderDiedError(death, int(places[reader])) from death
                if death is not None:
                    raise death
            parts = [pickle.loads(future.result().results[0]) for future in futures]
            if failures := [part for part in parts if isinstance(part, UnpackFailure)]:
                raise UnpackError(failures[0].line, "")
            return parts

    def _wait(
        self,
        engines: Sequence[ProcessEngine],
        futures: Sequence[Future[Answer]],
        places: Any,
        edges: Sequence[int],
    ) -> None:
        """Wait until all readers ended, or one failed; `places` are their present samples."""
        reported = time.monotonic()
        while wait(futures, TICK_SECONDS, FIRST_EXCEPTION).not_done:
            self._signals.check()
            if any(future.done() and future.exception() for future in futures):
                return
            for engine in engines:
                engine.load([])
            if edges[-1] and time.monotonic() - reported > SAY_SECONDS:
                reported = time.monotonic()
                pairs = zip(places.tolist(), edges, strict=True)
                done = sum(max(0, place - 1 - low) for place, low in pairs)
                self._doing(f"reading the data: {done:,} of {edges[-1]:,} samples")


class _SizeLimit:
    """A binary file with a limit on its bytes."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self._left = file, most

    def write(self, data: Any) -> int:
        """Write, or raise `MemoryError`."""
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise MemoryError("a copy of it takes more than a quarter of the free memory")
        return self._file.write(data)


class _ReaderDiedError(Exception):
    """A reader died at a sample, numbered from 1; 0 before the first; or in `STEPS`."""

    def __init__(self, death: WorkerDiedError, place: int) -> None:
        super().__init__(str(death))
        self.death, self.place = death, place


def _is_its_sample(deaths: Sequence[_ReaderDiedError]) -> bool:
    """Whether a sample is the cause: its reader hung, or died there twice of what it did itself."""
    *earlier, last = deaths
    if last.death.outcome == "hang":
        return True
    is_killed = last.death.outcome == "oom" or last.death.cause.startswith("SIGKILL")
    return not is_killed and any(item.place == last.place for item in earlier)


def _problem(deaths: Sequence[_ReaderDiedError]) -> Problem:
    """Return the problem, with the sample at which the last reader died."""
    from asynckfold.training.worker.reads import STEPS

    last = deaths[-1]
    death = last.death
    places = {0: "the dataset", STEPS: "dataset[0] and others, with their transform,"}
    place = places.get(last.place, f"dataset[{last.place - 1}]")
    if not _is_its_sample(deaths):
        return Problem(
            "the processes that read the dataset must not be ended from outside",
            f"{', '.join(item.death.cause for item in deaths)}; the last one read {place}",
            "Look who ended them (dmesg shows what the kernel ended for want of memory), and make "
            "the same call again.",
        )
    if death.outcome == "hang":
        rule, received = "must be read in time", f"no end within stall_timeout: {death.cause}"
    else:
        rule, received = "must be readable", f"the process that read it died: {death.cause}"
    return Problem(
        f"{place} {rule}",
        received,
        "Repair the dataset, or leave the sample out with torch.utils.data.Subset; "
        "engine='serial' reads in this process, for a debugger.",
    )
