"""The arguments of one call, read and checked before anything starts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from asynckfold.api import lightning_modules
from asynckfold.api.arguments import Settings
from asynckfold.api.refit import refit_problems
from asynckfold.engines import joblib_backend, ray_address
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.criteria import is_factory
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.grid import Grid, Parts, make_grid
from asynckfold.jobs.recipe import (
    Recipe,
    named_lr_schedules,
    named_models,
    sending_problems,
)
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.machine import resolve_n_jobs


@dataclass(frozen=True, eq=False)
class Call:
    """What a call asks for: settings, live objects, parameters, notes, and when it came."""

    settings: Settings
    recipe: Recipe
    grid: Grid
    params: TrainerParams
    trainer_params: Mapping[str, Any] | None
    notes: tuple[str, ...]
    started: float


def read_call(
    settings: Settings,
    models: Any,
    schedulers: Any,
    opt_fn: Any,
    trainer_params: Any,
    grid_params: Any = None,
    n_iter: Any = None,
) -> Call:
    """Check the arguments of a call.

    Raises
    ------
    InputError
        All problems, those of labels and folds among them.
    """
    started = time.monotonic()
    named, problems, notes = named_models(models)
    is_configured = lightning_modules.are_meant(schedulers, opt_fn)
    lr_schedules, more = named_lr_schedules(
        lightning_modules.schedulers() if is_configured else schedulers
    )
    problems += more
    params = TrainerParams()
    if trainer_params is not None and not isinstance(trainer_params, Mapping):
        problems.append(
            Problem(
                "trainer_params must be a dict",
                repr(trainer_params)[:80],
                "Pass for instance {'epochs': 2}.",
            )
        )
    else:
        try:
            params = _on_devices(
                settings,
                TrainerParams.from_mapping({**settings.trainer_params, **(trainer_params or {})}),
            )
        except InputError as error:
            problems += error.problems
    if is_configured:
        opt_fn = lightning_modules.opt_fn(params.epochs)
    if settings.engine == "joblib":
        found, told = joblib_backend.checked(resolve_n_jobs(settings.n_jobs, settings.cores()[0]))
        problems += found
        notes = [*notes, *told]
    if settings.engine == "ray":
        problems += ray_address.checked(settings.ray_address)
    problems += _process_problems(settings, params)
    problems += _opt_fn_problems(opt_fn)
    given = Parts(named, lr_schedules, opt_fn)
    grid, more, told = make_grid(given, grid_params, n_iter, settings.random_state)
    problems += more
    notes = [*notes, *told]
    if is_configured and not problems:
        taken = lightning_modules.with_steps(settings, grid.models, params, trainer_params)
        settings, params = taken.settings, taken.params
        problems += taken.problems
    elif settings.training_step is None and settings.fit_fn is None:
        notes += lightning_modules.notes(named)
    problems += settings.own_training_problems(params)
    problems += settings.sampling_problems(params)
    if not more:
        pairs = grid.pairs or itertools.product(named, lr_schedules)
        problems += refit_problems(settings, [candidate_name(*pair) for pair in pairs])
    parts = {
        **{f"model {name}": model for name, model in named.items()},
        **{f"scheduler {name}": schedule for name, schedule in lr_schedules.items()},
        **{f"params {name}": values for name, values in grid.options.items()},
        "opt_fn": opt_fn,
        "criterion": settings.criterion,
        "training_step": settings.training_step,
        "validation_step": settings.validation_step,
        "fit_fn": settings.fit_fn,
        **{f"callbacks[{at}]": item for at, item in enumerate(settings.called_back)},
        "preprocess": settings.preprocess,
        "train_transform": settings.train_transform,
        "eval_transform": settings.eval_transform,
        "collate_fn": settings.collate_fn,
        "sampler": settings.sampler,
    }
    if settings.engine != "serial":
        with sent_by_value() if settings.engine == "ray" else nullcontext():
            problems += sending_problems(parts)
    if problems:
        refuse([*problems, *_data_problems(settings)])
    from asynckfold.training.losses import NoLoss

    recipe = Recipe(
        grid.models,
        grid.lr_schedules,
        opt_fn,
        NoLoss() if settings.criterion is None else settings.criterion,
        settings.preprocess,
        training_step=settings.training_step,
        validation_step=settings.validation_step,
        fit_fn=settings.fit_fn,
        callbacks=settings.called_back,
        sampler=settings.sampler,
        make_criterion=settings.criterion if is_factory(settings.criterion) else None,
        optimizers=grid.optimizers,
        pairs=grid.pairs,
    )
    return Call(settings, recipe, grid, params, trainer_params, tuple(notes), started)


def _on_devices(settings: Settings, params: TrainerParams) -> TrainerParams:
    """Give each process of allreduce a GPU where `devices` names GPUs only."""
    if params.trainer == "allreduce" and params.processes > 1 and settings.names_gpus_only:
        return replace(params, gpu_processes=params.processes)
    return params


def _process_problems(settings: Settings, params: TrainerParams) -> Iterator[Problem]:
    """Yield why a job cannot train with several processes here."""
    count = params.processes
    if params.processes_per_node is not None and settings.engine != "ray":
        yield Problem(
            "processes_per_node spreads a job over the nodes of engine='ray'",
            f"processes_per_node={params.processes_per_node}, engine={settings.engine!r}",
            "Pass engine='ray', or leave processes_per_node out.",
        )
    if count == 1:
        return
    cores = settings.cores()[0]
    if count > cores and settings.trains_here:
        yield Problem(
            "processes must not exceed the cores that this process may use",
            f"{count} processes on {cores} {'core' if cores == 1 else 'cores'}",
            f"Pass processes={cores} or less.",
        )
    if settings.threads_per_job not in ("auto", 1):
        yield Problem(
            "each of several processes of a job has one thread",
            f"threads_per_job={settings.threads_per_job!r}",
            "Leave threads_per_job out.",
        )
    if settings.batch_size == "full" and params.trainer != "allreduce":
        yield Problem(
            "batch_size='full' takes all samples of the training fold in one step, and each "
            f"process of {params.trainer} has only some of them",
            f"processes={count}",
            "Pass trainer='allreduce', processes=1, or a number as batch_size.",
        )
    if settings.engine not in ("process", "ray"):
        name = "engine" if settings.parallelize else "parallelize"
        yield Problem(
            "processes > 1 requires worker processes",
            settings.asked_engine,
            f"Leave {name} out, or pass processes=1.",
        )


def _opt_fn_problems(opt_fn: Any) -> Iterator[Problem]:
    ready = isinstance(opt_fn, type) and opt_fn.__module__.startswith("torch.optim")
    if ready or not callable(opt_fn):
        name = opt_fn.__name__ if ready else "Adam"
        yield Problem(
            "opt_fn must be a function model → optimizer",
            f"the class {name}" if ready else one_line(opt_fn),
            f"Write for instance: lambda model: {name}(model.parameters(), lr=1e-3)",
        )


def _data_problems(settings: Settings) -> Sequence[Problem]:
    """Return what is wrong with labels and folds, as far as a few samples tell."""
    from asynckfold.data.arrays import by_position
    from asynckfold.data.dataset import open_source
    from asynckfold.data.labels import resolve_labels

    try:
        source = open_source(settings.dataset)
        given = source.labels
        if settings.targets is not None:
            given = by_position(settings.targets, "targets")
        if given is None or (settings.targets is None and source.rows is not None):
            return ()
        labels = resolve_labels(given, None, source.names, settings.known_criterion)
        settings.divided(len(source), labels)
    except InputError as error:
        return error.problems
    return ()
