"""A worker process as its parent sees it: its pipe, its work, and how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asynckfold.engines.engine import Answer, Tell
from asynckfold.engines.server_process import environment
from asynckfold.errors import StorageError, UnpackError, WorkerDiedError
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Placement
from asynckfold.system import file_descriptors, process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.system.limits import oom_kills, was_short_of_memory
from asynckfold.system.units import gibibytes


@dataclass(eq=False)
class Submission:
    """A placement, the future of its answer, and its worker."""

    placement: Placement
    tasks: Sequence[Task]
    tell: Tell
    future: Future[Answer] = field(default_factory=Future)
    worker: Worker | None = None
    cores: tuple[int, ...] = ()  # that the worker is pinned to now
    room_at: float | None = None  # until when a free worker is awaited

    def __post_init__(self) -> None:
        self.cores = self.placement.cores


class Worker:
    """One worker process; the listening thread and the caller's thread share it."""

    def __init__(self, name: int, pipe: Connection[Any, Any], heartbeat: Heartbeat) -> None:
        self.name = name
        self.pipe = pipe
        self.heartbeat = heartbeat
        self.pid = 0
        self.used = False
        self.gpu = ""
        self.work: Submission | None = None
        self.open = True
        self.status: int | None = None
        self.fork_errno = 0
        self.peak_memory = 0
        self.hang = ""
        self.killed = False
        self.bundle = ""
        self._oom_kills: int | None = None
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether it has work."""
        return self.work is not None

    @property
    def alive(self) -> bool:
        """Whether it may take a placement."""
        return self.open and self.status is None and not self.hang

    def assign(self, work: Submission) -> bool:
        """Note its work; return whether the process had ended before."""
        self.heartbeat.ask(False)
        self.heartbeat.begin_long_phase()
        self.used = True
        self.gpu = work.placement.gpu_uuid or self.gpu
        with self._lock:
            self.work = work
            self._oom_kills = oom_kills()
            return self.status is not None

    def take_work(self) -> Submission | None:
        """Return its work, to the first thread that asks."""
        with self._lock:
            work, self.work = self.work, None
        return work

    def close(self) -> None:
        """Close its pipe, once: both threads may find its end at the same time."""
        with self._lock:
            self.open = False
            self.pipe.close()

    def send(self, work: Submission, bundle: str, files: Sequence[int]) -> None:
        """Send work, and before it the bundle with its files unless the worker has it."""
        if self.bundle != bundle:
            folder, variables = str(Path.cwd()), environment(os.environ)
            message = ("bundle", sys.argv, sys.path, folder, variables, len(files))
            file_descriptors.send(self.pipe, message, files)
            self.bundle = bundle
        self.pipe.send(("run", work.placement, list(work.tasks)))

    def hear(self) -> None:
        """Take one message from its pipe."""
        try:
            kind, *content = self.pipe.recv()
        except (EOFError, OSError):
            self.open = False
            return
        if kind == "ready":
            self.pid = content[0]
        elif kind == "events":
            if (work := self.work) is not None:
                for event in content[0]:
                    work.tell(event)
        else:
            self._answer(kind, content)

    def drain(self) -> None:
        """Take the messages that a worker sent before its end.

        A process that it started may hold the pipe open, so that no end of file comes.
        """
        try:
            while self.open and self.pipe.poll(0):
                self.hear()
        except OSError:
            self.open = False

    def _answer(self, kind: str, content: list[Any]) -> None:
        work = self.take_work()
        if work is None:
            return
        ends = kind == "lost" or (kind == "answer" and content[2])
        if ends or work.placement.wants_new_worker(process.has_gpu()):
            # It is about to exit, so it must not be given anything.
            self.open = False
        if kind == "answer":
            work.future.set_result(Answer(content[0], self.pid, content[1]))
        elif kind == "storage":
            work.future.set_exception(StorageError(content[0], content[1]))
        elif kind == "lost":
            work.future.set_exception(self.loss(*content))
        else:
            work.future.set_exception(UnpackError(content[0], content[1]))

    def death(self) -> WorkerDiedError:
        """Return why the process ended without an answer."""
        cause, peak = _cause(self.status), self.peak_memory
        if self.hang:
            return WorkerDiedError(self.pid, self.hang, "hang", peak)
        if self.status != -signal.SIGKILL or not was_short_of_memory(self._oom_kills, peak):
            return WorkerDiedError(self.pid, cause, peak_memory=peak)
        text = f"{cause}, out of memory at a peak of {gibibytes(peak)}"
        return WorkerDiedError(self.pid, text, "oom", peak)

    def loss(self, cause: str, outcome: str) -> WorkerDiedError:
        """Return why a worker gives up its work, such as another rank that was killed."""
        if outcome == "died" and was_short_of_memory(self._oom_kills, 0):
            return WorkerDiedError(self.pid, f"{cause}, out of memory", "oom")
        return WorkerDiedError(self.pid, cause, outcome)


def _cause(status: int | None) -> str:
    if status is None:
        return "its server ended"
    if status >= 0:
        return f"exit code {status} without an answer"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
