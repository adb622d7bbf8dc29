"""The life of a worker process, on one page.

::

    fork server                         worker                                      sweep
    ───────────                         ──────                                      ─────
        fork ─────────────────► main: new session, dies with the server
                                  │ ("ready", pid) ───────────────────────────────►
                                  ▼
                          ┌──► receive ◄──────────────────────── a command, on the same pipe
                          │       ├─ bundle   unpack the recipe, map the data
                          ├───────┤
                          │       ├─ run      pin, `execute` with the log as stdout and stderr:
                          │       │             ("events", [Started, EpochEnded, …]) ─────────►
                          │       │           ("answer", results, …) ────────────────────────►
                          ├───────┤             or ("error" | "lost" | "storage", …)
                          │       └─ exit, pipe closed, or a job left something behind: end

Between two batches a job pauses while the sweep asks for it. SIGTERM asks for a checkpoint after
the current batch. SIGINT, which a terminal sends to every process, is ignored: the sweep decides
what follows.
"""

from __future__ import annotations

import faulthandler
import io
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.jobs.digests.run import imported_otherwise
from asynckfold.jobs.messages import EpochEnd, JobStart, Leftovers, RunEvent, Task
from asynckfold.jobs.placement import Placement
from asynckfold.system import file_descriptors, process, terminal
from asynckfold.system.heartbeat import STACKS_SIGNAL, Heartbeat
from asynckfold.training.bundle import Bundle
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.job_log import JobLog, NoLog
from asynckfold.training.training_run import EVENT_SECONDS
from asynckfold.training.worker.execute import FEW_FILES, Stop, execute, in_turn, outcome_of
from asynckfold.training.worker.reads import Reads, read_range
from asynckfold.training.worker.spinning import SpinSwitch


def main(descriptor: int, heartbeat: Heartbeat) -> None:
    """Serve one pipe until it closes; never returns to the code that forked."""
    server = os.getppid()
    os.setsid()
    process.die_with_parent(server)
    process.adopt_orphans()
    process.renice_session()
    stopping = False

    def ask_to_stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    def set_signals() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, ask_to_stop)

    set_signals()
    # A crash in native code writes its stack to the job's log; so does a hang, on request.
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # So that the log has what was printed before a crash.
        sys.stdout.reconfigure(line_buffering=True)
    pipe: Connection[Any, Any] = Connection(descriptor)
    # A process forked by user code must not answer for this one, nor keep the pipe open.
    os.register_at_fork(after_in_child=pipe.close)
    pipe.send(("ready", os.getpid()))

    def stop() -> bool:
        heartbeat.rest(lambda: stopping)
        spinning.look()
        return stopping

    worker, spinning = WorkerState(pipe, stop, heartbeat), SpinSwitch()
    while True:
        try:
            command, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        if command == "bundle":
            worker.take_bundle(*arguments)
        elif command == "run":
            stopping = False
            set_signals()  # user code of an earlier job may have changed them
            answer = worker.run(*arguments)
            spinning.end()
            worker.send_kept()
            pipe.send(answer)
            ends = answer[0] == "lost" or (answer[0] == "answer" and answer[3])
            if ends or arguments[0].wants_new_worker(process.has_gpu()):
                return
        else:
            return


class WorkerState:
    """A worker between two messages: the bundle in hand, or why it could not be unpacked."""

    def __init__(
        self, pipe: Connection[Any, Any], stop: Stop, heartbeat: Heartbeat | None = None
    ) -> None:
        self.pipe = pipe
        self.stop = stop
        self.heartbeat = heartbeat or Heartbeat()
        self.bundle: Bundle | Reads | None = None
        self.data: Any = None
        self.broken, self.outcome, self.spent = "", "error", False
        self.models: tuple[str, ...] = ()  # that trained last
        self.files = process.open_files()
        self._kept: list[RunEvent] = []
        self._sent_at = time.monotonic()

    def take_bundle(
        self,
        argv: list[str],
        paths: list[str],
        folder: str,
        environment: dict[str, str],
        count: int,
    ) -> None:
        """Receive descriptors: the packed bundle, then the shared arrays."""
        received = file_descriptors.receive(self.pipe, count)
        # As in the caller's process now: a model may read the script's arguments.
        sys.argv[:], sys.path[:] = argv, paths
        os.environ.clear()
        os.environ.update(environment)
        self.bundle, self.data, self.models = None, None, ()
        self.broken, self.outcome = "", "error"
        # Unpacking runs user code, which may raise anything; every task then reports it.
        try:
            os.chdir(folder)
            # Mapped, not read: workers share the file's position, and may unpack at the same time.
            with mmap.mmap(received[0], 0, access=mmap.ACCESS_READ) as packed:
                self.bundle = cloudpickle.loads(packed)
            self.data = self.bundle.data.open(received[1:])
            if isinstance(self.bundle, Bundle) and self.bundle.code:
                self.broken = _changed_code(self.bundle)
        except BaseException as error:  # noqa: BLE001
            summary = traceback.TracebackException.from_exception(error)
            self.broken = "".join(summary.format())
            self.outcome = outcome_of(error, str(summary))
        finally:
            for descriptor in received:
                os.close(descriptor)

    def run(self, placement: Placement, tasks: Sequence[Task]) -> tuple[Any, ...]:
        """Return ``("answer", results, peak bytes, whether it ends)``, or what went wrong."""
        self.spent = False
        if self.bundle is None or self.data is None or self.broken:
            line = self.broken.strip().splitlines()[-1]
            if self.outcome != "error":
                return ("lost", line, self.outcome)
            return ("error", line, self.broken)
        if placement.cores:
            process.pin(0, placement.cores)
        results: list[Any] = []
        try:
            for part in in_turn(placement, tasks, results, self.tell, self.stops_row):
                results += self.execute(self.bundle, self.data, placement, part)
            return ("answer", results, process.peak_memory(), self.ends)
        except StorageError as error:
            return ("storage", error.errno, error.strerror or str(error))
        except WorkerDiedError as error:
            return ("lost", error.cause, error.outcome)

    def execute(
        self, bundle: Bundle | Reads, data: Any, placement: Placement, tasks: Sequence[Task]
    ) -> list[Any]:
        """Carry out a placement or one job of a row, or read samples."""
        self.models, last = tuple(task.job.model for task in tasks), self.models
        # Jobs of one model need as much memory; the peak of a dry run is not recorded.
        process.reset_peak_memory(keeps_freed=self.models in ((), last))
        for task in tasks:
            self.tell(JobStart(task.job.id, task.attempt, os.getpid()))
        if isinstance(bundle, Reads):
            with _output_to_log(None), isolated():
                return [read_range(bundle, data, self.heartbeat)]
        with _output_to_log(JobLog(bundle.root, tasks[0].job) if tasks else None):
            return execute(bundle, data, placement, tasks, self.tell, self.stop, self.heartbeat)

    def stops_row(self) -> bool:
        """Whether not to begin the next job of a row here."""
        return self.ends or self.stop()

    @property
    def ends(self) -> bool:
        """Whether this process must not run another job, after what user code left behind.

        The fork server then kills the processes that user code started in other sessions.
        """
        return (
            self.spent or process.open_files() > self.files + FEW_FILES or bool(process.runaways())
        )

    def tell(self, event: RunEvent) -> None:
        """Take note of what a job left behind, and send an event to the sweep."""
        if isinstance(event, Leftovers):
            # The next job gets a new process.
            self.spent, event = True, replace(event, goes_on=False)
        self.send(event)

    def send(self, event: RunEvent) -> None:
        """Send an event; the ends of short epochs wait for each other.

        Each message costs this process, the sweep and each one between them up to a millisecond.
        """
        self._kept.append(event)
        is_short = isinstance(event, EpochEnd) and event.epoch.seconds < EVENT_SECONDS
        if not is_short or time.monotonic() - self._sent_at >= EVENT_SECONDS:
            self.send_kept()

    def send_kept(self) -> None:
        """Send the events that have waited, in their order."""
        if self._kept:
            self.pipe.send(("events", self._kept))
            self._kept, self._sent_at = [], time.monotonic()


def _changed_code(bundle: Bundle) -> str:
    """Return an error if a module's file differs from what the caller's process imported."""
    files = imported_otherwise(bundle.recipe, bundle.code)
    if not files:
        return ""
    return (
        f"module files differ from the code that the caller imported: {files}. "
        "Workers import these files: reload the module (importlib.reload) or restart Python, and "
        "set its variables in the file itself"
    )


@contextmanager
def _output_to_log(log: JobLog | None) -> Iterator[None]:
    """Redirect stdout and stderr to the job's log, or to nowhere."""
    saved = [os.dup(number) for number in (1, 2)]
    try:
        with log or NoLog() as target:
            for number in (1, 2):
                os.dup2(target.fileno(), number)
            yield
    finally:
        terminal.flush()
        for number, old in zip((1, 2), saved, strict=True):
            os.dup2(old, number)
            os.close(old)
