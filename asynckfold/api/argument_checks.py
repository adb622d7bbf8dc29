"""What is wrong with the arguments of `AsyncKFold` and of its call, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.errors import InputError, Problem, nearest
from asynckfold.jobs.argument import one_line, problems
from asynckfold.jobs.criteria import is_factory, why_not_of_pairs
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.grid import Grid, Parts
from asynckfold.jobs.objective import RECONSTRUCTION
from asynckfold.jobs.recipe import STANDARDIZE, sending_problems
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.results.scoring import reported_names
from asynckfold.scheduling.racing import ALPHA, LEAST_FOLDS
from asynckfold.store.lock import shared_problems

if TYPE_CHECKING:
    from asynckfold.api.arguments import Settings

_STEPS = ("training_step", "validation_step")
_UNUSED = {
    "precision": ("fp32", "tf32"),
    "trainer": ("plain",),
    "baseline": ("none",),
    "lr_step": ("epoch",),
    "processes": (1,),
    "accumulate": (1,),
}
"""Values, besides None, False, 0 and "auto", by which an argument asks for nothing."""

_CLASHES = (
    (
        ("fit_fn",),
        (*_STEPS, "callbacks", "inner_valid"),
        "a fit_fn trains and validates a job alone",
    ),
    (
        ("fit_fn",),
        ("precision", "lr_step", "clip_grad_norm", "accumulate"),
        "a fit_fn sets precision, accumulates and clips gradients, and steps the LR schedule",
    ),
    (
        ("training_step",),
        ("accumulate",),
        "the built-in step accumulates; a training_step does where opt_fn returns a list",
    ),
    (("sample_weight",), ("fit_fn", *_STEPS), "code of the user computes a loss as it is"),
    (("sample_weight",), ("plan_from",), "jobs whose samples have weights are not fused"),
    (
        ("fit_fn", *_STEPS, "callbacks", "inner_valid", "collate_fn", "sampler", "criterion"),
        ("trainer",),
        "only the plain trainer runs code for batches, epochs and folds",
    ),
    (
        ("fit_fn", *_STEPS, "callbacks", "collate_fn"),
        ("baseline",),
        "the serial baseline trains by the criterion alone, on samples of one shape",
    ),
    (
        ("target_transform",),
        ("output_transform",),
        "each says what outputs are in the units of the targets",
    ),
    (("preprocess", "targets"), ("task",), "task='reconstruction' takes the input as the target"),
    (("plan_from",), ("threads_per_job",), "both say how many threads a job has"),
    (("race",), ("part",), "a race compares candidates on folds that all of them have ended"),
    (("race",), ("plan_from",), "candidates that race have fusion groups of one fold"),
    (("nested",), ("race",), "a race chooses by the folds that score a nested choice"),
)
"""Arguments that exclude each other, and why."""

_ENGINES = {
    "nice": ("process", "ray"),
    "yield_to_others": ("process",),
    "stall_timeout": ("process", "serial", "ray"),
    "ray_address": ("ray",),
    "ray_runtime_env": ("ray",),
    "processes": ("process", "ray"),
}
"""Arguments that only some engines take; "auto" takes those of "process"."""

_FUNCTIONS = {
    "training_step": "(model, batch, state) → loss",
    "validation_step": "(model, batch, state) → loss, or a dict of numbers",
    "fit_fn": "of one context",
    "collate_fn": "of a list of samples",
    "output_transform": "of outputs, such as torch.sigmoid",
}
"""Functions of the user, and what each takes."""

_SENT = (
    "criterion",
    *("training_step", "validation_step", "fit_fn", "preprocess", "train_transform"),
    *("target_transform", "eval_transform", "collate_fn", "sampler"),
)
"""Arguments of `AsyncKFold` that workers get."""


def settings_problems(settings: Settings) -> Iterator[Problem]:
    """Yield all that is wrong with the arguments of `AsyncKFold`."""
    yield from problems(settings)
    yield from _fold_problems(settings)
    yield from _part_problems(settings.part)
    if settings.criterion is not None or not settings.trains_itself:
        yield from _criterion_problems(settings.criterion)
    if isinstance(settings.sampler, str) and settings.sampler != "balanced":
        rule = "sampler must be 'balanced', an array of weights, or a function of the targets"
        yield Problem(rule, repr(settings.sampler), "Pass sampler='balanced'.")
    yield from _target_transform_problems(settings.target_transform)
    yield from root_problems(settings.root)
    yield from settings.machine_problems(is_here=settings.engine != "ray")
    for name, shape in _FUNCTIONS.items():
        function: object = getattr(settings, name)
        if function is not None and not callable(function):
            yield Problem(
                f"{name} must be a function {shape}", one_line(function), "Pass a function."
            )
    yield from _clashes(settings, vars(settings))


def _clashes(settings: Settings, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the arguments that exclude each other, or that the engine does not take."""
    values = {
        **values,
        "criterion": settings.criterion if is_factory(settings.criterion) else None,
        "task": settings.task if settings.task == RECONSTRUCTION else None,
    }
    used = {name for name, value in values.items() if _is_used(name, value)}
    for names, others, why in _CLASHES:
        ours, theirs = ([name for name in part if name in used] for part in (names, others))
        if ours and theirs:
            received = ", ".join(f"{name}={one_line(values[name], 60)}" for name in theirs)
            rule = f"{why}, so {', '.join(ours)} must go without {', '.join(theirs)}"
            yield Problem(rule, received, "Leave one of them out.")
    engine = f"engine={settings.engine!r}" if settings.parallelize else "parallelize=False"
    kind = "process" if settings.engine == "auto" else settings.engine
    for name, engines in _ENGINES.items():
        if name in used and kind not in engines:
            rule = f"{name} is for engine={' or '.join(map(repr, engines))}"
            received = f"{name}={one_line(values[name], 60)} and {engine}"
            yield Problem(rule, received, "Leave one of them out.")


def _is_used(name: str, value: Any) -> bool:
    if isinstance(value, (int, str)):
        return value is True or value not in (0, "auto", *_UNUSED.get(name, ()))
    return value is not None and not (isinstance(value, (list, tuple, dict)) and not value)


def _fold_problems(settings: Settings) -> Iterator[Problem]:
    values = {name: getattr(settings, name) for name in ("kfolds", "cv", "n_splits")}
    used = {name: value for name, value in values.items() if value is not None}
    if len(used) > 1:
        yield Problem(
            "kfolds, cv and n_splits are names of one setting",
            " and ".join(used),
            "Pass one of them, and None for kfolds when it is not that one.",
        )
    for name, value in used.items():
        is_path = isinstance(value, (str, os.PathLike))
        if is_path and Path(value).is_file():
            continue
        if isinstance(value, (bool, float)) or is_path or (isinstance(value, int) and value < 2):
            rule = (
                f"{name} must be a whole number of at least 2, a splitter, index pairs, or a file "
                "of them"
            )
            yield Problem(rule, repr(value), f"Pass {name}=5, or check the path.")


def _part_problems(part: Any) -> Iterator[Problem]:
    is_pair = isinstance(part, tuple) and [type(number) for number in part] == [int, int]
    if part is not None and not (is_pair and 1 <= part[0] <= part[1]):
        rule = "part must be the number of a part from 1, and of all parts"
        yield Problem(rule, repr(part), "The first of eight is (1, 8), in a flag 1/8.")


def _criterion_problems(criterion: Any) -> Iterator[Problem]:
    if isinstance(criterion, type):
        name = criterion.__name__
        yield Problem("criterion must be an object, not a class", name, f"Write {name}().")
    elif not callable(criterion):
        yield Problem(
            "criterion must be callable",
            one_line(criterion),
            "Pass for instance torch.nn.CrossEntropyLoss(); None is for a training_step or fit_fn.",
        )
    elif misfit := why_not_of_pairs(criterion):
        yield Problem("criterion must be a function of outputs, and of labels or numbers", *misfit)


def _target_transform_problems(transform: Any) -> Iterator[Problem]:
    methods = ("fit", "transform", "inverse_transform")
    is_unfit = isinstance(transform, type) or not all(hasattr(transform, name) for name in methods)
    if transform not in (None, STANDARDIZE) and is_unfit:
        rule = f"target_transform must be {STANDARDIZE!r}, or a transformer with an inverse"
        remedy = "Pass for instance sklearn.preprocessing.PowerTransformer()."
        yield Problem(rule, one_line(transform), remedy)


def root_problems(root: Path) -> Iterator[Problem]:
    """Refuse a folder that cannot become a run; what goes wrong later is the disk's fault."""
    if str(root) in ("", ".") or "\0" in str(root):
        yield Problem("root_dir must be a folder of its own", repr(str(root)), "Pass 'runs/first'.")
        return
    yield from shared_problems(root)


# Arguments of the call


def read_trainer_params(settings: Settings, params: Any) -> tuple[TrainerParams, Sequence[Problem]]:
    """Return the parameters of the trainer, with those of `AsyncKFold`, and what is wrong."""
    if params is not None and not isinstance(params, Mapping):
        rule, remedy = "trainer_params must be a dict", "Pass for instance {'epochs': 2}."
        return TrainerParams(), [Problem(rule, repr(params)[:80], remedy)]
    try:
        return TrainerParams.from_mapping({**settings.trainer_params, **(params or {})}), []
    except InputError as error:
        return TrainerParams(), error.problems


def call_problems(
    settings: Settings, params: TrainerParams, parts: Parts, grid: Grid
) -> Iterator[Problem]:
    """Yield what is wrong with the engine, the processes of a job, and the objects of the user."""
    if settings.engine == "ray":
        from asynckfold.engines.ray_cluster import environment_problems

        yield from environment_problems(settings.ray_address)
    yield from _process_problems(settings, params)
    yield from _opt_fn_problems(parts.opt_fn)
    yield from _clashes(settings, {**vars(settings), **vars(params)})
    yield from _callback_problems(settings)
    if settings.engine == "serial":
        return
    with sent_by_value() if settings.engine == "ray" else nullcontext():
        yield from sending_problems(
            {
                **{f"model {name}": model for name, model in parts.models.items()},
                **{f"scheduler {name}": one for name, one in parts.lr_schedules.items()},
                **{f"params {name}": values for name, values in grid.options.items()},
                "opt_fn": parts.opt_fn,
                **{f"callbacks[{at}]": item for at, item in enumerate(settings.called_back)},
                **{name: getattr(settings, name) for name in _SENT},
            }
        )


def joblib_problems(settings: Settings) -> tuple[list[Problem], list[str]]:
    """Return what is wrong with joblib's backend, and notes on it."""
    if settings.engine != "joblib":
        return [], []
    from asynckfold.engines import joblib_backend

    return joblib_backend.checked()


def race_problems(settings: Settings, candidates: int, folds: int) -> Iterator[Problem]:
    """Yield why there is nothing to choose or to leave out, or what must not be."""
    if settings.nested is not None and candidates < 2:
        rule, remedy = "nested needs two candidates to choose from", "Add one, or leave nested out."
        yield Problem(rule, f"{candidates} candidate", remedy)
    if not settings.race:
        if settings.race_alpha != ALPHA:
            rule, remedy = "race_alpha is the bound of a race", "Pass race=True, too."
            yield Problem(rule, f"race_alpha={settings.race_alpha}, race=False", remedy)
        return
    if candidates < 2:
        rule, remedy = "a race needs two candidates", "Add one, or leave race out."
        yield Problem(rule, f"{candidates} candidate", remedy)
    if folds < LEAST_FOLDS:
        rule = f"a race needs {LEAST_FOLDS} folds: two for a test, and one that it may save"
        yield Problem(rule, f"{folds} folds", f"Pass kfolds={LEAST_FOLDS} or more.")
    if settings.refit not in (True, False, "best"):
        rule = "refit must not name a candidate that a race may leave out"
        yield Problem(rule, repr(settings.refit), "Pass refit=True, or leave race out.")


def _process_problems(settings: Settings, params: TrainerParams) -> Iterator[Problem]:
    """Yield why a job cannot train with several processes here."""
    count, cores = params.processes, settings.cores
    if count == 1:
        return
    if count > cores and settings.engine != "ray":
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


def _opt_fn_problems(opt_fn: Any) -> Iterator[Problem]:
    is_class = isinstance(opt_fn, type) and opt_fn.__module__.startswith("torch.optim")
    if is_class or not callable(opt_fn):
        name = opt_fn.__name__ if is_class else "Adam"
        yield Problem(
            "opt_fn must be a function model → optimizer",
            f"the class {name}" if is_class else one_line(opt_fn),
            f"Write for instance: lambda model: {name}(model.parameters(), lr=1e-3)",
        )


def _callback_problems(settings: Settings) -> Iterator[Problem]:
    callbacks, has_inner = settings.callbacks, settings.inner_valid is not None
    if has_inner and settings.criterion is None:
        rule, remedy = "inner_valid needs a criterion", "Pass one, or leave inner_valid out."
        yield Problem(rule, "criterion=None", remedy)
    if callbacks is None:
        return
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        rule, remedy = "callbacks must be a list", "Pass for instance [EarlyStopping()]."
        yield Problem(rule, one_line(callbacks), remedy)
        return
    from asynckfold.training.callbacks import callback_problems

    yield from callback_problems(callbacks, has_inner=has_inner)


def unmeasured_problems(
    settings: Settings, measured: Mapping[str, Sequence[str]], kind: str
) -> Iterator[Problem]:
    """Yield the scores that have nearly the name of what a validation step measured.

    A name that is like none of them may be measured later, as in the last epoch only.
    """
    if settings.validation_step is None:
        return
    for model, names in measured.items():
        for score in reported_names(settings.scoring, kind):
            if score not in names and (meant := nearest(score, names)):
                yield Problem(
                    "scoring must name what validation_step measures, or a known score",
                    f"{score!r}; of model {model} it measures {', '.join(map(repr, names))}",
                    f"Correct the name.{meant}",
                )
