"""What is wrong with the arguments of a call, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from asynckfold.api.arguments import Settings
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.grid import Grid, Parts
from asynckfold.jobs.recipe import sending_problems
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.machine import resolve_n_jobs


def read_trainer_params(settings: Settings, given: Any) -> tuple[TrainerParams, Sequence[Problem]]:
    """Return the parameters of the trainer, with those of `AsyncKFold`, and what is wrong."""
    if given is not None and not isinstance(given, Mapping):
        rule, remedy = "trainer_params must be a dict", "Pass for instance {'epochs': 2}."
        return TrainerParams(), [Problem(rule, repr(given)[:80], remedy)]
    try:
        return TrainerParams.from_mapping({**settings.trainer_params, **(given or {})}), []
    except InputError as error:
        return TrainerParams(), error.problems


def argument_problems(
    settings: Settings, params: TrainerParams, parts: Parts, grid: Grid
) -> Iterator[Problem]:
    """Yield what is wrong with the engine, the processes of a job, and the objects of the user."""
    if settings.engine == "ray":
        from asynckfold.engines.ray_cluster import environment_problems

        yield from environment_problems(settings.ray_address)
    yield from _process_problems(settings, params)
    yield from _opt_fn_problems(parts.opt_fn)
    yield from settings.own_training_problems(params)
    yield from settings.sampling_problems(params)
    if settings.engine == "serial":
        return
    with sent_by_value() if settings.engine == "ray" else nullcontext():
        yield from sending_problems(_objects(settings, parts, grid))


def joblib_problems(settings: Settings) -> tuple[list[Problem], list[str]]:
    """Return what is wrong with joblib's backend, and notes on it."""
    if settings.engine != "joblib":
        return [], []
    from asynckfold.engines import joblib_backend

    return joblib_backend.checked(resolve_n_jobs(settings.n_jobs, settings.cores()[0]))


def _objects(settings: Settings, parts: Parts, grid: Grid) -> dict[str, Any]:
    """Return the objects that workers get, by their names in a message."""
    return {
        **{f"model {name}": model for name, model in parts.models.items()},
        **{f"scheduler {name}": schedule for name, schedule in parts.lr_schedules.items()},
        **{f"params {name}": values for name, values in grid.options.items()},
        "opt_fn": parts.opt_fn,
        **{f"callbacks[{at}]": item for at, item in enumerate(settings.called_back)},
        **{name: getattr(settings, name) for name in _SENT},
    }


_SENT = (
    "criterion",
    "training_step",
    "validation_step",
    "fit_fn",
    "preprocess",
    "train_transform",
    "eval_transform",
    "collate_fn",
    "sampler",
)
"""Arguments of `AsyncKFold` that workers get."""


def _process_problems(settings: Settings, params: TrainerParams) -> Iterator[Problem]:
    """Yield why a job cannot train with several processes here."""
    count = params.processes
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


def data_problems(settings: Settings) -> Sequence[Problem]:
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
