"""The life of a worker process, on one page.

::

    born ── own session, dies with its server ── loop: receive
                                                  bundle  → unpack, map the data
                                                  run     → pin, set threads, train, answer
                                                  exit    → gone

RunEvent go up the same pipe while a task runs. Between two batches a job pauses, or goes on with
another number of threads, where the sweep asks it to. SIGTERM asks for a checkpoint at the next
batch; SIGINT, which a terminal sends to everyone, is the sweep's business.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from asynckfold.data import Batches
from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.jobs.digests.parts import imported_otherwise
from asynckfold.jobs.messages import JobEnded, Left, RetryableFailure, RunEvent, Started, Task
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.result import FAILED, Result
from asynckfold.system import file_descriptors, process, terminal
from asynckfold.system.heartbeat import STACKS_SIGNAL, Heartbeat
from asynckfold.training import loop, probe, serial_baseline
from asynckfold.training.bundle import Bundle, JobLog
from asynckfold.training.dry_run import preflight
from asynckfold.training.fusion import trainer
from asynckfold.training.isolation import denormals, torch_settings
from asynckfold.training.isolation.guard import (
    LIMITS,
    WITHOUT_NUMBERS,
    isolated,
    leave_contexts,
    limits,
)
from asynckfold.training.multiprocess import train
from asynckfold.training.process_group.gpu_handoff import HiddenGpu, hide_gpus
from asynckfold.training.worker.failure_kinds import outcome_of
from asynckfold.training.worker.gpu_count import counted_once
from asynckfold.training.worker.reads import Reads, read_range
from asynckfold.training.worker.spinning import Spinning

Report = Callable[[RunEvent], None]
Stop = Callable[[], bool]

LINE_LIMIT = 440
"""Characters of the one line that tells of an exception, without its place."""

FEW_FILES = 32
"""Files that a process may have open more than before: libraries keep some."""

TEXT_LIMIT = 65536
"""Characters kept of an exception, which may hold a whole array."""


def execute(
    bundle: Bundle,
    data: Batches,
    placement: Placement,
    tasks: Sequence[Task],
    report: Report,
    stop: Stop,
    heartbeat: Heartbeat | None = None,
) -> list[Any]:
    """Carry out a placement, here: in a worker, or in the process of the serial engine.

    Returns
    -------
    list
        Of `Result` for the plain and the fused trainer (None where it was asked to stop, a
        `RetryableFailure` where another attempt may succeed); the `Facts` of a preflight, of all
        models or of those of which its placement names a job; the `Baseline` of a serial loop; the
        `Timing` of a probe, whose placement names a job of the model, or several to be trained as
        one.

    Raises
    ------
    StorageError
        The disk refused.
    WorkerDiedError
        The GPU answers this process no more.
    """
    with isolated() as traces:
        leave_contexts()
        torch_settings.apply(bundle.numerics)
        found = _execute(bundle, data, placement, tasks, report, stop, heartbeat or Heartbeat())
    if traces.left:
        job = placement.jobs[0] if placement.jobs else None
        names = tuple(dict.fromkeys(traces.left))
        report(Left(job, names, numbers=not WITHOUT_NUMBERS.issuperset(names)))
    return found


def _execute(
    bundle: Bundle,
    data: Batches,
    placement: Placement,
    tasks: Sequence[Task],
    report: Report,
    stop: Stop,
    heartbeat: Heartbeat,
) -> list[Any]:
    on_several = placement.trainer in train.TRAINERS
    # There GPUs are hidden, and seen again by one process: their count changes.
    with nullcontext() if on_several else counted_once():
        denormals.flush()
        torch.set_num_threads(1 if on_several else placement.threads)
        torch.set_default_dtype(getattr(torch, bundle.default_dtype))
        torch.set_deterministic_debug_mode(bundle.deterministic)
        if placement.trainer == "preflight":
            models = {job.model for job in bundle.plan.jobs if job.id in placement.jobs}
            return [preflight.check(bundle, data, heartbeat, models)]
        if placement.trainer == "measure":
            return [serial_baseline.measure(bundle, data, stop)]
        if placement.trainer == "estimate":
            return [serial_baseline.estimate(bundle, data, stop)]
        if on_several:
            with hide_gpus(placement.gpu) as gpu:
                task, cores = tasks[0], placement.cores
                return [_train_on_several(bundle, data, task, cores, gpu, report, stop, heartbeat)]
        with _device(placement.gpu) as device:
            if placement.trainer == "probe":
                jobs = [job for job in bundle.plan.jobs if job.id in placement.jobs]
                with isolated(patches=True):
                    return [probe.measure(bundle, jobs, data, device, report, stop, heartbeat)]
            if placement.trainer == "fused":
                return _train_group(bundle, data, tasks, device, report, stop, heartbeat)
            return [_train(bundle, data, task, device, report, stop, heartbeat) for task in tasks]


def in_turn(
    placement: Placement,
    tasks: Sequence[Task],
    work: Callable[[Sequence[Task]], list[Any]],
    report: Report,
    stop: Stop,
) -> list[Any]:
    """Do the jobs of a row one after another, and report each result when the next job begins.

    When asked to stop, those that have not begun are left.

    Parameters
    ----------
    placement : Placement
        Where it is no row, all tasks are one piece of work.
    tasks : sequence of Task
        The jobs.
    work : callable
        Carries out one piece; returns an entry a task.
    report : callable
        Receives a `JobEnded` for each result but the last.
    stop : callable
        Asked between two jobs.

    Returns
    -------
    list
        What `work` returned; None where the result was reported already.
    """
    results: list[Any] = []
    for part in [[task] for task in tasks] if placement.is_row else [tasks]:
        if results and isinstance(found := results[-1], Result):
            report(JobEnded(replace(found, pid=os.getpid(), peak_memory=process.peak_memory())))
            results[-1] = None
        results += [None] if results and stop() else work(part)
    return results


@contextmanager
def _device(gpu: int | None) -> Iterator[torch.device]:
    """Where to train; the current device meanwhile, whose generator is the one that is saved."""
    if gpu is None:
        yield torch.device("cpu")
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    with torch.cuda.device(gpu):
        try:
            yield torch.device("cuda", gpu)
        finally:
            # What this process keeps for a next job, others on the GPU cannot use.
            torch.cuda.empty_cache()


def _train(
    bundle: Bundle,
    data: Batches,
    task: Task,
    device: torch.device,
    report: Report,
    stop: Stop,
    heartbeat: Heartbeat,
) -> Result | RetryableFailure | None:
    def work() -> list[Any]:
        return [loop.train(bundle, task, data, device, report, stop, heartbeat)]

    found: Result | RetryableFailure | None = _attempted(bundle, [task], work)[0]
    return found


def _train_on_several(
    bundle: Bundle,
    data: Batches,
    task: Task,
    cores: Sequence[int],
    gpu: HiddenGpu | None,
    report: Report,
    stop: Stop,
    heartbeat: Heartbeat,
) -> Result | RetryableFailure | None:
    def work() -> list[Any]:
        return [train.train(bundle, task, data, cores, report, stop, heartbeat, gpu)]

    found: Result | RetryableFailure | None = _attempted(bundle, [task], work)[0]
    return found


def _train_group(
    bundle: Bundle,
    data: Batches,
    tasks: Sequence[Task],
    device: torch.device,
    report: Report,
    stop: Stop,
    heartbeat: Heartbeat,
) -> list[Any]:
    """What raises for all of a group ends it, but for those of its jobs that ended before."""
    ended: dict[str, Result] = {}

    def tell(news: RunEvent) -> None:
        if isinstance(news, JobEnded):
            ended[news.result.job_id] = news.result
        report(news)

    def fail(task: Task, error: BaseException) -> Result | RetryableFailure:
        return failure(bundle, task, error)

    def work() -> list[Any]:
        return list(trainer.train(bundle, tasks, data, device, tell, stop, heartbeat, fail))

    found = _attempted(bundle, tasks, work)
    return [ended.get(task.job.id, item) for task, item in zip(tasks, found, strict=True)]


def _attempted(bundle: Bundle, tasks: Sequence[Task], work: Callable[[], list[Any]]) -> list[Any]:
    """The one place where whatever the user's code raises becomes the results of its jobs."""
    started, files, traces = time.monotonic(), process.open_files(), None
    try:
        with isolated(patches=True) as traces:
            return work()
    except StorageError as error:
        refuse_own_fault(error, files, traces is not None and LIMITS in traces.changed)
        raise
    except WorkerDiedError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _ignores_interrupts():
            raise
        seconds = (time.monotonic() - started) / len(tasks)
        return [failure(bundle, task, error, seconds) for task in tasks]


def refuse_own_fault(error: StorageError, files_before: int, limited: bool) -> None:
    """Tell a disk that refuses from a process that took from itself what it would need.

    Raises
    ------
    WorkerDiedError
        A job opened files until it might open no more, or lowered its limits.
    """
    leaked = process.open_files() - files_before
    said = os.strerror(error.errno or errno.EIO)
    if limited:
        cause = f"it lowered its own resource limits ({said})"
    elif error.errno == errno.EMFILE and leaked > FEW_FILES:
        cause = f"it left {leaked} files open ({said})"
    else:
        return
    raise WorkerDiedError(os.getpid(), cause) from error


def _ignores_interrupts() -> bool:
    """Whether this is a worker: an interrupt there was raised by the user's code."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def failure(
    bundle: Bundle, task: Task, error: BaseException, seconds: float = 0.0
) -> Result | RetryableFailure:
    """Return what a job comes to that raised, with its traceback in the job's log too.

    Parameters
    ----------
    bundle, task : Bundle, Task
        The job.
    error : BaseException
        What it raised.
    seconds : float
        Since it was begun: its training, where it raised before that.

    Raises
    ------
    WorkerDiedError
        The GPU answers this process no more, which is then of no use.
    """
    # Not str(error), which the user may have defined, and which may raise.
    told = traceback.TracebackException.from_exception(error)
    text = _writable("".join(told.format()))
    with JobLog(bundle.root, task.job) as log:
        log.write(text)
    line = " ".join(_writable(f"{type(error).__name__}: {told}").split())[:LINE_LIMIT]
    place = loop.place_of(error)
    line += f" ({place})" if place else ""
    outcome = outcome_of(error, str(told))
    if outcome == "device_lost":
        raise WorkerDiedError(os.getpid(), line, outcome) from error
    trained = loop.seconds_of(error, seconds)
    result = Result(
        task.job.id, task.attempt, FAILED, fit_seconds=trained, error=line, traceback=text
    )
    return result if outcome == "error" else RetryableFailure(outcome, result)


def _writable(text: str) -> str:
    """Return text that any file or database takes: begin and end of it, odd characters escaped."""
    if len(text) > TEXT_LIMIT:
        left_out = len(text) - TEXT_LIMIT
        begin, end = text[: TEXT_LIMIT // 2], text[-TEXT_LIMIT // 2 :]
        text = f"{begin}\n… {left_out} characters left out …\n{end}"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


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

    def obey_signals() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, ask_to_stop)

    obey_signals()
    # A crash in native code leaves its stack in the log of the job; a hang does when asked.
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What was printed before a crash is in the log as well.
        sys.stdout.reconfigure(line_buffering=True)
    pipe: Connection[Any, Any] = Connection(descriptor)
    # A process that user code forks must neither answer in our place nor keep the pipe open.
    os.register_at_fork(after_in_child=pipe.close)
    pipe.send(("ready", os.getpid()))

    def stop() -> bool:
        heartbeat.rest(lambda: stopping)
        spinning.look()
        return stopping

    worker, spinning = _Worker(pipe, stop, heartbeat), Spinning()
    while True:
        try:
            command, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        if command == "bundle":
            worker.take_bundle(*arguments)
        elif command == "run":
            stopping = False
            obey_signals()  # the job before may have set others
            answer = worker.run(*arguments)
            spinning.end()
            pipe.send(answer)
            ends = answer[0] == "lost" or (answer[0] == "answer" and answer[3])
            if ends or arguments[0].wants_new_worker(process.has_gpu()):
                return
        else:
            return


def _other_code(bundle: Bundle) -> str:
    """Say where the files of modules hold other code than the process had that sent the bundle."""
    found = imported_otherwise(bundle.recipe, bundle.code)
    if not found:
        return ""
    return (
        f"the files of modules hold something else than was imported when the call began: {found}. "
        "Workers import these files: reload the module (importlib.reload) or start Python anew, "
        "and put what was set in a module from outside into the file"
    )


class _Worker:
    """A bundle in hand, and what is wrong with it if it could not be unpacked."""

    def __init__(
        self, pipe: Connection[Any, Any], stop: Stop, heartbeat: Heartbeat | None = None
    ) -> None:
        self.pipe = pipe
        self.stop = stop
        self.heartbeat = heartbeat or Heartbeat()
        self.bundle: Bundle | Reads | None = None
        self.data: Any = None
        self.broken = ""
        self.outcome = "error"
        self.spent = False
        self.files, self.limits = process.open_files(), limits()

    def take_bundle(
        self,
        argv: list[str],
        paths: list[str],
        folder: str,
        environment: dict[str, str],
        count: int,
    ) -> None:
        """Receive descriptors: the packed bundle first, then the shared arrays."""
        received = file_descriptors.receive(self.pipe, count)
        # A model may read the arguments of the script, with a default where there are none.
        sys.argv[:], sys.path[:] = argv, paths
        # The caller's may have changed since this process was started.
        os.environ.clear()
        os.environ.update(environment)
        self.bundle, self.data, self.broken, self.outcome = None, None, "", "error"
        # Unpacking runs the user's code, which may raise anything; it is told per task.
        try:
            os.chdir(folder)
            # Mapped, not read: all workers share the position in the file, and some unpack at once.
            with mmap.mmap(received[0], 0, access=mmap.ACCESS_READ) as packed:
                self.bundle = cloudpickle.loads(packed)
            self.data = self.bundle.data.open(received[1:])
            if isinstance(self.bundle, Bundle) and self.bundle.code:
                self.broken = _other_code(self.bundle)
        except BaseException as error:  # noqa: BLE001
            told = traceback.TracebackException.from_exception(error)
            self.broken = "".join(told.format())
            self.outcome = outcome_of(error, str(told))
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
        work = partial(self.execute, self.bundle, self.data, placement)
        try:
            results = in_turn(placement, tasks, work, self.tell, self.stops_row)
            return ("answer", results, process.peak_memory(), self.ends)
        except StorageError as error:
            try:
                refuse_own_fault(error, self.files, limits() != self.limits)
            except WorkerDiedError as own:
                return ("lost", own.cause, own.outcome)
            return ("storage", error.errno, error.strerror or str(error))
        except WorkerDiedError as error:
            return ("lost", error.cause, error.outcome)

    def execute(
        self, bundle: Bundle | Reads, data: Any, placement: Placement, tasks: Sequence[Task]
    ) -> list[Any]:
        """Carry out a placement, or one job of a row, or read samples."""
        process.reset_peak_memory()
        for task in tasks:
            self.tell(Started(task.job.id, task.attempt, os.getpid()))
        if isinstance(bundle, Reads):
            with _output_to_nowhere(), isolated():
                return [read_range(bundle, data, self.heartbeat)]
        with _output_to_log(bundle, tasks):
            return execute(bundle, data, placement, tasks, self.tell, self.stop, self.heartbeat)

    def stops_row(self) -> bool:
        """Whether the next job of a row is not to be begun here."""
        return self.ends or self.stop()

    @property
    def ends(self) -> bool:
        """Whether no further job is for this process: by what it changed, or left behind.

        With it ends what it started in sessions of their own: its server sees to that.
        """
        return (
            self.spent or process.open_files() > self.files + FEW_FILES or bool(process.runaways())
        )

    def tell(self, news: RunEvent) -> None:
        if isinstance(news, Left):
            # The next job has a new process.
            self.spent, news = True, replace(news, goes_on=False)
        self.pipe.send(("news", news))


@contextmanager
def _output_to_log(bundle: Bundle, tasks: Sequence[Task]) -> Iterator[None]:
    """What the user's code prints belongs to its job, not into the sweep's display."""
    if not tasks:
        with _output_to_nowhere():
            yield
        return
    with JobLog(bundle.root, tasks[0].job) as log, log.kept_short(), _output_to(log.fileno()):
        yield


@contextmanager
def _output_to_nowhere() -> Iterator[None]:
    with Path(os.devnull).open("ab") as nowhere, _output_to(nowhere.fileno()):
        yield


@contextmanager
def _output_to(target: int) -> Iterator[None]:
    saved = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(target, number)
        yield
    finally:
        terminal.flush()
        for number, old in zip((1, 2), saved, strict=True):
            os.dup2(old, number)
            os.close(old)
