"""A sweep of built-in models and data, named by flags."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.api.arguments import Settings, words_of
from asynckfold.cli.flags import flag_settings, flag_values, flags, with_defaults
from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.terminal import complain

if TYPE_CHECKING:
    from asynckfold.data.sources import Source

COLUMNS = ("drop", "keep", "category", "groups", "fold_column")
"""Flags that name columns of a table."""

OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
"""Flags of the optimizer."""

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


def built_in_sweep(parsed: argparse.Namespace) -> SweepParts:
    """Return the objects of a sweep of built-in models and data, once all flags are checked."""
    problems = [*parsed.problems, *_fold_problems(parsed)]
    full = with_defaults(parsed)
    names, schedulers = words_of(full.models), words_of(full.schedulers)
    problems += [
        *name_problems(names, schedulers),
        *optimizer_problems(full, full.batch_size),
    ]
    with gathered(problems):
        imported_models(names)
    source = None
    if full.data:
        with gathered(problems):
            source = source_of(full)
    else:
        remedy = "Pass --data digits, or a sweep file such as sweep.py."
        problems.append(Problem("a run needs data", "none", remedy))
    _check_settings(full, schedulers, problems)
    refuse(problems)
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
    refuse(name_problems(names, schedulers))
    imported, source = imported_models(names), source or source_of(full)
    models, settings = models_and_views(names, imported, source, full.augment)
    return SweepParts(
        source.dataset,
        torch.nn.CrossEntropyLoss(),
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
        limit=parsed.limit,
        random_state=parsed.seed,
        **{name: column_words(getattr(parsed, name)) for name in COLUMNS},
    )


def _fold_problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    """Yield flags that ask for other folds than those of a column."""
    for name in ("folds", "repeats"):
        value = getattr(parsed, name)
        if parsed.fold_column and value is not None:
            rule = f"--fold-column names the folds, so --{name} has no effect"
            yield Problem(rule, f"--{name} {value}", "Drop one of the two.")


def _check_settings(
    parsed: argparse.Namespace, schedulers: Sequence[str], problems: list[Problem]
) -> None:
    """Add the problems of LR schedules, trainer parameters and settings."""
    from asynckfold.jobs.recipe import named_lr_schedules

    problems += named_lr_schedules(list(dict.fromkeys(schedulers)))[1] if schedulers else []
    with gathered(problems):
        TrainerParams.from_mapping(flag_values(parsed, TrainerParams))
    settings = Settings(dataset=None, root_dir=parsed.root, criterion=len, **flag_settings(parsed))
    problems += settings.problems()


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
        else ARCHITECTURES[name].build(shape, len(source.classes))
        for name in names
    }
    settings: dict[str, Any] = {"targets": source.targets, "about": {"data": data_named(source)}}
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


def data_named(source: Source) -> str:
    """Describe the samples: ``"digits (scikit-learn), 1,797 samples of 8×8"``."""
    # These 8×8 images are not MNIST.
    origin = " (scikit-learn)" if source.name == "digits" else ""
    shape = source.sample_shape[1:] if source.sample_shape[:1] == (1,) else source.sample_shape
    sizes = "×".join(map(str, shape))
    unit = " numbers" if len(shape) == 1 else ""
    return f"{source.name}{origin}, {len(source.targets):,} samples of {sizes}{unit}"


def name_problems(names: Sequence[str], schedulers: Sequence[str]) -> Iterator[Problem]:
    """Yield problems of the names of models and LR schedules."""
    from asynckfold.models import ARCHITECTURES

    for name in dict.fromkeys(names):
        if ":" not in name and name not in ARCHITECTURES:
            known = f"Known: {', '.join(sorted(ARCHITECTURES))}, or pkg.mod:Name."
            guess = nearest(name, ARCHITECTURES)
            yield Problem("--models must name models", repr(name), f"{guess} {known}".strip())
    for flag, words in (("--models", names), ("--schedulers", schedulers)):
        if not words:
            default = flags()[flag[2:]].default
            yield Problem(f"{flag} must name at least one", "none", f"Pass {flag} {default}.")
        for word in dict.fromkeys(words):
            if words.count(word) > 1:
                yield Problem(f"{flag} must name each once", f"{word!r} twice", "Drop one.")


def optimizer_problems(parsed: argparse.Namespace, batch_size: object) -> Iterator[Problem]:
    """Yield problems of the optimizer and its flags."""
    from asynckfold.training.optimizers import FULL_BATCH, MOMENTUM, OPTIMIZERS

    name = parsed.optimizer
    values = {
        flag: [getattr(parsed, flag), *(parsed.param or {}).get(flag, [])] for flag in OPTIMIZER[1:]
    }
    momenta, decays = ([v for v in values[flag] if v] for flag in ("momentum", "weight_decay"))
    if name not in OPTIMIZERS:
        rule, known = "--optimizer must name one of torch.optim", ", ".join(sorted(OPTIMIZERS))
        yield Problem(rule, repr(name), f"{nearest(name, OPTIMIZERS)} Known: {known}.".strip())
    elif momenta and name not in MOMENTUM:
        yield Problem("--momentum applies to sgd and rmsprop", f"with {name}", "Drop it.")
    if name in FULL_BATCH and batch_size != "full":
        rule = f"--optimizer {name} needs the gradients of all samples in each step"
        yield Problem(rule, f"batches of {batch_size}", "Pass --batch-size full.")
    if name in FULL_BATCH and decays:
        rule = "--weight-decay does not apply to rprop, which takes only signs of gradients"
        yield Problem(rule, ", ".join(map(repr, decays)), "Drop it.")
    for flag, given in values.items():
        for value in given:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and 0 <= value < float("inf") and (value or flag != "lr"):
                continue
            rule = f"--{flag.replace('_', '-')} must be a number, "
            rule += "positive" if flag == "lr" else "0 or more"
            yield Problem(rule, repr(value), f"The default is {flags()[flag].default}.")


def optimizer_of(parsed: argparse.Namespace) -> Any:
    """Return the optimizer function that flags name."""
    from asynckfold.training.optimizers import NamedOptimizer

    return NamedOptimizer(*(getattr(parsed, name) for name in OPTIMIZER))


def imported_models(names: Sequence[str]) -> dict[str, Any]:
    """Import those of the names that are ``pkg.mod:Name``.

    Raises
    ------
    InputError
        Something cannot be imported.
    """
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
