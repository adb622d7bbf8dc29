"""From a command line to the objects of a sweep: by flags, or by a sweep file.

::

    flags ──────────────────────────────────► built_in ─┐
    sweep.py ─ flags = {"data": "digits", …} ─────┘     ├─► SweepParts ─ make_kfold ─► AsyncKFold
             └ dataset, models, opt_fn … ───────────────┘

Flags of the command line override those of a file, and its settings.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asynckfold.api.arguments import Settings, words_of
from asynckfold.cli.built_in import (
    OPTIMIZER,
    SweepParts,
    built_in_sweep,
    named_sweep,
    optimizer_of,
    optimizer_problems,
)
from asynckfold.cli.flags import (
    NamedObjects,
    flag_settings,
    flag_values,
    flags,
    reading,
    text_of,
    with_defaults,
)
from asynckfold.cli.parser import VERBS
from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.argument import arguments
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.terminal import complain

if TYPE_CHECKING:
    from asynckfold.api.kfold import AsyncKFold
    from asynckfold.data.sources import Source
    from asynckfold.jobs.recipe import Recipe

FILE_NAMES = ("dataset", "criterion", "models", "schedulers", "opt_fn")
"""What a sweep file must define, unless its flags name the data."""

ELSEWHERE = {"dataset": "its own name", "criterion": "its own name", "root_dir": "--root"}
"""Arguments of `AsyncKFold` that are no settings of a sweep file, and what sets them."""


def sweep_parts(
    parsed: argparse.Namespace, build: Callable[[argparse.Namespace], SweepParts] = built_in_sweep
) -> SweepParts:
    """Return the objects of the sweep that the command line names.

    ``build`` makes those that flags name.

    Raises
    ------
    InputError
        Unknown names, missing files, flags that do not fit.
    """
    from asynckfold.training.worker.lazy_dynamo import import_on_demand

    # This process compiles nothing, and torchvision would import the compiler.
    import_on_demand()
    if not parsed.file:
        return build(parsed)
    path = Path(parsed.file)
    refuse([*parsed.problems, *_file_problems(parsed, path)])
    module = _executed(path)
    refuse(_content_problems(path, module))
    settings, trainer_params, grid = (
        getattr(module, name, {}) for name in ("settings", "trainer_params", "params")
    )
    refuse([*_take_flags(parsed, path, getattr(module, "flags", {}))])
    if parsed.data and not hasattr(module, "dataset"):
        sweep = build(parsed)
        settings, params = {**settings, **sweep.settings}, {**grid, **(sweep.params or {})}
        trainer_params = {**trainer_params, **sweep.trainer_params}
        return replace(
            sweep, settings=settings, trainer_params=trainer_params, params=params or None
        )
    rule = f"{path.name} must define {', '.join(FILE_NAMES)}, or flags that name the data"
    missing = [name for name in FILE_NAMES if not hasattr(module, name)]
    problems = [Problem(rule, f"no {name}", f"Write {name} = … in it.") for name in missing]
    refuse([*problems, *_unused_flags(parsed, path)])
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
        {**trainer_params, **flag_values(parsed, TrainerParams)},
        settings,
        {**grid, **(parsed.param or {})} or None,
        getattr(module, "n_iter", None),
    )


def _file_problems(parsed: argparse.Namespace, path: Path) -> Iterator[Problem]:
    """Yield what is wrong before the file is run."""
    if not path.is_file():
        siblings = [item.name for item in path.parent.glob("*.py")] if path.parent.is_dir() else []
        guess = nearest(path.name, siblings)
        yield Problem("the sweep file must exist", str(path), f"Check the path.{guess}")
    elif path.suffix != ".py":
        remedy = "Name it sweep.py; data goes with --data."
        yield Problem("the sweep file must be Python", str(path), remedy)
    elif not _holds_flags(path):
        yield from _unused_flags(parsed, path)


def _holds_flags(path: Path) -> bool:
    """Whether a file seems to define flags, before it is run."""
    try:
        return re.search(rb"^flags\b", path.read_bytes(), re.MULTILINE) is not None
    except OSError:
        return True  # running it says why


def _unused_flags(parsed: argparse.Namespace, path: Path) -> Iterator[Problem]:
    """Yield the flags that have no effect beside the objects of a sweep file."""
    if parsed.data:
        rule, received = "a run takes a sweep file or --data", f"{parsed.file} and --data"
        yield Problem(rule, f"{received} {parsed.data}", "Drop one of them.")
    for name in arguments(NamedObjects):
        flag = f"--{name.replace('_', '-')}"
        if name in OPTIMIZER[1:] and getattr(parsed, name) is not None and not parsed.optimizer:
            yield Problem(
                f"{flag} needs --optimizer with a sweep file",
                f"no --optimizer beside {path.name}",
                f"Pass --optimizer too, which replaces opt_fn, or change {path.name}.",
            )
        elif name not in ("schedulers", "data", "param", *OPTIMIZER) and getattr(parsed, name):
            yield Problem(
                f"{flag} applies to --data only",
                f"it with the sweep file {path.name}",
                f"Drop it, and write it in {path.name}.",
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
    # The user's code may raise anything; print its traceback, from its file on.
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename) != path.absolute():
            trace = trace.tb_next
        complain("".join(traceback.format_exception(error.with_traceback(trace))).rstrip())
        line = traceback.format_exception_only(error)[-1].strip()
        raise InputError(
            [Problem("the sweep file must run", line, f"Repair {path}; its traceback is above.")]
        ) from error
    return module


def _content_problems(path: Path, module: ModuleType) -> Iterator[Problem]:
    for name in ("settings", "trainer_params", "params", "flags"):
        value = getattr(module, name, {})
        if not isinstance(value, Mapping):
            rule = f"{name} in {path.name} must be a dict"
            yield Problem(rule, type(value).__name__, f"Write {name} = {{…}}.")
    settings, valid = getattr(module, "settings", {}), set(arguments(Settings)) - set(ELSEWHERE)
    for name in settings if isinstance(settings, Mapping) else ():
        if name in ELSEWHERE:
            rule = f"settings in {path.name} must not hold {name}"
            yield Problem(rule, repr(name), f"Give it by {ELSEWHERE[name]}.")
        elif name not in valid:
            rule = f"settings in {path.name} must be keyword arguments of AsyncKFold"
            remedy = f"{nearest(str(name), valid)} Valid: {', '.join(sorted(valid))}."
            yield Problem(rule, repr(name), remedy.strip())


def _take_flags(
    parsed: argparse.Namespace, path: Path, held: Mapping[str, Any]
) -> Iterator[Problem]:
    """Set the flags that a file holds, where the command line does not."""
    skipped, problems = VERBS[parsed.verb].without, list[Problem]()
    for key, value in held.items():
        dest = str(key).replace("-", "_")
        item = None if dest == "root" else flags().get(dest)
        if item is None:
            rule = f"flags in {path.name} must be those of `asynckfold {parsed.verb}`, but root"
            remedy = f"`asynckfold {parsed.verb} --help-all` shows all flags."
            yield Problem(rule, repr(key), f"{nearest(dest, flags()).strip()} {remedy}".strip())
        elif item.is_switch and not isinstance(value, bool):
            rule = f"{dest} in {path.name} must be True or False"
            yield Problem(rule, repr(value), f"Write {dest!r}: True.")
        elif getattr(parsed, dest) is None and dest not in skipped:
            text = None if item.is_switch else text_of(item, value)
            read = value if text is None else reading(item, problems)["type"](text)
            setattr(parsed, dest, read)
    yield from problems


def predicting_parts(
    parsed: argparse.Namespace, model: str
) -> tuple[Settings, Recipe, Source | None]:
    """Return settings, recipe and data source of a run, for predictions of a model.

    The source is None for the dataset of a sweep file.

    Raises
    ------
    InputError
        As `sweep_parts`.
    """
    from asynckfold.jobs.grid import with_model
    from asynckfold.jobs.recipe import Recipe, named_models

    sweep = sweep_parts(parsed, named_sweep)
    models = with_model(named_models(sweep.models)[0], sweep.params, model)
    preprocess = sweep.settings.get("preprocess")
    recipe = Recipe(models, {}, sweep.opt_fn, sweep.criterion, preprocess)
    words = ("train_transform", "eval_transform", "output_transform")
    views: dict[str, Any] = {name: sweep.settings.get(name) for name in words}
    settings = Settings(None, sweep.dataset, Path(parsed.root), sweep.criterion, 1, **views)
    return settings, recipe, sweep.source


def make_kfold(parsed: argparse.Namespace, sweep: SweepParts) -> AsyncKFold:
    """Return the cross-validation with the settings of file and flags; flags override the file."""
    from asynckfold.api.kfold import AsyncKFold

    settings, full = dict(sweep.settings), with_defaults(parsed)
    if parsed.folds is not None:
        # The flag overrides every alias in the file.
        for alias in ("cv", "n_splits"):
            settings.pop(alias, None)
    aliased = {"cv", "n_splits"} & set(settings)
    folds = settings.pop("kfolds", None if aliased else full.folds)
    batch_size = settings.pop("batch_size", full.batch_size)
    if parsed.verb == "train":
        refuse(_alone_problems(parsed, sweep))
        for alias in ("cv", "n_splits", "n_repeats"):
            settings.pop(alias, None)
        folds = _held_out(parsed, settings.get("groups") is not None)
    settings.setdefault("verbose", 0 if parsed.quiet else 1 + parsed.verbose)
    about = {**settings.pop("about", {}), "cli": parsed.line, "folder": str(Path.cwd())}
    return AsyncKFold(
        folds, sweep.dataset, parsed.root, sweep.criterion, batch_size, about=about, **settings
    )


def _alone_problems(parsed: argparse.Namespace, sweep: SweepParts) -> Iterator[Problem]:
    from asynckfold.jobs.recipe import named_lr_schedules, named_models

    if not 0 < parsed.held_out < 1:
        rule = "--held-out must be a share between 0 and 1"
        yield Problem(rule, str(parsed.held_out), "Pass 0.2.")
    for what, named in (
        ("model", named_models(sweep.models)[0]),
        ("LR schedule", named_lr_schedules(sweep.schedulers)[0]),
    ):
        if len(named) != 1:
            received = ", ".join(named) or "none"
            yield Problem(f"train takes one {what}", received, "Use run for several.")
    if sweep.params:
        names = ", ".join(map(str, sweep.params))
        yield Problem("train takes one candidate", f"a grid of {names}", "Use run for several.")


def _held_out(parsed: argparse.Namespace, grouped: bool) -> Any:
    """Return a splitter that holds a share of the samples, or of their groups, out.

    Stratified for built-in data without groups.
    """
    from sklearn import model_selection

    kind = model_selection.StratifiedShuffleSplit if parsed.data else model_selection.ShuffleSplit
    kind = model_selection.GroupShuffleSplit if grouped else kind
    return kind(1, test_size=parsed.held_out, random_state=parsed.seed or 0)
