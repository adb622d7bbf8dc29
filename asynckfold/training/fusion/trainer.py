"""The fused trainer: builds the fusion group of some jobs, restores it, and trains it.

::

    plan.group_of(job) ─ build all replicas ─ fuse ─ restore ─► loop.run(FusionGroup) ─► results
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Task
from asynckfold.jobs.result import Result
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import loop, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.calls import call_model
from asynckfold.training.fusion.backward import fuse_criterion
from asynckfold.training.fusion.group import Fail, FusionGroup, Replica
from asynckfold.training.fusion.module import fuse
from asynckfold.training.fusion.optimizers import fuse_optimizers
from asynckfold.training.job_log import JobLog, NoLog
from asynckfold.training.losses import of_rows
from asynckfold.training.preprocessing import fit_transform
from asynckfold.training.stopwatch import Stopwatch
from asynckfold.training.training_run import Report


def train(
    bundle: Bundle,
    tasks: Sequence[Task],
    data: Batches,
    device: torch.device,
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat,
    fail: Fail,
) -> list[Result | None]:
    """Train the unfinished jobs (`tasks`) of one group of the plan as one module.

    ``stop`` is called after every batch; when it returns true, all jobs are saved and left. `fail`
    makes the result of a job whose code raised: its LR schedule, the transforms of its samples,
    the loss of its evaluation.

    Returns
    -------
    list of Result or None
        One for each task; None where `stop` ended it, a failure where the job's share of the
        seconds exceeds its timeout. Results of jobs that diverge or raise also go to `report` at
        once.

    Raises
    ------
    NotFusible
        The models have no batched form.
    """
    heartbeat.begin_long_phase()
    with ExitStack() as logs:
        group = build(bundle, tasks, data, device, heartbeat, logs, fail)
        group.restore(report)
        if loop.run(group, bundle.plan.params, report, stop):
            group.end_all(loop.result_of)
        elif group.stopwatch.expired:
            group.end_all(loop.timed_out)
        return [group.results.get(task.job.id) for task in tasks]


def build(
    bundle: Bundle,
    tasks: Sequence[Task],
    data: Batches,
    device: torch.device,
    heartbeat: Heartbeat,
    logs: ExitStack,
    fail: Fail,
) -> FusionGroup:
    """Build the group that the tasks belong to, before its first step."""
    plan, criterion = bundle.plan, of_rows(copy.deepcopy(bundle.recipe.criterion), data)
    wanted = {task.job.id: task for task in tasks}
    by_id = {job.id: job for job in plan.jobs}
    jobs = [by_id[name] for name in plan.group_of(tasks[0].job.id)]
    folds = [bundle.fold_of(job) for job in jobs]
    begun = [setup.build_model(bundle, job, device, criterion) for job in jobs]
    models = [model for model, _ in begun]
    seen = [*_data_by_job(bundle, folds, data, device)]
    bounds = [
        setup.epoch_bounds(bundle, job, model, fold.fitted, batches)
        for job, fold, model, batches in zip(jobs, folds, models, seen, strict=True)
    ]
    inputs, targets = seen[0].train(folds[0].fitted[: max(2, plan.batch_size)], 0, 0)
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(device)
    # A forward changes buffers, and a fused model cannot run alone.
    example = copy.deepcopy(models[0])
    fused = fuse(models, [inputs])
    losses = fuse_criterion(criterion, len(jobs), call_model(example, inputs), targets)

    def shared(index: int) -> tuple[str, int, int]:
        """Equal for replicas that share an optimizer: schedule, steps, no reaction to a loss."""
        reacts = folds[index].inner_valid.size
        return jobs[index].lr_schedule, len(bounds[index]), index if reacts else -1

    runs = [[*run] for _, run in groupby(range(len(jobs)), shared)]
    ranges = [range(run[0], run[-1] + 1) for run in runs]
    optimizers, _ = fuse_optimizers(fused, [optimizer for _, optimizer in begun], ranges)
    stopwatch = Stopwatch(bundle.job_timeout_s, len(jobs))
    replicas = []
    for optimizer in optimizers:
        lead = optimizer.replicas.start
        schedule = setup.build_lr_schedule(
            bundle, jobs[lead], models[lead], optimizer.optimizer, folds[lead], data
        )
        for index in optimizer.replicas:
            job, fold = jobs[index], folds[index]
            task = wanted.get(job.id)
            replicas.append(
                Replica(
                    task or Task(job),
                    bundle,
                    device,
                    models[index],
                    losses.criteria[index] if isinstance(criterion, nn.Module) else criterion,
                    optimizer.optimizer,
                    schedule,
                    seen[index],
                    fold.fitted,
                    bounds[index],
                    fold.inner_valid,
                    fold.valid,
                    logs.enter_context(JobLog(bundle.root, job) if task else NoLog()),
                    heartbeat,
                    index=index,
                    shared_optimizer=optimizer,
                    generator=fused.generators[index],
                    stopwatch=stopwatch,
                )
            )
    return FusionGroup(fused, losses, optimizers, replicas, list(wanted), heartbeat, fail)


def _data_by_job(
    bundle: Bundle, folds: Sequence[Fold], data: Batches, device: torch.device
) -> Iterator[Batches]:
    """Yield the data of each job: the same for all, unless preprocessing is fitted."""
    preprocess, made = bundle.recipe.preprocess, dict[Any, Batches]()
    for fold in folds:
        # Jobs of one fold set the same samples aside, or none.
        fitted_on = preprocess is not None and (fold.key, fold.inner_valid.size)
        if fitted_on not in made:
            made[fitted_on] = setup.to_device(fit_transform(data, preprocess, fold.fitted), device)
        yield made[fitted_on]
