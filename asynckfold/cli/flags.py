"""Flags, derived from the declarations of arguments: their help, how they read, what they set.

::

    Settings, TrainerParams, Named ── flags ──┬─ add_flags        parser and help
      (declared with `argument`)              ├─ flag_values       flags → arguments
                                              └─ with_flag_names   arguments in messages → flags
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, Literal

from asynckfold.errors import InputError, Problem, nearest
from asynckfold.jobs.argument import Argument, argument, arguments
from asynckfold.jobs.candidate_names import Value
from asynckfold.jobs.candidate_names import value_of as value_of_text
from asynckfold.jobs.trainer_params import TrainerParams

_YES_NO = {"True": "yes", "False": "no"}
"""Words of the command line for the values of a flag that takes others, too."""


def params_of_text(text: str) -> dict[str, list[Value]]:
    """Read the values of parameters.

    >>> params_of_text("lr=1e-3,.01,width=16")
    {'lr': [0.001, 0.01], 'width': [16]}
    """
    values: dict[str, list[Value]] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.rpartition("="))
        if equals and name in values:
            raise ValueError(f"must name {name} once")
        if not equals and not values:
            raise ValueError("must be a name and values, such as lr=1e-3,1e-2")
        values.setdefault(name if equals else list(values)[-1], []).append(_typed(value))
    return values


def _typed(text: str) -> Value:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return value_of_text(text)


class _MergeNames(argparse.Action):
    """Adds the names of each repetition of a flag to those of the earlier ones."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if values is not None:
            known = getattr(namespace, self.dest) or {}
            setattr(namespace, self.dest, {**known, **values})


@dataclass(frozen=True, kw_only=True)
class NamedObjects:
    """Arguments of the command line only: names of what Python code passes as objects.

    Parameters
    ----------
    data : str
        Samples: digits, mnist, fashion-mnist, kmnist, cifar10, folder:PATH (one folder per class),
        csv:PATH, or npz:PATH (X, y).
    data_root : str
        Folder of torchvision's data sets.
    download : bool
        Let torchvision download missing files.
    target : str
        Column of the labels in a csv file, by name or position (default: the last).
    header : {"auto", "yes", "no"}
        Whether the first row of a csv file names columns.
    drop : str
        Columns of a csv or npz file to leave out: names or positions between commas.
    keep : str
        Columns of a csv or npz file to use although they seem to number or identify the rows.
    category : str
        Columns of a csv or npz file to treat as categories, one feature per category, even if they
        hold numbers.
    groups : str
        Column of a csv or npz file that names groups of rows, such as patients. No group is divided
        between folds.
    fold_column : str
        Column of a csv or npz file each of whose values is a fold.
    limit : int
        Use N samples only, with balanced classes.
    criterion : str
        Loss: CrossEntropyLoss or MultiMarginLoss for classes (default: the first); MSELoss, L1Loss,
        SmoothL1Loss, HuberLoss or PoissonNLLLoss for numbers, which ``--task regression`` asks for.
    augment : bool
        Crop and flip training images at random.
    models : str
        Models: mlp, dbn, lenet, lenet5, alexnet, mobilenet, vgg11, vgg13, vgg16, vgg19, or
        pkg.mod:Name.
    schedulers : str
        LR schedules: constant, cosine, exponential, multistep, onecycle, reduce, step, warm.
    optimizer : str
        Optimizer: adam, adamw, sgd, rmsprop, adagrad, adadelta, nadam, radam, adamax, or rprop,
        which needs ``--batch-size full``.
    lr : float
        Learning rate.
    momentum : float
        Momentum of sgd and rmsprop.
    weight_decay : float
        L2 penalty of the weights.
    param : Mapping
        Values of parameters of models, optimizer or LR schedules, such as ``lr=1e-3,1e-2``; each
        combination is a candidate. May be repeated.
    """

    data: str | None = argument(None, group="data", metavar="SOURCE", is_common=True)
    data_root: str = argument("data", group="data", metavar="DIR")
    download: bool = argument(False, group="data")
    target: str | None = argument(None, group="data", metavar="COLUMN")
    header: Literal["auto", "yes", "no"] = argument("auto", group="data")
    drop: str | None = argument(None, group="data", metavar="COLUMNS")
    keep: str | None = argument(None, group="data", metavar="COLUMNS")
    category: str | None = argument(None, group="data", metavar="COLUMNS")
    groups: str | None = argument(None, group="data", metavar="COLUMN")
    fold_column: str | None = argument(None, group="data", metavar="COLUMN")
    limit: int | None = argument(None, group="data", none="")
    augment: bool = argument(False, group="data")
    criterion: str | None = argument(None, group="candidates", metavar="NAME", none="")
    models: str = argument("mlp", group="candidates", metavar="A,B", is_common=True)
    schedulers: str = argument("constant", group="candidates", metavar="A,B", is_common=True)
    optimizer: str = argument("adam", group="candidates", metavar="NAME", is_common=True)
    lr: float = argument(1e-3, group="candidates", is_common=True)
    momentum: float = argument(0.0, group="candidates")
    weight_decay: float = argument(0.0, group="candidates")
    param: Mapping[str, Sequence[Value]] | None = argument(
        None, group="candidates", metavar="NAME=A,B", reads=params_of_text, none=""
    )


@cache
def flags() -> dict[str, Argument]:
    """Return the arguments that have a flag, by the name of its value in the parsed line."""
    # Takes NumPy and more, which verbs without these flags do without.
    from asynckfold.api.arguments import Settings

    by_dest: dict[str, Argument] = {}
    # Trainer parameters that `Settings` repeats are set there.
    for declaration in (NamedObjects, TrainerParams, Settings):
        for item in arguments(declaration).values():
            if item.flag:
                dest = item.name if item.default is True else item.flag.replace("-", "_")
                by_dest.setdefault(dest, item)
    return by_dest


def with_defaults(parsed: argparse.Namespace) -> argparse.Namespace:
    """Return the parsed line with the default of each flag that was left out."""
    defaults = {dest: item.shell_default for dest, item in flags().items()}
    words = {name: value for name, value in vars(parsed).items() if value is not None}
    shown = {dest: None if value is MISSING else value for dest, value in defaults.items()}
    return argparse.Namespace(**{**dict.fromkeys(vars(parsed)), **shown, **words})


def flag_values(parsed: argparse.Namespace, declaration: type) -> dict[str, Any]:
    """Return the arguments of a declaration that were set by a flag, by name."""
    declared = arguments(declaration)
    values = {
        item.name: (getattr(parsed, dest, None), _none(item))
        for dest, item in flags().items()
        if declared.get(item.name) is item
    }
    return {
        name: None if value == none else value
        for name, (value, none) in values.items()
        if value is not None
    }


def flag_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `AsyncKFold` that were set by a flag, except the run's folder."""
    from asynckfold.api.arguments import Settings

    values = flag_values(parsed, Settings)
    values.pop("root_dir", None)
    return values


def _none(item: Argument) -> str | None:
    """Return the word for None on the command line, if there is one."""
    return item.none or None if NoneType in item.types and str not in item.types else None


def reading(item: Argument, problems: list[Problem]) -> dict[str, Any]:
    """Return how argparse reads a flag; what it cannot read becomes one of the problems."""
    if item.is_switch:
        return {"action": "store_false" if item.default is True else "store_true"}

    def read(text: str) -> Any:
        try:
            return item.read(text)
        except ValueError as error:
            problems.append(_unreadable(item, text, str(error)))
            return None

    merged = {"action": _MergeNames} if item.reads is params_of_text else {}
    return {"type": read, "metavar": _metavar(item), **merged}


def _unreadable(item: Argument, text: str, rule: str) -> Problem:
    """Return the problem of a value that cannot be read; `rule` says what the flag takes."""
    default, words = item.shell_default, {**_YES_NO, "None": _none(item) or ""}
    rule = re.sub(r"\b(True|False|None)\b", lambda name: words[name[1]], rule)
    remedy = nearest(text, item.words).strip() or f"Leave --{item.flag} out" + (
        "." if default in (None, MISSING) else f" for its default, {default}."
    )
    if "," in text and item.group == "candidates" and rule == "must be a number":
        remedy = f"Pass --param {item.name}={text} to compare these values."
    return Problem(f"--{item.flag} {rule}", repr(text), remedy)


def text_of(item: Argument, value: Any) -> str | None:
    """Return a value of Python as the text of its flag; None where it means that none is given.

    Examples
    --------
    >>> text_of(flags()["param"], {"lr": [0.1, 0.2], "width": 16}), text_of(flags()["fuse"], False)
    ('lr=0.1,0.2,width=16', 'no')
    """
    if value is None:
        return _none(item)
    if isinstance(value, bool):
        return _YES_NO[str(value)]
    if isinstance(value, Mapping):
        return ",".join(f"{key}={text_of(item, part)}" for key, part in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _metavar(item: Argument) -> str:
    """Return a placeholder that names the words that a flag takes: ``"N|auto"``."""
    if item.metavar or item.reads:
        return item.metavar or "N"
    if item.words and all(kind is NoneType for kind in item.types[1:]):
        return f"{{{','.join(filter(None, [*item.words, _none(item)]))}}}"
    kinds = {int: "N", float: "S" if item.unit == "seconds" else "X", bool: "yes|no"}
    shown = [kinds[kind] for kind in item.types if kind in kinds]
    listed = ["N,N"] if item.takes_lists else []
    return "|".join([*shown, *item.words, *listed, *filter(None, [_none(item)])])


def help_of(item: Argument) -> str:
    """Return the help of a flag: one sentence, the trainers that it is for, its default.

    Examples
    --------
    >>> help_of(flags()["steps_per_round"])
    'averaging: steps of each process between two averages (default 16)'
    """
    spelled = {one.name: f"--{one.flag}" for one in flags().values()}
    text = re.sub(r"`+(\w+)`+", lambda name: spelled.get(name[1], name[1]), item.sentence)
    text = re.sub(r"[`\"]", "", text)
    if text[1:2].islower():
        text = text[0].lower() + text[1:]
    if item.default is True:
        text = f"do not {text}"
    if item.trainers:
        text = f"{', '.join(item.trainers)}: {text}"
    default = _none(item) if item.shell_default is None else item.shell_default
    if default is None or default is MISSING or isinstance(default, bool):
        return text
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{text} (default {shown})"


def with_flag_names(error: InputError) -> InputError:
    """Return the same problems with flags in place of the names of arguments.

    Examples
    --------
    >>> problem = Problem("n_jobs must not be 0", "0", "Pass n_jobs='auto'.")
    >>> print(with_flag_names(InputError([problem])))
    --n-jobs must not be 0: received 0. Pass --n-jobs auto.
    """
    pairs = ((item, _flagged(item.rule), _flagged(item.remedy)) for item in error.problems)
    return type(error)([replace(item, rule=rule, remedy=remedy) for item, rule, remedy in pairs])


def _flagged(text: str) -> str:
    from asynckfold.api.arguments import Settings

    passed = {*arguments(TrainerParams), *arguments(Settings)}
    known = {item.name: item for item in flags().values() if item.name in passed}
    names = "|".join(known)
    for name, item in known.items():
        if name in text and (none := _none(item)):
            text = re.sub(r"\bNone\b", none, text)
        if item.is_switch:
            text = text.replace(f"{name}={not item.default}", f"--{item.flag}")
    text = re.sub(
        rf"\b({names})=('?)([^\s',;]*[^\s',;.])\2",
        lambda match: f"--{known[match[1]].flag} {_YES_NO.get(match[3], match[3])}",
        text,
    )
    # Only at the start of a rule, or with an underscore: "epochs" may just mean epochs.
    return re.sub(
        rf"(?<![-\w])(^(?:{names})|\w*_\w*|kfolds|(?<=Leave )\w+)\b",
        lambda match: f"--{known[match[1]].flag}" if match[1] in known else match[1],
        text,
    )


def imports_user_code(parsed: argparse.Namespace) -> bool:
    """Whether the command imports code of the user: a sweep file, or pkg.mod:Name."""
    file, models = (getattr(parsed, name, None) for name in ("file", "models"))
    return bool(file) or ":" in (models or "")
