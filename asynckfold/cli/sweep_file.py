"""From flags or a sweep file to the live objects of a run."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module, util
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.system.terminal import complain

if TYPE_CHECKING:
    from asynckfold.api.arguments import Settings
    from asynckfold.api.kfold import AsyncKFold
    from asynckfold.api.resources import Sharing
    from asynckfold.data.sources import Source
    from asynckfold.jobs.recipe import Recipe

FILE_NAMES = ("dataset", "criterion", "models", "schedulers", "opt_fn")
"""What a sweep file must define."""

DEFAULTS: dict[str, Any] = {
    "models": "mlp",
    "schedulers": "constant",
    "optimizer": "adam",
    "lr": 1e-3,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "folds": 5,
    "epochs": 5,
    "batch_size": 32,
    "seed": 0,
    "repeats": 1,
    "n_jobs": "auto",
    "threads_per_job": "auto",
    "fuse": "auto",
    "devices": "auto",
    "stall_timeout": "auto",
    "baseline": "estimate",
    "resume": "auto",
    "data_root": "data",
    "lr_step": "epoch",
    "trainer": "plain",
    "processes": 1,
    "precision": "fp32",
    "memory_format": "auto",
}
"""What a flag means when it is left out; a sweep file's own settings stand above these."""

_SETTINGS = {
    "folds": "kfolds",
    "batch_size": "batch_size",
    "seed": "random_state",
    "repeats": "n_repeats",
    "n_jobs": "n_jobs",
    "threads_per_job": "threads_per_job",
    "fuse": "fuse",
    "devices": "devices",
    "stall_timeout": "stall_timeout",
    "scoring": "scoring",
    "pos_label": "pos_label",
    "baseline": "baseline",
    "resume": "resume",
    "allow_different_software": "allow_different_software",
    "plan_from": "plan_from",
    "reserve_cores": "reserve_cores",
    "max_memory": "max_memory",
    "nice": "nice",
    "min_free_memory": "min_free_memory",
    "max_wait": "max_wait",
    "time_budget": "time_budget_s",
    "job_timeout": "job_timeout_s",
    "yield_to_others": "yield_to_others",
    "refit": "refit",
}
_NEVER = ("stall_timeout", "max_wait", "time_budget_s", "job_timeout_s")
"""What is None in code, and off on the command line."""

_TRAINER_PARAMS = (
    "epochs",
    "lr_step",
    "clip_grad_norm",
    "save_checkpoint_frequency",
    "trainer",
    "processes",
    "shared_state",
    "steps_per_round",
    "partition_size",
    "epochs_per_round",
    "accumulate",
    "n_push",
    "n_pull",
    "staleness_aware",
    "precision",
    "compile",
    "memory_format",
)
_OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
_AUGMENTED = (
    "the training view is cropped and mirrored at random, which must keep the class: not that of "
    "letters and digits; scores are taken without"
)
_NOT_WITH_A_FILE = (
    "data_root",
    "download",
    "target",
    "header",
    "drop",
    "keep",
    "category",
    "limit",
    "augment",
    "models",
)


@dataclass(frozen=True, eq=False)
class SweepParts:
    """The live objects of a run from the shell."""

    dataset: Any
    criterion: Any
    models: Any
    schedulers: Any
    opt_fn: Any
    trainer_params: dict[str, Any]
    settings: dict[str, Any]


def sweep_parts(parsed: argparse.Namespace) -> SweepParts:
    """Return the live objects that the command line asks for.

    Raises
    ------
    InputError
        Unknown words, missing files, options that do not fit.
    """
    if parsed.file and parsed.data:
        refuse(
            [
                Problem(
                    "a run takes a sweep file or --data",
                    f"{parsed.file} and --data {parsed.data}",
                    "Drop one of them.",
                )
            ]
        )
    if not parsed.file and not parsed.data:
        refuse(
            [
                Problem(
                    "a run needs data",
                    "none",
                    "Pass --data digits, or a sweep file such as sweep.py.",
                )
            ]
        )
    from asynckfold.training.worker.lazy_dynamo import import_on_demand

    # Nothing is compiled in this process, and torchvision would import the compiler.
    import_on_demand()
    return _from_file(parsed) if parsed.file else _from_flags(parsed)


# Built-in models and data


def _from_flags(parsed: argparse.Namespace) -> SweepParts:
    import torch

    _set_defaults(parsed)
    names, schedulers = _words(parsed.models), _words(parsed.schedulers)
    problems = [*_flag_problems(parsed, names, schedulers), *_optimizer_problems(parsed)]
    imported: dict[str, Any] = {}
    for name in names:
        with _gathered(problems):
            imported |= {name: _imported(name)} if ":" in name else {}
    with _gathered(problems):
        source = _source(parsed)
    _check_settings(parsed, schedulers, problems)
    refuse(problems)
    models, settings = _models_and_views(names, imported, source, parsed.augment)
    settings |= _positive_class(_words(parsed.scoring or ""), parsed.pos_label, source)
    notes = [*source.notes, *([_AUGMENTED] if parsed.augment else [])]
    if notes:
        settings["about"] |= {"data notes": notes}
    for note in notes:
        _note(parsed, note)
    return SweepParts(
        source.dataset,
        torch.nn.CrossEntropyLoss(),
        models,
        schedulers,
        _optimizer(parsed),
        _given_trainer_params(parsed),
        {**settings, **_given_settings(parsed)},
    )


def _set_defaults(parsed: argparse.Namespace) -> None:
    for name, value in DEFAULTS.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


@contextmanager
def _gathered(problems: list[Problem]) -> Iterator[None]:
    """Go on after a refusal, to tell all problems at once."""
    try:
        yield
    except InputError as error:
        problems += error.problems


def _source(parsed: argparse.Namespace) -> Source:
    from asynckfold.data.sources import column_words, load_source

    return load_source(
        parsed.data,
        data_root=Path(parsed.data_root),
        download=parsed.download,
        target=parsed.target,
        header=parsed.header or "auto",
        drop=column_words(parsed.drop),
        keep=column_words(parsed.keep),
        category=column_words(parsed.category),
        limit=parsed.limit,
        random_state=parsed.seed,
    )


def _check_settings(
    parsed: argparse.Namespace, schedulers: Sequence[str], problems: list[Problem]
) -> None:
    """Find what is wrong with the numbers, data or not."""
    from asynckfold.api.kfold import AsyncKFold
    from asynckfold.jobs.recipe import named_lr_schedules
    from asynckfold.jobs.trainer_params import TrainerParams

    problems += named_lr_schedules(list(dict.fromkeys(schedulers)))[1] if schedulers else []
    with _gathered(problems):
        TrainerParams.from_mapping(_given_trainer_params(parsed))
    settings = _given_settings(parsed)
    with _gathered(problems):
        AsyncKFold(
            settings.pop("kfolds"), None, parsed.root, len, settings.pop("batch_size"), **settings
        )


def _models_and_views(
    names: Sequence[str], imported: Mapping[str, Any], source: Source, augment: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return models that fit the data, and the transforms that make the data fit the models."""
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
    if source.standardize:
        from sklearn.preprocessing import StandardScaler

        settings["preprocess"] = StandardScaler()
    return models, settings


def _positive_class(scoring: Sequence[str], given: str | None, source: Source) -> dict[str, str]:
    """Return the class that scikit-learn takes for positive, which is called 1.

    Labels of a file are what stands there, and not the indices that became of them.
    """
    from asynckfold.results.scoring import one_class_scorers

    asking = one_class_scorers(scoring)
    if given is not None or len(source.classes) != 2 or not asking or source.classes[1] == "1":
        return {}
    if "1" not in source.classes:
        shown = " and ".join(source.classes)
        rule = f"{', '.join(asking)} needs to know which class is positive: scikit-learn takes 1"
        remedy = f"Pass --pos-label {shlex.quote(source.classes[1])}, or a score such as f1_macro."
        refuse([Problem(rule, f"classes {shown}", remedy)])
    return {"pos_label": "1"}


def data_named(source: Source) -> str:
    """Say what the samples are: ``"digits (scikit-learn), 1,797 samples of 8×8"``."""
    # Its 8×8 pixels are no MNIST, for which a picture of results might be taken.
    origin = " (scikit-learn)" if source.name == "digits" else ""
    shape = source.sample_shape[1:] if source.sample_shape[:1] == (1,) else source.sample_shape
    sizes = "×".join(map(str, shape))
    unit = " numbers" if len(shape) == 1 else ""
    return f"{source.name}{origin}, {len(source.targets):,} samples of {sizes}{unit}"


def _flag_problems(
    parsed: argparse.Namespace, names: Sequence[str], schedulers: Sequence[str]
) -> Iterator[Problem]:
    from asynckfold.models import ARCHITECTURES

    for name in dict.fromkeys(names):
        if ":" not in name and name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            yield Problem(
                "--models must name models",
                repr(name),
                f"{nearest(name, ARCHITECTURES).strip()} Known: {known}, or pkg.mod:Name.".strip(),
            )
    for flag, words in (("--models", names), ("--schedulers", schedulers)):
        if not words:
            yield Problem(
                f"{flag} must name at least one", "none", f"Pass {flag} {DEFAULTS[flag[2:]]}."
            )
        for word in dict.fromkeys(words):
            if words.count(word) > 1:
                yield Problem(f"{flag} must name each once", f"{word!r} twice", "Drop one.")


def _optimizer_problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    from asynckfold.training.named_optimizers import MOMENTUM, OPTIMIZERS

    if parsed.optimizer not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        yield Problem(
            "--optimizer must name one of torch.optim",
            repr(parsed.optimizer),
            f"{nearest(parsed.optimizer, OPTIMIZERS).strip()} Known: {known}.".strip(),
        )
    elif parsed.momentum and parsed.optimizer not in MOMENTUM:
        yield Problem(
            "--momentum applies to sgd and rmsprop", f"with {parsed.optimizer}", "Drop it."
        )
    for name in ("lr", "weight_decay", "momentum"):
        value, positive = getattr(parsed, name), name == "lr"
        if not 0 <= value < float("inf") or (positive and value == 0):
            flag = name.replace("_", "-")
            least = "positive" if positive else "0 or more"
            yield Problem(
                f"--{flag} must be a number, {least}",
                repr(value),
                f"The default is {DEFAULTS[name]}.",
            )


def _optimizer(parsed: argparse.Namespace) -> Any:
    from asynckfold.training.named_optimizers import NamedOptimizer

    return NamedOptimizer(*(getattr(parsed, name) for name in _OPTIMIZER))


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # It stays: what was imported may import more later, here and in the workers.
        sys.path.insert(0, here)
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        refuse(
            [
                Problem(
                    "--models pkg.mod:Name must be importable",
                    f"{name}: {error}",
                    "Check the spelling, and that the module is installed or in this folder.",
                )
            ]
        )
        raise


# A sweep file


def _from_file(parsed: argparse.Namespace) -> SweepParts:
    path = Path(parsed.file)
    refuse(_file_problems(parsed, path))
    module = _executed(path)
    settings = getattr(module, "settings", {})
    params = getattr(module, "trainer_params", {})
    refuse(_content_problems(path, module, settings, params))
    settings = {**settings, **_given_settings(parsed)}
    opt_fn = module.opt_fn
    if parsed.optimizer is not None:
        for name in _OPTIMIZER:
            if getattr(parsed, name) is None:
                setattr(parsed, name, DEFAULTS[name])
        refuse(_optimizer_problems(parsed))
        opt_fn = _optimizer(parsed)
    return SweepParts(
        module.dataset,
        module.criterion,
        module.models,
        module.schedulers if parsed.schedulers is None else _words(parsed.schedulers),
        opt_fn,
        {**params, **_given_trainer_params(parsed)},
        settings,
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
        yield Problem(
            "the sweep file must be Python", str(path), "Name it sweep.py; data goes with --data."
        )
    for name in _NOT_WITH_A_FILE:
        if getattr(parsed, name):
            yield Problem(
                f"--{name.replace('_', '-')} applies to --data only",
                f"it with the sweep file {path.name}",
                f"Drop it, and write it in {path.name}.",
            )
    for name in _OPTIMIZER[1:]:
        if getattr(parsed, name) is not None and parsed.optimizer is None:
            yield Problem(
                f"--{name.replace('_', '-')} needs --optimizer with a sweep file",
                f"no --optimizer beside {path.name}",
                f"Pass --optimizer too, which replaces opt_fn, or change {path.name}.",
            )


def _executed(path: Path) -> ModuleType:
    """Run a sweep file as a module of its own, whose definitions travel by value."""
    import cloudpickle

    spec = util.spec_from_file_location("asynckfold_sweep_file", path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    cloudpickle.register_pickle_by_value(module)
    sys.path.insert(0, str(path.parent.absolute()))
    # The file is the user's code and may raise anything; its traceback is what they need.
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        complain("".join(traceback.format_exception(_without_ours(error, path))).rstrip())
        line = traceback.format_exception_only(error)[-1].strip()
        raise InputError(
            [Problem("the sweep file must run", line, f"Repair {path}; its traceback is above.")]
        ) from error
    return module


def _without_ours(error: BaseException, path: Path) -> BaseException:
    """The error with a traceback that begins in the user's file."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename) != path.absolute():
        trace = trace.tb_next
    return error.with_traceback(trace)


def _content_problems(
    path: Path, module: ModuleType, settings: Any, params: Any
) -> Iterator[Problem]:
    for name in FILE_NAMES:
        if not hasattr(module, name):
            yield Problem(
                f"{path.name} must define {', '.join(FILE_NAMES)}",
                f"no {name}",
                f"Write {name} = … in it.",
            )
    for name, value in (("settings", settings), ("trainer_params", params)):
        if not isinstance(value, Mapping):
            yield Problem(
                f"{name} in {path.name} must be a dict",
                type(value).__name__,
                f"Write {name} = {{…}}.",
            )
    if isinstance(settings, Mapping):
        yield from _keyword_problems(path, settings)


def _keyword_problems(path: Path, settings: Mapping[str, Any]) -> Iterator[Problem]:
    from asynckfold.api.kfold import AsyncKFold

    elsewhere = {"dataset": "its own name", "criterion": "its own name", "root_dir": "--root"}
    valid = set(signature(AsyncKFold).parameters) - set(elsewhere)
    for name in settings:
        if name in elsewhere:
            yield Problem(
                f"settings in {path.name} must not hold {name}",
                repr(name),
                f"Give it by {elsewhere[name]}.",
            )
        elif name not in valid:
            yield Problem(
                f"settings in {path.name} must be keyword arguments of AsyncKFold",
                repr(name),
                f"{nearest(str(name), valid).strip()} Valid: {', '.join(sorted(valid))}.".strip(),
            )


# Both


def live_parts(parsed: argparse.Namespace) -> tuple[Settings, Recipe, Source | None]:
    """Return what the models and samples of a run are made of; None where no source was named.

    Nothing else of the command line is looked at: no job is going to be started.

    Raises
    ------
    InputError
        As `sweep_parts`.
    """
    from asynckfold.api.arguments import Settings
    from asynckfold.jobs.recipe import Recipe, named_models
    from asynckfold.training.worker.lazy_dynamo import import_on_demand

    import_on_demand()
    source = None
    if parsed.file:
        sweep = _from_file(parsed)
    else:
        import torch

        _set_defaults(parsed)
        names = _words(parsed.models)
        refuse(_flag_problems(parsed, names, _words(parsed.schedulers)))
        imported = {name: _imported(name) for name in names if ":" in name}
        source = _source(parsed)
        models, views = _models_and_views(names, imported, source, parsed.augment)
        criterion, opt_fn = torch.nn.CrossEntropyLoss(), _optimizer(parsed)
        sweep = SweepParts(source.dataset, criterion, models, (), opt_fn, {}, views)
    given = sweep.settings
    preprocess = given.get("preprocess")
    recipe = Recipe(named_models(sweep.models)[0], {}, sweep.opt_fn, sweep.criterion, preprocess)
    words = ("train_transform", "eval_transform", "output_transform")
    views = {name: given.get(name) for name in words}
    settings = Settings(None, sweep.dataset, Path(parsed.root), sweep.criterion, 1, **views)
    return settings, recipe, source


def make_kfold(parsed: argparse.Namespace, sweep: SweepParts) -> AsyncKFold:
    """Return the cross-validation with the settings of the file and of the flags above them."""
    from asynckfold.api.kfold import AsyncKFold

    settings = dict(sweep.settings)
    if parsed.folds is not None:
        # The flag stands above every name that the file may have used.
        for alias in ("cv", "n_splits"):
            settings.pop(alias, None)
    aliased = {"cv", "n_splits"} & set(settings)
    folds = settings.pop("kfolds", None if aliased else DEFAULTS["folds"])
    batch_size = settings.pop("batch_size", DEFAULTS["batch_size"])
    if parsed.verb == "train":
        refuse(_alone_problems(parsed, sweep))
        aliases = {"cv", "n_splits", "n_repeats", "groups"}
        settings = {name: value for name, value in settings.items() if name not in aliases}
        folds = _held_out(parsed)
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


def _held_out(parsed: argparse.Namespace) -> Any:
    """What sets a share of the samples aside; in proportion, where there are surely classes."""
    from sklearn import model_selection

    kind = model_selection.ShuffleSplit if parsed.file else model_selection.StratifiedShuffleSplit
    return kind(1, test_size=parsed.held_out, random_state=parsed.seed or 0)


def _given_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    found = {
        keyword: getattr(parsed, flag)
        for flag, keyword in _SETTINGS.items()
        if getattr(parsed, flag) is not None
    }
    if found.get("baseline") == "none":
        found["baseline"] = None
    for name in _NEVER:
        if found.get(name) == "off":
            found[name] = None
    if "scoring" in found:
        found["scoring"] = _words(found["scoring"])
    if parsed.no_stratify:
        found["stratify"] = False
    return found


def asked_jobs(parsed: argparse.Namespace) -> int | str:
    """Return how many jobs the flags ask for."""
    found: int | str = DEFAULTS["n_jobs"] if parsed.n_jobs is None else parsed.n_jobs
    return found


def sharing_of(parsed: argparse.Namespace, problems: list[Problem]) -> Sharing:
    """Return what the flags leave to others, and add what is wrong with them, n_jobs included."""
    from asynckfold.api.resources import Sharing
    from asynckfold.system.machine import resolve_n_jobs

    names = {field.name for field in fields(Sharing)} & set(vars(parsed))
    given = {name: value for name in names if (value := getattr(parsed, name)) is not None}
    sharing = Sharing(**given)
    problems += sharing.problems()
    with _gathered(problems):
        resolve_n_jobs(asked_jobs(parsed), 1)
    return sharing


def _given_trainer_params(parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        name: getattr(parsed, name) for name in _TRAINER_PARAMS if getattr(parsed, name) is not None
    }


def in_flags(error: InputError) -> InputError:
    """Return the same problems in the words of the command line.

    Examples
    --------
    >>> print(in_flags(InputError([Problem("n_jobs must not be 0", "0", "Pass n_jobs='auto'.")])))
    --n-jobs must not be 0: received 0. Pass --n-jobs auto.
    >>> by_kind = "Pass partition_size={'cpu': 9, 'gpu': 80}, or batch_size=7 or less."
    >>> in_flags(InputError([Problem("", "", by_kind)])).problems[0].remedy
    'Pass --partition-size cpu=9,gpu=80, or --batch-size 7 or less.'
    >>> print(in_flags(InputError([Problem("max_wait must be above 0, or None", "0", "Wait.")])))
    --max-wait must be above 0, or off: received 0. Wait.
    """
    return type(error)(
        [
            replace(problem, rule=_flagged(problem.rule), remedy=_flagged(problem.remedy))
            for problem in error.problems
        ]
    )


def _flagged(text: str) -> str:
    flags = {keyword: flag for flag, keyword in _SETTINGS.items()}
    flags |= {"root_dir": "root", **{name: name for name in _TRAINER_PARAMS}}
    names = "|".join(flags)
    # What is given by kind.
    text = re.sub(
        r"\{('\w+': \d+(?:, '\w+': \d+)*)\}",
        lambda found: re.sub(r"'(\w+)': (\d+)(?:, )?", r"\1=\2,", found[1])[:-1],
        text,
    )
    text = text.replace("stratify=False", "--no-stratify")
    if any(name in text for name in _NEVER):
        text = re.sub(r"\bNone\b", "off", text)
    for name in ("allow_different_software", "yield_to_others", "compile", "refit"):
        text = text.replace(f"{name}=True", _flag(name))
    text = re.sub(
        rf"\b({names})=('?)([^\s',;]*[^\s',;.])\2",
        lambda found: f"{_flag(flags[found[1]])} {found[3]}",
        text,
    )
    # At the start of a rule, or unmistakable: "epochs" alone may stand for the epochs themselves.
    return re.sub(
        rf"(?<![-\w])(^(?:{names})|\w*_\w*|kfolds|(?<=Leave )\w+)\b",
        lambda found: _flag(flags[found[1]]) if found[1] in flags else found[1],
        text,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def names_code(parsed: argparse.Namespace) -> bool:
    """Whether a command line imports the user's code: a sweep file, or pkg.mod:Name."""
    file, models = (getattr(parsed, name, None) for name in ("file", "models"))
    return bool(file) or ":" in (models or "")


def from_folder(parsed: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """Return the command line with its data found from the folder where it was first given."""
    found = argparse.Namespace(**vars(parsed))
    word, colon, path = (parsed.data or "").partition(":")
    if colon:
        found.data = f"{word}:{folder / Path(path).expanduser()}"
    found.data_root = str(folder / Path(parsed.data_root or DEFAULTS["data_root"]).expanduser())
    if parsed.plan_from:
        found.plan_from = str(folder / Path(parsed.plan_from).expanduser())
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _note(parsed: argparse.Namespace, text: str) -> None:
    if not parsed.quiet:
        complain(text)
