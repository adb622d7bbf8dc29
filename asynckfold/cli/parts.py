"""From flags or a sweep file to the live objects of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.errors import Problem, nearest, refuse

if TYPE_CHECKING:
    from asynckfold.kfold import AsyncKFold

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
    "threads_per_job": 1,
    "devices": "auto",
    "baseline": "estimate",
    "resume": "auto",
    "data_root": "data",
    "lr_step": "epoch",
}
"""What a flag means when it is left out; a sweep file's own settings stand above these."""


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
    if parsed.file:
        return _from_file(parsed)
    if not parsed.data:
        refuse(
            [
                Problem(
                    "a run needs data",
                    "none",
                    "Pass --data digits, or a sweep file such as sweep.py.",
                )
            ]
        )
    return _from_flags(parsed)


def _from_flags(parsed: argparse.Namespace) -> SweepParts:
    from asynckfold.sources import load_source
    from asynckfold.training.optimizers import NamedOptimizer

    _fill(parsed, DEFAULTS)
    names = _words(parsed.models)
    refuse(_flag_problems(parsed, names))
    source = load_source(
        parsed.data,
        data_root=Path(parsed.data_root),
        download=parsed.download,
        target=parsed.target,
        header=parsed.header or "auto",
        limit=parsed.limit,
        random_state=parsed.seed,
    )
    models, settings = _models_and_views(names, source, parsed.augment)
    for note in source.notes:
        _note(parsed, note)
    import torch

    return SweepParts(
        source.dataset,
        torch.nn.CrossEntropyLoss(),
        models,
        _words(parsed.schedulers),
        NamedOptimizer(parsed.optimizer, parsed.lr, parsed.momentum, parsed.weight_decay),
        _given_trainer_params(parsed),
        {**settings, **_given_settings(parsed)},
    )


def _models_and_views(
    names: Sequence[str], source: Any, augment: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return models that fit the data, and the transforms that make the data fit the models."""
    from asynckfold.models import ARCHITECTURES, shared_input_shape
    from asynckfold.sources import image_transform

    built_in = [ARCHITECTURES[name] for name in names if ":" not in name]
    shape = shared_input_shape(built_in, source.sample_shape)
    models = {
        name.replace(":", ".") if ":" in name else name: _imported(name)
        if ":" in name
        else ARCHITECTURES[name].build(shape, len(source.classes))
        for name in names
    }
    settings: dict[str, Any] = {"targets": source.targets}
    if source.kind == "image":
        settings["train_transform"] = image_transform(source, shape, augment=augment)
        settings["eval_transform"] = image_transform(source, shape, augment=False)
    if source.standardize:
        from sklearn.preprocessing import StandardScaler

        settings["preprocess"] = StandardScaler()
    return models, settings


def _from_file(parsed: argparse.Namespace) -> SweepParts:
    path = Path(parsed.file)
    if not path.is_file():
        refuse([Problem("the sweep file must exist", str(path), "Check the path.")])
    spec = util.spec_from_file_location("asynckfold_sweep_file", path)
    if spec is None or spec.loader is None:
        refuse([Problem("the sweep file must be Python", str(path), "Name it something.py.")])
        raise AssertionError
    module = util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    missing = [name for name in FILE_NAMES if not hasattr(module, name)]
    refuse(
        Problem(
            f"{path.name} must define {', '.join(FILE_NAMES)}",
            f"no {name}",
            f"Write {name} = … in it.",
        )
        for name in missing
    )
    settings = dict(getattr(module, "settings", {}))
    params = {**getattr(module, "trainer_params", {}), **_given_trainer_params(parsed)}
    settings.update(_given_settings(parsed))
    return SweepParts(
        module.dataset,
        module.criterion,
        module.models,
        module.schedulers,
        module.opt_fn,
        params,
        settings,
    )


def make_kfold(parsed: argparse.Namespace, sweep: SweepParts) -> AsyncKFold:
    """Return the cross-validation with the settings of the file and of the flags above them."""
    from asynckfold.kfold import AsyncKFold

    settings = dict(sweep.settings)
    folds = settings.pop("kfolds", DEFAULTS["folds"])
    batch_size = settings.pop("batch_size", DEFAULTS["batch_size"])
    settings.setdefault("verbose", 0 if parsed.quiet else 1 + parsed.verbose)
    settings.setdefault("about", {"cli": parsed.line})
    return AsyncKFold(folds, sweep.dataset, parsed.root, sweep.criterion, batch_size, **settings)


_SETTINGS = {
    "folds": "kfolds",
    "batch_size": "batch_size",
    "seed": "random_state",
    "repeats": "n_repeats",
    "n_jobs": "n_jobs",
    "threads_per_job": "threads_per_job",
    "devices": "devices",
    "scoring": "scoring",
    "baseline": "baseline",
    "resume": "resume",
}
_TRAINER_PARAMS = ("epochs", "lr_step", "clip_grad_norm", "save_checkpoint_frequency")


def _given_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    found = {
        keyword: getattr(parsed, flag)
        for flag, keyword in _SETTINGS.items()
        if getattr(parsed, flag) is not None
    }
    if found.get("baseline") == "none":
        found["baseline"] = None
    if "scoring" in found:
        found["scoring"] = _words(found["scoring"])
    return found


def _given_trainer_params(parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        name: getattr(parsed, name) for name in _TRAINER_PARAMS if getattr(parsed, name) is not None
    }


def _fill(parsed: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _flag_problems(parsed: argparse.Namespace, names: Sequence[str]) -> Iterator[Problem]:
    from asynckfold.models import ARCHITECTURES
    from asynckfold.training.optimizers import MOMENTUM, OPTIMIZERS

    for name in names:
        if ":" not in name and name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            yield Problem(
                "--models must name models",
                repr(name),
                f"{nearest(name, ARCHITECTURES).strip()} Known: {known}, or pkg.mod:Name.".strip(),
            )
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
        value = getattr(parsed, name)
        if not 0 <= value < float("inf") or (name == "lr" and value == 0):
            flag = name.replace("_", "-")
            yield Problem(
                f"--{flag} must be a positive number",
                repr(value),
                f"The default is {DEFAULTS[name]}.",
            )


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
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
    finally:
        sys.path.remove(here)


def names_code(parsed: argparse.Namespace) -> bool:
    """Whether a command line imports the user's code: a sweep file, or pkg.mod:Name."""
    return bool(parsed.file) or ":" in (parsed.models or "")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _note(parsed: argparse.Namespace, text: str) -> None:
    if not parsed.quiet:
        sys.stderr.write(f"{text}\n")
