"""A probe: time some real steps of one model, in a worker, as its jobs will run.

It runs on the cores and threads of its placement; the sweep starts as many probes side by side as
it would start jobs. On a GPU, where a first step takes seconds, probes wait for each other after
it. A probe leaves nothing behind: it builds its own model, and every job seeds the generators.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from statistics import median

import torch

from asynckfold.data.batches import Batches
from asynckfold.jobs.cost import Timing
from asynckfold.jobs.messages import RunEvent, Started, Task
from asynckfold.jobs.plan import Job
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import evaluation, gradients, setup, training_run
from asynckfold.training.bundle import Bundle
from asynckfold.training.fusion import trainer
from asynckfold.training.fusion.group import FusionGroup
from asynckfold.training.job_log import NoLog

PROBE_SECONDS = 0.25
"""How long to time steps."""

LONG_SECONDS = 1.0
"""A longer call is not repeated: its warm-up is a small part of it."""


def measure(
    bundle: Bundle,
    jobs: Sequence[Job],
    data: Batches,
    device: torch.device,
    report: Callable[[RunEvent], None],
    stop: Callable[[], bool],
    heartbeat: Heartbeat,
) -> Timing:
    """Time training steps and an evaluation batch of a job, or steps of a fusion group.

    A probe that shall wait for others (`heartbeat.pause_requested`) reports `Started`, as attempt
    0, after its first step; `stop` then blocks. If user code raises, the `Timing` holds the
    traceback.
    """

    def meet() -> bool:
        if not heartbeat.pause_requested:
            return False
        report(Started(jobs[0].id, 0, os.getpid()))
        stop()
        return True

    try:
        if len(jobs) > 1:
            return Timing(_seconds_together(bundle, jobs, data, device))
        return _timing(bundle, jobs[0], data, device, meet)
    except (Exception, SystemExit):  # noqa: BLE001
        return Timing(failure=traceback.format_exc())


def _timing(
    bundle: Bundle, job: Job, data: Batches, device: torch.device, meet: Callable[[], bool]
) -> Timing:
    process.reset_peak_memory()
    before = process.peak_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with NoLog() as log:
        training = setup.build(bundle, Task(job), data, device, log, Heartbeat(), pretrains=False)
        valid = training.valid[: bundle.plan.params.eval_batch_size]
        if bundle.plan.params.compile:
            # Compile beforehand: it happens once per shape.
            next(_steps(training))()
            evaluation.evaluate(training, valid)
        step = _seconds(_steps(training), device, PROBE_SECONDS, meet)
        scored = cycle([lambda: evaluation.evaluate(training, valid)])
        evaluating = _seconds(scored, device, 0.0)
    return Timing(
        step,
        evaluating,
        max(0, process.peak_memory() - before),
        # Including the allocator's cache, which other processes cannot use.
        torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    )


def _seconds_together(
    bundle: Bundle, jobs: Sequence[Job], data: Batches, device: torch.device
) -> float:
    """Seconds of a step of a fusion group, per job."""
    # The probe repeats the first epoch: an LR schedule must not step with every batch.
    params = replace(bundle.plan.params, lr_step="epoch")
    plan = replace(bundle.plan, params=params, groups=(tuple(job.id for job in jobs),))
    tasks = [Task(job) for job in jobs]
    with ExitStack() as logs:
        group = trainer.build(
            replace(bundle, plan=plan), tasks, data, device, Heartbeat(), logs, logged=False
        )
        return _seconds(_fused_steps(group), device, PROBE_SECONDS) / len(jobs)


def _fused_steps(group: FusionGroup) -> Iterator[Callable[[], object]]:
    """Repeat the steps of the first epoch."""
    while True:
        group.begin_epoch()
        while group.batch < group.batches:
            yield group.step
        group.batch = 0
        for row in group.replicas:
            row.stand_at(0, 0)


def _steps(training: training_run.Training) -> Iterator[Callable[[], object]]:
    """Repeat the steps of the first epoch."""
    training.order_samples()
    evaluation.set_mode(training.model, training.criterion, training.optimizer, train=True)

    def step(batch: int) -> object:
        return gradients.training_step(training, *training.samples_of(batch))

    for batch in cycle(range(training.batches)):
        yield lambda batch=batch: step(batch)  # type: ignore[misc]


def _seconds(
    calls: Iterator[Callable[[], object]],
    device: torch.device,
    least: float,
    meet: Callable[[], bool] = lambda: False,
) -> float:
    """Median seconds of at least two calls and `least` seconds, after one call to warm up.

    A long first call is the only one, unless the probe then waited for others.
    """
    started = time.perf_counter()
    first = _timed(next(calls), device)
    if meet():
        started = time.perf_counter()
    elif first > LONG_SECONDS:
        return first
    seconds = [_timed(next(calls), device) for _ in range(2)]
    while time.perf_counter() - started < least:
        seconds.append(_timed(next(calls), device))
    return median(seconds)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
