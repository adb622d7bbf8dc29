"""From a command line to the objects of a sweep: by flags, or by a sweep file.

::

    flags ──────────────────────────────────► built_in_sweep ─┐
    sweep.py ─ flags = {"data": "digits", …} ─────┘           ├─► SweepParts ─► AsyncKFold
             └ dataset, models, opt_fn … ─────────────────────┘

Flags of the command line override those of a file, and its settings.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asynckfold.api.arguments import Settings, words_of
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
from asynckfold.jobs.criteria import NUMBERS, TABLE
from asynckfold.jobs.objective import REGRESSION
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

COLUMNS = ("drop", "keep", "category", "groups", "fold_column")
"""Flags that name columns of a table."""

OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
"""Flags of the optimizer."""

CRITERIA = (
    *("CrossEntropyLoss", "MultiMarginLoss"),
    *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss"),
)
"""Losses for what the built-in models return."""

_AUGMENTED = (
    "training images are cropped and flipped at random, which changes letters and digits; images "
    "that are scored are not"
)


@dataclass(frozen=True, eq=False)
class SweepParts:
    """The objects of a sweep: what `AsyncKFold` and its call receive."""

    dataset: Any
    criterion: Any
    models: Any
    schedulers: Any
    opt_fn: Any
    trainer_params: dict[str, Any]
    settings: dict[str, Any]
    params: Mapping[str, Any] | None = None
    n_iter: int | None = None
    source: Source | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield what a call of `AsyncKFold` gets by position."""
        yield from (self.models, self.schedulers, self.opt_fn, self.trainer_params)

    @property
    def grid(self) -> dict[str, Any]:
        """What it gets by keyword."""
        return {"params": self.params, "n_iter": self.n_iter}


# Flags


def built_in_sweep(parsed: argparse.Namespace) -> SweepParts:
    """Return the objects of a sweep of built-in models and data, once all flags are checked."""
    from asynckfold.jobs.recipe import named_lr_schedules

    full, source = with_defaults(parsed), None
    names, schedulers = words_of(full.models), words_of(full.schedulers)
    problems = [*parsed.problems, *name_problems(names)]
    for name in ("folds", "repeats") if parsed.fold_column else ():
        if (value := getattr(parsed, name)) is not None:
            rule = f"--fold-column names the folds, so --{name} has no effect"
            problems.append(Problem(rule, f"--{name} {value}", "Drop one of the two."))
    problems += optimizer_problems(full, full.batch_size)
    problems += criterion_problems(full)
    with gathered(problems):
        imported_models(names)
    if full.data:
        with gathered(problems):
            source = source_of(full)
    else:
        remedy = "Pass --data digits, or a sweep file such as sweep.py."
        problems.append(Problem("a run needs data", "none", remedy))
    problems += named_lr_schedules(schedulers)[1]
    with gathered(problems):
        TrainerParams.from_mapping(flag_values(full, TrainerParams))
    settings = Settings(dataset=None, root_dir=full.root, criterion=len, **flag_settings(full))
    refuse([*problems, *settings.problems()])
    assert source is not None
    sweep = named_sweep(parsed, source)
    sweep.settings.update(_positive_class(full.scoring or (), full.pos_label, source))
    notes = [*source.notes, *([_AUGMENTED] if full.augment else [])]
    if notes:
        sweep.settings["about"] |= {"data notes": notes}
    for note in notes if not full.quiet else ():
        complain(note)
    return sweep


def named_sweep(parsed: argparse.Namespace, source: Source | None = None) -> SweepParts:
    """Return the objects that flags name, unchecked but for the names of models."""
    import torch

    full = with_defaults(parsed)
    names, schedulers = words_of(full.models), words_of(full.schedulers)
    refuse(name_problems(names))
    imported, source = imported_models(names), source or source_of(full)
    models, settings = models_and_views(names, imported, source, full.augment)
    return SweepParts(
        source.dataset,
        getattr(torch.nn, criterion_name(full))(),
        models,
        schedulers,
        optimizer_of(full),
        flag_values(full, TrainerParams),
        {**flag_settings(full), **settings},
        full.param,
        source=source,
    )


@contextmanager
def gathered(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of an `InputError` to a list, to report all at once."""
    try:
        yield
    except InputError as error:
        problems += error.problems


def source_of(parsed: argparse.Namespace) -> Source:
    """Return the data source that flags name."""
    from asynckfold.data.sources import column_words, load_source

    return load_source(
        parsed.data,
        data_root=Path(parsed.data_root),
        download=parsed.download,
        target=parsed.target,
        header=parsed.header,
        regression=_is_regression(parsed),
        limit=parsed.limit,
        random_state=parsed.seed,
        **{name: column_words(getattr(parsed, name)) for name in COLUMNS},
    )


def models_and_views(
    names: Sequence[str], imported: Mapping[str, Any], source: Source, augment: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return models for the shape of the data, and the settings of the data for the models."""
    from asynckfold.data.sources import image_transform
    from asynckfold.models import ARCHITECTURES, shared_input_shape

    if augment and source.kind != "image":
        rule = "--augment crops and flips images"
        refuse([Problem(rule, f"it with the table {source.name}", "Drop it.")])
    built_in = [ARCHITECTURES[name] for name in names if name not in imported]
    shape = shared_input_shape(built_in, source.sample_shape)
    models = {
        name.replace(":", "."): imported[name]
        if name in imported
        else ARCHITECTURES[name].build(shape, len(source.classes) or None)
        for name in names
    }
    settings: dict[str, Any] = {"targets": source.targets, "about": {"data": source.text}}
    if source.kind == "image":
        settings["train_transform"] = image_transform(source, shape, augment=augment)
        settings["eval_transform"] = image_transform(source, shape, augment=False)
    if source.groups is not None:
        settings["groups"] = source.groups
    if source.fold_of is not None:
        from sklearn.model_selection import PredefinedSplit

        settings["kfolds"] = PredefinedSplit(source.fold_of)
    if source.standardize:
        from sklearn.preprocessing import StandardScaler

        settings["preprocess"] = StandardScaler()
    return models, settings


def _positive_class(scoring: Sequence[str], given: str | None, source: Source) -> dict[str, str]:
    """Return the class "1" as the positive one, as in scikit-learn, if a score needs one.

    Classes are named by the labels in the file, not by their indices.
    """
    from asynckfold.results.scoring import one_class_scorers

    scorers = one_class_scorers(scoring)
    if given is not None or len(source.classes) != 2 or not scorers or source.classes[1] == "1":
        return {}
    if "1" not in source.classes:
        shown = " and ".join(source.classes)
        rule = f"{', '.join(scorers)} needs to know which class is positive: scikit-learn takes 1"
        remedy = f"Pass --pos-label {shlex.quote(source.classes[1])}, or a score such as f1_macro."
        refuse([Problem(rule, f"classes {shown}", remedy)])
    return {"pos_label": "1"}


def name_problems(names: Sequence[str]) -> Iterator[Problem]:
    """Yield problems of the names of models."""
    from asynckfold.models import ARCHITECTURES

    for name in dict.fromkeys(names):
        if ":" not in name and name not in ARCHITECTURES:
            known = f"Known: {', '.join(sorted(ARCHITECTURES))}, or pkg.mod:Name."
            guess = nearest(name, ARCHITECTURES)
            if name in import_module("torchvision.models").list_models():
                guess = f"Pass torchvision.models:{name}."
            yield Problem("--models must name models", repr(name), f"{guess} {known}".strip())
    for name in [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        yield Problem("--models must name each model once", f"{name!r} twice", "Leave one out.")
    if not names:
        yield Problem("--models must name at least one", "none", "Pass --models mlp.")


def optimizer_problems(parsed: argparse.Namespace, batch_size: object) -> Iterator[Problem]:
    """Yield problems of the optimizer and its flags; torch checks the numbers."""
    from asynckfold.training.optimizers import FULL_BATCH, MOMENTUM, OPTIMIZERS

    name, grid = parsed.optimizer, parsed.param or {}
    momentum, decay = (
        any([getattr(parsed, flag), *grid.get(flag, [])]) for flag in ("momentum", "weight_decay")
    )
    if name not in OPTIMIZERS:
        rule, known = "--optimizer must name one of torch.optim", ", ".join(sorted(OPTIMIZERS))
        yield Problem(rule, repr(name), f"{nearest(name, OPTIMIZERS)} Known: {known}.".strip())
    elif momentum and name not in MOMENTUM:
        yield Problem("--momentum applies to sgd and rmsprop", f"with {name}", "Drop it.")
    if name in FULL_BATCH and batch_size != "full":
        rule = f"--optimizer {name} needs the gradients of all samples in each step"
        yield Problem(rule, f"batches of {batch_size}", "Pass --batch-size full.")
    if name in FULL_BATCH and decay:
        rule = "--weight-decay does not apply to rprop, which takes only signs of gradients"
        yield Problem(rule, "one that is not 0", "Drop it.")


def optimizer_of(parsed: argparse.Namespace) -> Any:
    """Return the optimizer function that flags name."""
    from asynckfold.training.optimizers import NamedOptimizer

    return NamedOptimizer(*(getattr(parsed, name) for name in OPTIMIZER))


def criterion_name(parsed: argparse.Namespace) -> str:
    """Return the class of the loss that flags name, or what they name instead."""
    if parsed.criterion is None:
        return "MSELoss" if parsed.task == REGRESSION else CRITERIA[0]
    known = {_plain(name): name for name in CRITERIA}
    return known.get(_plain(parsed.criterion), str(parsed.criterion))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower()).removesuffix("loss")


def _is_regression(parsed: argparse.Namespace) -> bool:
    row = TABLE.get(criterion_name(parsed))
    return row is not None and row.targets == NUMBERS


def criterion_problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    """Yield that there is no such criterion, or that it is for another task."""
    name, task = criterion_name(parsed), parsed.task
    if name not in CRITERIA:
        remedy = f"{nearest(name, CRITERIA)} Known: {', '.join(CRITERIA)}.".strip()
        yield Problem("--criterion must name a loss for the built-in models", repr(name), remedy)
    elif task is not None and (task == REGRESSION) is not _is_regression(parsed):
        rule = "--criterion and --task must both be for numbers, or both for classes"
        yield Problem(rule, f"--criterion {name} with --task {task}", "Drop one of the two.")


def imported_models(names: Sequence[str]) -> dict[str, Any]:
    """Import those of the names that are ``pkg.mod:Name``."""
    here, models, problems = str(Path.cwd()), dict[str, Any](), list[Problem]()
    for name in names:
        module, colon, attribute = name.partition(":")
        if colon and here not in sys.path:
            # For good: the module may import more later, here and in the workers.
            sys.path.insert(0, here)
        try:
            models |= {name: getattr(import_module(module), attribute)} if colon else {}
        except (ImportError, AttributeError, ValueError) as error:
            rule = "--models pkg.mod:Name must be importable"
            remedy = "Check the spelling, and that the module is installed or in this folder."
            problems.append(Problem(rule, f"{name}: {error}", remedy))
    refuse(problems)
    return models


# A sweep file


def sweep_parts(
    parsed: argparse.Namespace, build: Callable[[argparse.Namespace], SweepParts] = built_in_sweep
) -> SweepParts:
    """Return the objects of the sweep that the command line names.

    ``build`` makes those that flags name.
    """
    from asynckfold.training.worker.lazy_dynamo import import_on_demand

    # This process compiles nothing, and torchvision would import the compiler.
    import_on_demand()
    if not parsed.file:
        return build(parsed)
    path = Path(parsed.file)
    refuse(parsed.problems or _file_problems(path))
    module = _executed(path)
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


def _file_problems(path: Path) -> Iterator[Problem]:
    """Yield what is wrong before the file is run."""
    if not path.is_file():
        guess = nearest(path.name, [item.name for item in path.parent.glob("*.py")])
        yield Problem("the sweep file must exist", str(path), f"Check the path.{guess}")
    elif path.suffix != ".py":
        remedy = "Name it sweep.py; data goes with --data."
        yield Problem("the sweep file must be Python", str(path), remedy)


def _unused_flags(parsed: argparse.Namespace, path: Path) -> Iterator[Problem]:
    """Yield the flags that have no effect beside the objects of a sweep file."""
    if parsed.data:
        rule, received = "a run takes a sweep file or --data", f"{parsed.file} and --data"
        yield Problem(rule, f"{received} {parsed.data}", "Drop one of them.")
    used = ("schedulers", "data", "param", *(OPTIMIZER if parsed.optimizer else ()))
    for name in arguments(NamedObjects):
        if name not in used and getattr(parsed, name):
            needed = "needs --optimizer" if name in OPTIMIZER else "applies to --data only"
            rule, received = f"--{name.replace('_', '-')} {needed}", f"it with {path.name}"
            yield Problem(rule, received, f"Drop it, and write it in {path.name}.")


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
    """
    from asynckfold.jobs.grid import with_model
    from asynckfold.jobs.recipe import Recipe, named_models

    sweep = sweep_parts(parsed, named_sweep)
    models = with_model(named_models(sweep.models)[0], sweep.params, model)
    preprocess, target = map(sweep.settings.get, ("preprocess", "target_transform"))
    recipe = Recipe(models, {}, sweep.opt_fn, sweep.criterion, preprocess, target)
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
        for alias in ("cv", "n_splits", "n_repeats"):
            settings.pop(alias, None)
        has_classes = sweep.source is not None and bool(sweep.source.classes)
        folds = _held_out(parsed, settings.get("groups") is not None, has_classes)
    settings.setdefault("verbose", 0 if parsed.quiet else 1 + parsed.verbose)
    about = {**settings.pop("about", {}), "cli": parsed.line, "folder": str(Path.cwd())}
    return AsyncKFold(
        folds, sweep.dataset, parsed.root, sweep.criterion, batch_size, about=about, **settings
    )


def _held_out(parsed: argparse.Namespace, grouped: bool, has_classes: bool) -> Any:
    """Return a splitter that holds a share of the samples, or of their groups, out.

    Stratified for built-in data of classes without groups.
    """
    from sklearn import model_selection

    kind = model_selection.StratifiedShuffleSplit if has_classes else model_selection.ShuffleSplit
    kind = model_selection.GroupShuffleSplit if grouped else kind
    return kind(1, test_size=parsed.held_out, random_state=parsed.seed or 0)
