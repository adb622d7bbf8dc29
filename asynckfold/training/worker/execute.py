"""Carry out a placement, in a worker or in the process of the serial engine.

::

    execute ── isolate, apply settings ─┬─ dry run, measure, estimate
                                        └─ plain, fused, several processes ── one attempt:
                                           user code raises → failed Result, or RetryableFailure
"""

from __future__ import annotations

import errno
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from asynckfold.data.batches import Batches
from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.jobs.messages import JobEnd, Leftovers, RetryableFailure, RunEvent, Task
from asynckfold.jobs.placement import Command, Placement
from asynckfold.jobs.result import FAILED, Result
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.planning.gpu_rule import memory_share
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import loop, serial_baseline, torch_settings, user_loop
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run import preflight
from asynckfold.training.fusion import group
from asynckfold.training.isolation.guard import WITHOUT_NUMBERS, isolated, leave_contexts
from asynckfold.training.job_log import JobLog
from asynckfold.training.process_group.gpu_handoff import hide_gpus, open_gpu
from asynckfold.training.training_run import Report

Stop = Callable[[], bool]

LINE_LIMIT = 440
"""Longest one-line error, without the position."""

TEXT_LIMIT = 65536
"""Longest traceback; a message may hold a whole array."""

FEW_FILES = 32
"""Files that a process may keep open after a job: libraries keep some."""


def execute(
    bundle: Bundle,
    data: Batches,
    placement: Placement,
    tasks: Sequence[Task],
    report: Report,
    stop: Stop,
    heartbeat: Heartbeat | None = None,
) -> list[Any]:
    """Carry out a placement in this process.

    Returns, by command: for each task a `Result`, a `RetryableFailure`, or None if `stop` asked to
    leave; the `Facts` of a dry run (of all models, or those of the placement's jobs); the
    `Baseline` of a serial loop.
    """
    heartbeat = heartbeat or Heartbeat()
    on_several = placement.trainer in SEVERAL
    # With several processes, GPUs are hidden until they are taken: their count changes.
    once = nullcontext() if on_several else counted_once()
    with _prepared(bundle, placement, report), once:
        torch_settings.flush_denormals()
        torch.set_num_threads(1 if on_several else placement.threads)
        torch.set_default_dtype(getattr(torch, bundle.default_dtype))
        torch.set_deterministic_debug_mode(bundle.deterministic)
        if not on_several:
            settle_autograd()
        if placement.command is Command.DRY_RUN:
            models = {job.model for job in bundle.plan.jobs if job.id in placement.jobs}
            return [preflight.check(bundle, data, heartbeat, models)]
        if on_several:
            from asynckfold.training.multiprocess.base import train

            (task,), cores = tasks, placement.cores
            with hide_gpus(placement.gpu, placement.gpu_uuid) as gpu:
                if gpu is None:
                    settle_autograd()
                with _attempt(bundle, tasks) as results:
                    results.append(train(bundle, task, data, cores, report, stop, heartbeat, gpu))
                return results
        with _device(placement) as device:
            if placement.command is Command.MEASURE:
                return [serial_baseline.measure(bundle, data, stop, device, report)]
            if placement.command is Command.ESTIMATE:
                return [serial_baseline.estimate(bundle, data, stop, device)]
            if placement.trainer == "fused":
                ended: dict[str, Result] = {}

                def tell(event: RunEvent) -> None:
                    if isinstance(event, JobEnd):
                        ended[event.result.job_id] = event.result
                    report(event)

                # An exception of the group spares jobs that ended before it.
                with _attempt(bundle, tasks) as results:
                    fail = partial(failure, bundle)
                    results += group.train(bundle, tasks, data, device, tell, stop, heartbeat, fail)
                pairs = zip(tasks, results, strict=True)
                answers = [ended.get(task.job.id, item) for task, item in pairs]
                return [loop.with_gpu_memory(item, device) for item in answers]
            results = []
            alone = loop if bundle.recipe.fit_fn is None else user_loop
            for task in tasks:
                with _attempt(bundle, [task]) as answer:
                    result = alone.train(bundle, task, data, device, report, stop, heartbeat)
                    answer.append(loop.with_gpu_memory(result, device))
                results += answer
            return results


@contextmanager
def _prepared(bundle: Bundle, placement: Placement, report: Report) -> Iterator[None]:
    """Apply settings of the caller's process; report afterwards what user code left changed."""
    with isolated() as traces:
        leave_contexts()
        torch_settings.apply(bundle.numerics)
        if bundle.plan.params.precision == "tf32":
            torch_settings.allow_tf32()
        elif placement.trainer == "fused" and bundle.plan.params.precision == "fp32":
            # cuDNN takes TF32 for the grouped convolutions of fused jobs, and not for plain ones.
            torch_settings.allow_tf32(False)
        yield
    if traces.left:
        job = placement.jobs[0] if placement.jobs else None
        names = tuple(dict.fromkeys(traces.left))
        report(Leftovers(job, names, numbers=not WITHOUT_NUMBERS.issuperset(names)))


def in_turn(
    placement: Placement, tasks: Sequence[Task], results: list[Any], report: Report, stop: Stop
) -> Iterator[Sequence[Task]]:
    """Yield the jobs of a row one by one, and report each result when the next job begins.

    The tasks of any other placement are one piece of work. The caller adds to `results`, where
    those that were reported become None, and so do those of jobs that `stop` left out.
    """
    for part in [[task] for task in tasks] if placement.is_job_batch else [tasks]:
        if results and isinstance(last := results[-1], Result):
            report(JobEnd(replace(last, pid=os.getpid(), peak_memory=process.peak_memory())))
            results[-1] = None
        if results and stop():
            results.append(None)
        else:
            yield part


@contextmanager
def _device(placement: Placement) -> Iterator[torch.device]:
    """Make a GPU the current device: its generator is the one in checkpoints."""
    gpu = placement.gpu
    if gpu is None:
        yield torch.device("cpu")
        return
    try:
        index = open_gpu(gpu, placement.gpu_uuid, narrow=_ignores_interrupts())
    except RuntimeError as error:
        cause = f"it cannot open GPU {gpu}: {error}"
        raise WorkerDiedError(os.getpid(), cause, "device_lost") from error
    with torch.cuda.device(index):
        drawn = torch.cuda.get_rng_state(index)
        if _ignores_interrupts():  # else tensors of the caller would be limited, too
            _, total = torch.cuda.mem_get_info(index)
            torch.cuda.set_per_process_memory_fraction(memory_share(total, placement), index)
        torch.cuda.reset_peak_memory_stats(index)
        try:
            yield torch.device("cuda", index)
        finally:
            # A lost GPU refuses; what was raised tells of it.
            with suppress(RuntimeError):
                # Of the caller's process, which goes on.
                torch.cuda.set_rng_state(drawn, index)
                # Other processes cannot use what this one caches.
                torch.cuda.empty_cache()


_REMEMBERED = "_cached_device_count"
"""Torch's cache, which it uses once CUDA is in use. Versions without it are left alone."""


def settle_autograd() -> None:
    """Let autograd look for GPUs now, if there are none.

    It looks in the first backward pass of a process. Without a GPU, torch.compile, which a model
    may use, puts something in the place of one that counts as one; autograd then starts a thread
    for it, and processes forked afterwards can run no backward pass.
    """
    if torch.cuda.device_count() == 0:
        torch.autograd.backward(torch.ones(1, requires_grad=True))


@contextmanager
def counted_once() -> Iterator[None]:
    """Let torch cache the number of visible GPUs, which must not change meanwhile.

    An optimizer asks in each step whether there is a GPU, since the step might be captured in a
    graph. Until CUDA is in use, torch loads NVML for each answer: 35 µs on a machine without GPUs,
    as much as a step of Adam on a small model.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used or getattr(torch.cuda, _REMEMBERED, 0) is not None:
        yield
        return
    setattr(torch.cuda, _REMEMBERED, torch.cuda.device_count())
    try:
        yield
    finally:
        setattr(torch.cuda, _REMEMBERED, None)


@contextmanager
def _attempt(bundle: Bundle, tasks: Sequence[Task]) -> Iterator[list[Any]]:
    """Yield a list for the results; exceptions of user code become results here, and only here."""
    started, files, results = time.monotonic(), process.open_files(), list[Any]()
    try:
        with isolated(patches=True):
            yield results
    except StorageError as error:
        leaked = process.open_files() - files
        if error.errno != errno.EMFILE or leaked <= FEW_FILES:
            raise
        # This process, not the disk, is at fault.
        cause = f"it left {leaked} files open ({os.strerror(errno.EMFILE)})"
        raise WorkerDiedError(os.getpid(), cause) from error
    except WorkerDiedError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _ignores_interrupts():
            raise
        seconds = (time.monotonic() - started) / len(tasks)
        results[:] = [failure(bundle, task, error, seconds) for task in tasks]


def _ignores_interrupts() -> bool:
    """Whether this is a worker, where only user code raises KeyboardInterrupt."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def failure(
    bundle: Bundle, task: Task, error: BaseException, seconds: float = 0.0
) -> Result | RetryableFailure:
    """Return the result of a job that raised, and write the traceback to its log.

    `seconds` since the job's start are its training time if it raised before the training.
    """
    # Not str(error): a user's __str__ may raise.
    summary = traceback.TracebackException.from_exception(error)
    text = _writable("".join(summary.format()))
    with JobLog(bundle.root, task.job) as log:
        log.write(text)
    line = " ".join(_writable(f"{type(error).__name__}: {summary}").split())[:LINE_LIMIT]
    place = loop.position_of(error)
    line += f" ({place})" if place else ""
    outcome = outcome_of(error, str(summary))
    if outcome == "device_lost":
        raise WorkerDiedError(os.getpid(), line, outcome) from error
    trained = loop.seconds_of(error, seconds)
    result = Result(
        task.job.id, task.attempt, FAILED, fit_seconds=trained, error=line, traceback=text
    )
    return result if outcome == "error" else RetryableFailure(outcome, result)


_MESSAGES = {
    "oom": (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "Cannot allocate memory",
        "std::bad_alloc",
    ),
    "gpu_oom": (
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ),
    # The process cannot use its GPU again (pytorch#17425).
    "device_lost": (
        "CUDA error:",
        "CUDNN_STATUS_EXECUTION_FAILED",
        "CUBLAS_STATUS_EXECUTION_FAILED",
    ),
    "died": ("DataLoader worker (pid",),
}
"""Outcomes by messages of torch, its allocator and the kernel; the first that matches counts."""


def outcome_of(error: BaseException, text: str) -> str:
    """Return the outcome of an attempt that raised, as in `asynckfold.scheduling.retries`.

    Most exceptions are errors of user code, which would raise again. Out of memory, a lost GPU and
    a dead DataLoader worker are retryable; torch identifies the last two only by their messages.

    The message is passed in `text`, since a user's ``__str__`` may raise.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "gpu_oom"
    no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or no_memory:
        return "oom"
    for outcome, words in _MESSAGES.items() if isinstance(error, RuntimeError) else ():
        if any(word in text for word in words):
            return outcome
    return "error"


def _writable(text: str) -> str:
    """Return text that fits any file or database: middle cut out, odd characters escaped."""
    if len(text) > TEXT_LIMIT:
        left_out = len(text) - TEXT_LIMIT
        begin, end = text[: TEXT_LIMIT // 2], text[-TEXT_LIMIT // 2 :]
        text = f"{begin}\n… {left_out} characters left out …\n{end}"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
