"""From a command line to the objects of a sweep: by flags, or by a sweep file."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asynckfold.api.arguments import Settings, words_of
from asynckfold.cli.built_in import (
    OPTIMIZER,
    SweepParts,
    built_in_sweep,
    imported_model,
    models_and_views,
    name_problems,
    optimizer_of,
    optimizer_problems,
    source_of,
)
from asynckfold.cli.flags import Named, flag_settings, flag_values, value_of, with_defaults
from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.argument import arguments
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.terminal import complain

if TYPE_CHECKING:
    from asynckfold.api.kfold import AsyncKFold
    from asynckfold.data.sources import Source
    from asynckfold.jobs.recipe import Recipe

FILE_NAMES = ("dataset", "criterion", "models", "schedulers", "opt_fn")
"""What a sweep file must define."""


ELSEWHERE = {"dataset": "its own name", "criterion": "its own name", "root_dir": "--root"}
"""Arguments of `AsyncKFold` that are no settings of a sweep file, and what sets them."""


def sweep_parts(parsed: argparse.Namespace) -> SweepParts:
    """Return the objects of the sweep that the command line names.

    Raises
    ------
    InputError
        Unknown names, missing files, flags that do not fit.
    """
    if parsed.file and parsed.data:
        rule, received = "a run takes a sweep file or --data", f"{parsed.file} and --data"
        refuse([*parsed.problems, Problem(rule, f"{received} {parsed.data}", "Drop one of them.")])
    from asynckfold.training.worker.lazy_dynamo import import_on_demand

    # This process compiles nothing, and torchvision would import the compiler.
    import_on_demand()
    return _from_file(parsed) if parsed.file else built_in_sweep(parsed)


# A sweep file


def _from_file(parsed: argparse.Namespace) -> SweepParts:
    path = Path(parsed.file)
    refuse([*parsed.problems, *_file_problems(parsed, path)])
    module = _executed(path)
    settings = getattr(module, "settings", {})
    params, grid = (getattr(module, name, {}) for name in ("trainer_params", "params"))
    refuse(_content_problems(path, module, settings, params, grid))
    settings = {**settings, **flag_settings(parsed)}
    opt_fn = module.opt_fn
    if parsed.optimizer is not None:
        named = with_defaults(parsed)
        refuse(optimizer_problems(named, settings.get("batch_size", named.batch_size)))
        opt_fn = optimizer_of(named)
    return SweepParts(
        module.dataset,
        module.criterion,
        module.models,
        module.schedulers if parsed.schedulers is None else words_of(parsed.schedulers),
        opt_fn,
        {**params, **flag_values(parsed, TrainerParams)},
        settings,
        {**grid, **(parsed.param or {})} or None,
        getattr(module, "n_iter", None),
    )


def _file_problems(parsed: argparse.Namespace, path: Path) -> Iterator[Problem]:
    if not path.is_file():
        siblings = [item.name for item in path.parent.glob("*.py")] if path.parent.is_dir() else []
        yield Problem(
            "the sweep file must exist",
            str(path),
            f"Check the path.{nearest(path.name, siblings)}",
        )
    elif path.suffix != ".py":
        remedy = "Name it sweep.py; data goes with --data."
        if path.suffix in (".yaml", ".yml"):
            remedy = f"Pass a file of flags by --config {path}."
        yield Problem("the sweep file must be Python", str(path), remedy)
    for name in arguments(Named):
        if name in ("schedulers", "data", "param", *OPTIMIZER):
            continue
        if getattr(parsed, name):
            yield Problem(
                f"--{name.replace('_', '-')} applies to --data only",
                f"it with the sweep file {path.name}",
                f"Drop it, and write it in {path.name}.",
            )
    for name in OPTIMIZER[1:]:
        if getattr(parsed, name) is not None and parsed.optimizer is None:
            yield Problem(
                f"--{name.replace('_', '-')} needs --optimizer with a sweep file",
                f"no --optimizer beside {path.name}",
                f"Pass --optimizer too, which replaces opt_fn, or change {path.name}.",
            )


def _executed(path: Path) -> ModuleType:
    """Run a sweep file as a module whose definitions are pickled by value."""
    import cloudpickle

    spec = util.spec_from_file_location("asynckfold_sweep_file", path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    cloudpickle.register_pickle_by_value(module)
    sys.path.insert(0, str(path.parent.absolute()))
    # The user's code may raise anything; print its traceback.
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        complain("".join(traceback.format_exception(_from_users_file(error, path))).rstrip())
        line = traceback.format_exception_only(error)[-1].strip()
        raise InputError(
            [Problem("the sweep file must run", line, f"Repair {path}; its traceback is above.")]
        ) from error
    return module


def _from_users_file(error: BaseException, path: Path) -> BaseException:
    """Return the error with a traceback that starts in the user's file."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename) != path.absolute():
        trace = trace.tb_next
    return error.with_traceback(trace)


def _content_problems(
    path: Path, module: ModuleType, settings: Any, params: Any, grid: Any
) -> Iterator[Problem]:
    for name in FILE_NAMES:
        if not hasattr(module, name):
            yield Problem(
                f"{path.name} must define {', '.join(FILE_NAMES)}",
                f"no {name}",
                f"Write {name} = … in it.",
            )
    for name, value in (("settings", settings), ("trainer_params", params), ("params", grid)):
        if not isinstance(value, Mapping):
            yield Problem(
                f"{name} in {path.name} must be a dict",
                type(value).__name__,
                f"Write {name} = {{…}}.",
            )
    if isinstance(settings, Mapping):
        yield from _keyword_problems(path, settings)


def _keyword_problems(path: Path, settings: Mapping[str, Any]) -> Iterator[Problem]:
    valid = set(arguments(Settings)) - set(ELSEWHERE)
    for name in settings:
        if name in ELSEWHERE:
            yield Problem(
                f"settings in {path.name} must not hold {name}",
                repr(name),
                f"Give it by {ELSEWHERE[name]}.",
            )
        elif name not in valid:
            yield Problem(
                f"settings in {path.name} must be keyword arguments of AsyncKFold",
                repr(name),
                f"{nearest(str(name), valid).strip()} Valid: {', '.join(sorted(valid))}.".strip(),
            )


# Both


def predicting_parts(
    parsed: argparse.Namespace, model: str
) -> tuple[Settings, Recipe, Source | None]:
    """Return settings, recipe and data source of a run, for predictions of a model.

    The source is None for a sweep file.

    Raises
    ------
    InputError
        As `sweep_parts`.
    """
    from asynckfold.jobs.grid import with_model
    from asynckfold.jobs.recipe import Recipe, named_models
    from asynckfold.training.worker.lazy_dynamo import import_on_demand

    import_on_demand()
    source = None
    if parsed.file:
        sweep = _from_file(parsed)
    else:
        import torch

        parsed = with_defaults(parsed)
        names = words_of(parsed.models)
        refuse(name_problems(parsed, names, words_of(parsed.schedulers)))
        imported = {name: imported_model(name) for name in names if ":" in name}
        source = source_of(parsed)
        models, views = models_and_views(names, imported, source, parsed.augment)
        criterion, opt_fn = torch.nn.CrossEntropyLoss(), optimizer_of(parsed)
        sweep = SweepParts(source.dataset, criterion, models, (), opt_fn, {}, views, parsed.param)
    given = sweep.settings
    preprocess = given.get("preprocess")
    models = with_model(named_models(sweep.models)[0], sweep.params, model)
    recipe = Recipe(models, {}, sweep.opt_fn, sweep.criterion, preprocess)
    words = ("train_transform", "eval_transform", "output_transform")
    views = {name: given.get(name) for name in words}
    settings = Settings(None, sweep.dataset, Path(parsed.root), sweep.criterion, 1, **views)
    return settings, recipe, source


def make_kfold(parsed: argparse.Namespace, sweep: SweepParts) -> AsyncKFold:
    """Return the cross-validation with the settings of file and flags; flags override the file."""
    from asynckfold.api.kfold import AsyncKFold

    settings = dict(sweep.settings)
    if parsed.folds is not None:
        # The flag overrides every alias in the file.
        for alias in ("cv", "n_splits"):
            settings.pop(alias, None)
    aliased = {"cv", "n_splits"} & set(settings)
    folds = settings.pop("kfolds", None if aliased else value_of(parsed, "folds"))
    batch_size = settings.pop("batch_size", value_of(parsed, "batch_size"))
    if parsed.verb == "train":
        refuse(_alone_problems(parsed, sweep))
        aliases = {"cv", "n_splits", "n_repeats"}
        settings = {name: value for name, value in settings.items() if name not in aliases}
        folds = _held_out(parsed, settings.get("groups") is not None)
    settings.setdefault("verbose", 0 if parsed.quiet else 1 + parsed.verbose)
    about = {**settings.pop("about", {}), "cli": parsed.line, "folder": str(Path.cwd())}
    return AsyncKFold(
        folds, sweep.dataset, parsed.root, sweep.criterion, batch_size, about=about, **settings
    )


def _alone_problems(parsed: argparse.Namespace, sweep: SweepParts) -> Iterator[Problem]:
    from asynckfold.jobs.recipe import named_lr_schedules, named_models

    if not 0 < parsed.held_out < 1:
        yield Problem(
            "--held-out must be a share between 0 and 1", str(parsed.held_out), "Pass 0.2."
        )
    for what, named in (
        ("model", named_models(sweep.models)[0]),
        ("LR schedule", named_lr_schedules(sweep.schedulers)[0]),
    ):
        if len(named) != 1:
            yield Problem(
                f"train takes one {what}", ", ".join(named) or "none", "Use run for several."
            )
    if sweep.params:
        names = ", ".join(map(str, sweep.params))
        yield Problem("train takes one candidate", f"a grid of {names}", "Use run for several.")


def _held_out(parsed: argparse.Namespace, grouped: bool) -> Any:
    """Return a splitter that holds a share of the samples, or of their groups, out.

    Stratified for built-in data without groups.
    """
    from sklearn import model_selection

    kind = model_selection.ShuffleSplit if parsed.file else model_selection.StratifiedShuffleSplit
    kind = model_selection.GroupShuffleSplit if grouped else kind
    return kind(1, test_size=parsed.held_out, random_state=parsed.seed or 0)
