"""Build the live objects of a job, up to its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.jobs.messages import Note, Task
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import batches, checkpoint, lr_schedules, pretraining, seeding
from asynckfold.training.batches import samples_per_epoch
from asynckfold.training.bundle import Bundle
from asynckfold.training.callbacks import callbacks_of
from asynckfold.training.calls import scaler_of
from asynckfold.training.job_log import JobLog
from asynckfold.training.losses import criterion_for, weighing
from asynckfold.training.optimizers import opt_fn_for, optimizers_of, with_fused_kernel
from asynckfold.training.pretraining import PretrainingSummary
from asynckfold.training.stopwatch import Stopwatch
from asynckfold.training.target_transform import seen_by
from asynckfold.training.training_run import Report, Training
from asynckfold.training.user_steps import user_step, user_validation

RESIDENT_SHARE = 0.5
"""Largest share of a GPU's free memory for keeping the inputs on it: the rest is for the model, its
gradients and activations, and for another job. Where the inputs are changes no bit."""

KEPT_SHARE = 0.02
"""Largest share of a GPU's memory for data that a worker keeps on it between jobs: eight workers
may do so, and no reservation counts it while they are idle."""


COMPILER = {"compile_threads": 1, "fx_graph_cache": False}
"""A job has no cores for further compiler processes. The graph cache is off: in older versions of
torch its key lacks the number of threads. Compiled kernels are cached all the same, by their text.
"""


def build(
    bundle: Bundle,
    task: Task,
    data: Batches,
    device: torch.device,
    log: JobLog,
    heartbeat: Heartbeat,
    *,
    pretrains: bool = True,
    cores: Sequence[int] = (),
    ordinary: bool = False,
) -> Training:
    """Seed everything and build a job; pretrain its model unless a checkpoint has the result.

    `cores` are those of each process, for pretraining on several. For an `ordinary` loop, nothing
    is done to make it fast, and there are no callbacks.
    """
    job, plan, recipe = task.job, bundle.plan, bundle.recipe
    stopwatch, fold = Stopwatch(bundle.job_timeout_s), bundle.fold_of(job)
    train = fold.fitted
    data = to_device(seen_by(data, recipe, train), device)
    model = initial_model(recipe, plan, job, device, ordinary=ordinary)
    pretrained = PretrainingSummary()
    pretrains = pretrains and pretraining.has_pretraining(model)
    if pretrains and not checkpoint.restorable(bundle, task):
        size, count = plan.params.eval_batch_size, 1 if ordinary else plan.params.processes
        pretrained = pretraining.pretrain(
            model, data, train, job.seed, log, heartbeat, size, count, cores
        )
    criterion = weighing(criterion_for(recipe, data, train), data)
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(device)
    opt_fn = opt_fn_for(recipe, job.lr_schedule, criterion)
    optimizer = opt_fn(model) if ordinary else with_fused_kernel(opt_fn, model)
    schedule = build_lr_schedule(bundle, job, model, optimizer, fold, data)
    if plan.params.compile and not ordinary:
        compile_whole(model)
    live = model, optimizer, schedule, device, criterion
    return Training(
        task,
        bundle,
        device,
        model,
        criterion,
        optimizer,
        schedule,
        data,
        train,
        epoch_bounds(bundle, job, model, train, data),
        fold.inner_valid,
        fold.valid,
        log,
        heartbeat,
        pretrained=pretrained.text,
        pretraining=pretrained.epochs,
        stopwatch=stopwatch,
        scaler=scaler_of(plan.params.precision, device, optimizer),
        user_step=user_step(recipe, plan.params, optimizer, criterion, device),
        user_validation=user_validation(
            recipe, optimizers_of(optimizer), criterion, device, plan.params.precision
        ),
        callbacks=None if ordinary else callbacks_of(recipe, job.id, plan.params.epochs, live),
    )


def build_model(
    bundle: Bundle, job: Job, device: torch.device, criterion: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Seed everything; return the initial model and the optimizer of a job."""
    model = initial_model(bundle.recipe, bundle.plan, job, device)
    return model, with_fused_kernel(opt_fn_for(bundle.recipe, job.lr_schedule, criterion), model)


def initial_model(
    recipe: Recipe, plan: Plan, job: Job, device: torch.device, *, ordinary: bool = False
) -> nn.Module:
    """Seed everything, and return the initial model of a job; see `build`."""
    seeding.seed_all(job.seed)
    model: nn.Module = recipe.models[job.model]().to(device)
    if plan.is_channels_last(job) and not ordinary:
        model = model.to(memory_format=torch.channels_last)
    return model


def build_lr_schedule(
    bundle: Bundle,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    fold: Fold,
    data: Batches,
) -> Any:
    """Return the LR schedule of a job."""
    spec = bundle.recipe.lr_schedules[job.lr_schedule]
    count = samples_per_epoch(bundle.recipe.sampler, data, fold.fitted, job.seed)
    made = lr_schedules.make(spec, optimizer, steps_of(bundle.plan, count, model))
    if lr_schedules.needs_metric(made) and not fold.inner_valid.size:
        raise ValueError(
            f"LR schedule {job.lr_schedule} reacts to a loss, for which no samples of the training "
            "fold are set aside: it has too few, or the dry run saw another schedule"
        )
    return made


def epoch_bounds(
    bundle: Bundle, job: Job, model: nn.Module, train: Indices, data: Batches
) -> list[tuple[int, int]]:
    """Return where each batch lies among the samples that an epoch draws."""
    count = samples_per_epoch(bundle.recipe.sampler, data, train, job.seed)
    return list(batches.bounds(count, bundle.plan.batch_size, model))


def steps_of(plan: Plan, count: int, model: nn.Module, each: str = "") -> int:
    """Return how often a job that trains on `count` samples an epoch steps its LR schedule.

    With BatchNorm in the model, the last batch may be a larger one. A step is taken after `each`
    "epoch" or "batch", by default as in the plan.
    """
    if (each or plan.params.lr_step) == "epoch":
        return plan.params.epochs
    epoch_parts = batches.parts_of_epoch(plan, count, model)
    per_epoch = (
        epoch_parts.bounds if epoch_parts else list(batches.bounds(count, plan.batch_size, model))
    )
    return plan.params.epochs * len(per_epoch)


def to_device(data: Batches, device: torch.device) -> Batches:
    """Return the data on the device, the inputs only if they fit (`RESIDENT_SHARE`).

    Small ones stay there for the worker's next job.
    """
    if device.type != "cuda":
        return data.to(device)
    if device not in data.moved:
        free, total = torch.cuda.mem_get_info(device)
        moved = data.to(device, int(RESIDENT_SHARE * free))
        if moved.bytes_on(device) > KEPT_SHARE * total:
            return moved
        data.moved = {device: moved}
    return data.moved[device]


def compile_whole(model: nn.Module) -> None:
    """Let a model compile itself in place, anew for each shape, at the first batch of that shape.

    As one graph: code that cannot be compiled raises instead of running uncompiled with other bits.
    Without dynamic shapes or results of earlier jobs: the code for a batch depends on its shape
    alone, also when a job continues in another process.
    """
    torch.compiler.reset()
    model.compile(fullgraph=True, dynamic=False, options=COMPILER)


def restore(training: Training, report: Report) -> None:
    """Continue from the newest intact checkpoint; report the damaged ones."""
    for ref in training.task.checkpoints:
        try:
            training.load_state_dict(checkpoint.load_for(training.task, training.bundle, ref))
        except StoreCorruptError as error:
            instead = "an older one is used, or the job starts from the beginning"
            report(Note(training.task.job.id, "damage", f"{error}; {instead}"))
        else:
            training.log.write(f"continues after epoch {training.epoch}, batch {training.batch}\n")
            return
