"""What is wrong with the arguments of `AsyncKFold` and of its call, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.errors import InputError, Problem, nearest
from asynckfold.jobs.argument import one_line, problems
from asynckfold.jobs.criteria import is_factory, why_not_of_pairs
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.grid import Grid, Parts
from asynckfold.jobs.objective import CUSTOM, RECONSTRUCTION
from asynckfold.jobs.recipe import sending_problems
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.results.score_fit import reported_names
from asynckfold.store.lock import shared_problems
from asynckfold.system.machine import resolve_n_jobs

if TYPE_CHECKING:
    from asynckfold.api.arguments import Settings


def settings_problems(settings: Settings) -> Iterator[Problem]:
    """Yield all that is wrong with the arguments of `AsyncKFold`."""
    yield from problems(settings)
    yield from _fold_problems(settings)
    if settings.criterion is not None or not settings.trains_itself:
        yield from _criterion_problems(settings.criterion)
    yield from _sample_problems(settings)
    yield from root_problems(settings.root)
    yield from settings.machine_problems()
    yield from _engine_problems(settings)
    for name, (shape, example) in _FUNCTIONS.items():
        function: object = getattr(settings, name)
        if function is not None and not callable(function):
            rule, remedy = f"{name} must be a function {shape}", f"Write for instance: {example}."
            yield Problem(rule, one_line(function), remedy)
    if settings.plan_from is not None and settings.threads_per_job != "auto":
        yield Problem(
            "plan_from and threads_per_job both say how many threads a job has",
            f"{str(settings.plan_from)!r} and {settings.threads_per_job!r}",
            "Drop one of them.",
        )
    yield from _task_problems(settings)


# Arguments of AsyncKFold


_FUNCTIONS = {
    "training_step": (
        "(model, batch, state) → loss",
        "def training_step(model, batch, state): inputs, targets = batch; "
        "return state.criterion(model(inputs), targets)",
    ),
    "validation_step": (
        "(model, batch, state) → loss, or a dict of numbers",
        "def validation_step(model, batch, state): inputs, targets = batch; "
        "return {'margin': model(inputs).amax(1).mean()}",
    ),
    "fit_fn": (
        "of one context",
        "def fit_fn(context): ..., with a loop over context.train_loader",
    ),
    "collate_fn": (
        "of a list of samples",
        "def collate(samples): ...; return inputs, targets",
    ),
    "output_transform": ("of outputs", "torch.sigmoid"),
}
"""Functions of the user: what each takes, and how it is written."""


def _engine_problems(settings: Settings) -> Iterator[Problem]:
    if not settings.parallelize and settings.engine != "serial":
        yield Problem(
            "parallelize=False is engine='serial'",
            f"parallelize=False and engine={settings.engine!r}",
            "Drop one of them.",
        )
        return
    engine, drop = settings.engine, "Drop one of them."
    for name, engines, rule in _OF_ENGINES:
        value = getattr(settings, name)
        # Seconds, in place of a word, ask for what joblib has not.
        is_used = isinstance(value, (int, float)) if name == "stall_timeout" else bool(value)
        if is_used and engine not in engines:
            yield Problem(rule, f"{name}={value!r} and {settings.asked_engine}", drop)


def _fold_problems(settings: Settings) -> Iterator[Problem]:
    given = {name: getattr(settings, name) for name in ("kfolds", "cv", "n_splits")}
    used = {name: value for name, value in given.items() if value is not None}
    if len(used) > 1:
        yield Problem(
            "kfolds, cv and n_splits are names of one setting",
            " and ".join(used),
            "Pass one of them, and None for kfolds when it is not that one.",
        )
    for name, value in used.items():
        small = isinstance(value, int) and value < 2
        if isinstance(value, (bool, float, str)) or small:
            yield Problem(
                f"{name} must be a whole number of at least 2, a splitter, or index pairs",
                repr(value),
                f"Pass {name}=5.",
            )


_OF_ENGINES = (
    ("nice", ("process", "ray"), "nice is for worker processes, and this engine starts none"),
    (
        "yield_to_others",
        ("process",),
        "yield_to_others moves and pauses the workers of one machine",
    ),
    ("ray_address", ("ray",), "ray_address is for engine='ray'"),
    ("ray_runtime_env", ("ray",), "ray_runtime_env is for engine='ray'"),
    (
        "stall_timeout",
        ("process", "serial", "ray"),
        "stall_timeout needs heartbeats, which no joblib backend has; job_timeout_s needs none",
    ),
)
"""Arguments that only some engines take: name, engines, rule."""


def _criterion_problems(criterion: Any) -> Iterator[Problem]:
    if not callable(criterion):
        yield Problem(
            "criterion must be callable",
            one_line(criterion),
            "Pass for instance torch.nn.CrossEntropyLoss(); None is for a training_step or fit_fn.",
        )
    elif isinstance(criterion, type):
        yield Problem(
            "criterion must be an object, not a class",
            criterion.__name__,
            f"Write {criterion.__name__}().",
        )
    elif misfit := why_not_of_pairs(criterion):
        rule = "criterion must be a function of outputs, and of labels or numbers"
        yield Problem(rule, *misfit)


def root_problems(root: Path) -> Iterator[Problem]:
    """Refuse a folder that cannot become a run; what goes wrong later is the disk's fault."""
    if str(root) in ("", ".") or "\0" in str(root):
        yield Problem("root_dir must be a folder of its own", repr(str(root)), "Pass 'runs/first'.")
        return
    yield from shared_problems(root)


def _sample_problems(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with these arguments."""
    if settings.target_key is not None and isinstance(settings.dataset, tuple):
        rule, received = "target_key is for a data set whose items are dicts", "a tuple"
        yield Problem(rule, f"target_key={settings.target_key!r}, and {received}", "Drop it.")
    sampler = settings.sampler
    is_word = isinstance(sampler, str) and sampler != "balanced"
    if is_word or isinstance(sampler, type) or hasattr(sampler, "__next__"):
        yield Problem(
            "sampler must be 'balanced', an array of weights, or a function of the targets",
            one_line(sampler),
            "Pass sampler='balanced', or write for instance: "
            "lambda train_targets: 1.0 + 4.0 * (train_targets == 1).",
        )


def _task_problems(settings: Settings) -> Iterator[Problem]:
    """Yield the arguments that contradict the task."""
    for name in ("preprocess", "targets") if settings.task == RECONSTRUCTION else ():
        if getattr(settings, name) is not None:
            yield Problem(
                "task='reconstruction' takes the input as the target",
                f"{name}={one_line(getattr(settings, name))}",
                f"Leave {name} out, or pass pairs (input, target) with task='regression'.",
            )
    if settings.task == CUSTOM and settings.scoring is None:
        yield Problem(
            "task='custom' needs functions that score it",
            "scoring=None",
            "Pass scoring={'name': function}, of (targets, outputs) → float.",
        )


# Arguments of the call


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
    yield from _own_training_problems(settings, params)
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


# Code of the user that trains


def _own_training_problems(settings: Settings, params: TrainerParams) -> Iterator[Problem]:
    """Yield why code of the user cannot train the jobs."""
    names = ("training_step", "validation_step", "fit_fn")
    functions = [name for name in names if getattr(settings, name) is not None]
    if "fit_fn" in functions and len(functions) > 1:
        rule, remedy = "a fit_fn trains and validates a job alone", "Drop one of them."
        yield Problem(rule, " and ".join(functions), remedy)
    if "fit_fn" in functions:
        yield from _unseen_problems(params)
    elif settings.training_step is not None and params.accumulate > 1:
        yield Problem(
            "the built-in step accumulates gradients, not a training_step",
            f"accumulate={params.accumulate}",
            "Leave it out, and let opt_fn return a list of one optimizer: training_step then "
            "decides when to step.",
        )
    yield from _callback_problems(settings)
    yield from _plain_problems(settings, params, functions)


def _plain_problems(
    settings: Settings, params: TrainerParams, functions: Sequence[str]
) -> Iterator[Problem]:
    """Yield what goes neither with several processes of a job nor with the serial baseline."""
    others = ("callbacks", "inner_valid", "collate_fn", "sampler")
    plain = [*functions, *(name for name in others if getattr(settings, name) is not None)]
    plain += ["a criterion for each fold"] * is_factory(settings.criterion)
    if params.trainer != "plain":
        remedy = "Leave trainer and processes out."
        for name in plain:
            rule = f"{name} {'need' if name == 'callbacks' else 'needs'} the plain trainer"
            yield Problem(rule, f"trainer={params.trainer!r}", remedy)
    if settings.baseline in (None, "none"):
        return
    ways = {name: f"trains by the criterion, not by a {name}" for name in functions}
    ways |= {"callbacks": "trains without callbacks"} if settings.called_back else {}
    if settings.collate_fn is not None:
        ways["collate_fn"] = "stacks samples of one shape, and calls no collate_fn"
    for way in ways.values():
        rule, received = f"the serial baseline {way}", f"baseline={settings.baseline!r}"
        yield Problem(rule, received, "Leave baseline out.")


def _callback_problems(settings: Settings) -> Iterator[Problem]:
    callbacks, has_inner = settings.callbacks, settings.inner_valid is not None
    for name in ("callbacks", "inner_valid"):
        if settings.fit_fn is not None and getattr(settings, name) is not None:
            rule = f"{name} must go with the plain trainer and the built-in loop"
            yield Problem(rule, "a fit_fn", f"Leave {name} out, or the other.")
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


def _unseen_problems(params: TrainerParams) -> Iterator[Problem]:
    """Yield parameters of the built-in loop that would have no effect."""
    without_effect = {
        "precision": params.precision in ("bf16", "fp16"),
        "lr_step": params.lr_step == "batch",
        "clip_grad_norm": params.clip_grad_norm is not None,
        "accumulate": params.accumulate > 1,
    }
    unseen = [
        f"{name}={getattr(params, name)!r}" for name, is_set in without_effect.items() if is_set
    ]
    if unseen:
        yield Problem(
            "a fit_fn sets precision, accumulates and clips gradients, and steps the LR schedule",
            ", ".join(unseen),
            "Leave that out, and write it in fit_fn.",
        )


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
