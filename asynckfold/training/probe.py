"""A probe: some real steps of one model, timed, in a worker as its jobs will be.

It runs on the cores and with the threads of its placement; the sweep starts as many side by side as
jobs would be. Those that share a GPU, where a first step takes seconds, are asked to pause before
they begin, and wait after their first step until all have come so far. Nothing of a probe stays:
the model is built for it, and every job seeds its generators.
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

from asynckfold.data import Batches
from asynckfold.jobs.cost import Timing
from asynckfold.jobs.messages import RunEvent, Started, Task
from asynckfold.jobs.plan import Job
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import batches, setup, training_run
from asynckfold.training.bundle import Bundle, NoLog
from asynckfold.training.fusion import trainer
from asynckfold.training.fusion.group import FusionGroup

PROBE_SECONDS = 0.25
"""How long steps are timed."""

LONG_SECONDS = 1.0
"""A call that takes longer is not repeated: its warming up is a small part of it."""


def measure(
    bundle: Bundle,
    jobs: Sequence[Job],
    data: Batches,
    device: torch.device,
    report: Callable[[RunEvent], None],
    stop: Callable[[], bool],
    heartbeat: Heartbeat,
) -> Timing:
    """Time training steps and an evaluation batch of a job, or steps of several as one.

    Parameters
    ----------
    bundle : Bundle
        The sweep.
    jobs : sequence of Job
        Any job of the model; of several, which are trained as one, a step has the seconds of one
        job's part.
    data : Batches
        The samples.
    device : torch.device
        Where the job would train.
    report : callable
        Hears `Started` of attempt 0 from a probe that waits for others.
    stop : callable
        Returns when no pause is asked for any more.
    heartbeat : Heartbeat
        Says whether one is.

    Returns
    -------
    Timing
        With the traceback where the user's code raised: its jobs will raise it, too.
    """

    def meet() -> bool:
        if not heartbeat.asked:
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
            # What compiling takes, once a shape, is no part of a step.
            next(_steps(training))()
            training.evaluate(valid)
        step = _seconds(_steps(training), device, PROBE_SECONDS, meet)
        scored = cycle([lambda: training.evaluate(valid)])
        evaluating = _seconds(scored, device, 0.0)
    return Timing(
        step,
        evaluating,
        max(0, process.peak_memory() - before),
        # With what the allocator holds beside its tensors: others cannot use that either.
        torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    )


def _seconds_together(
    bundle: Bundle, jobs: Sequence[Job], data: Batches, device: torch.device
) -> float:
    """Seconds of a step of all jobs as one, divided among them."""
    # An LR schedule that steps with each batch knows how many there will be.
    params = replace(bundle.plan.params, lr_step="epoch")
    plan = replace(bundle.plan, params=params, groups=(tuple(job.id for job in jobs),))
    tasks = [Task(job) for job in jobs]
    with ExitStack() as logs:
        group = trainer.build(
            replace(bundle, plan=plan), tasks, data, device, Heartbeat(), logs, logged=False
        )
        return _seconds(_fused_steps(group), device, PROBE_SECONDS) / len(jobs)


def _fused_steps(group: FusionGroup) -> Iterator[Callable[[], object]]:
    """Steps over the batches of the first epoch, again and again."""
    while True:
        group.begin_epoch()
        while group.batch < group.batches:
            yield group.step
        group.batch = 0
        for replica in group.replicas:
            replica.stand_at(0, 0)


def _steps(training: training_run.Training) -> Iterator[Callable[[], object]]:
    """Steps over the batches of the first epoch, again and again."""
    order = torch.from_numpy(batches.epoch_order(training.train, training.seed, 0))
    training.model.train()

    def step(low: int, high: int) -> object:
        return training_run.training_step(
            training, *training.data.train(order[low:high], training.seed, 0)
        )

    for low, high in cycle(training.bounds):
        yield lambda low=low, high=high: step(low, high)  # type: ignore[misc]


def _seconds(
    calls: Iterator[Callable[[], object]],
    device: torch.device,
    least: float,
    meet: Callable[[], bool] = lambda: False,
) -> float:
    """Median seconds of at least two calls, for at least so many seconds; another warms up first.

    A first call that takes long is the only one, unless it then met others that do the same.
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
