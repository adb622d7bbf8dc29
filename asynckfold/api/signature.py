"""Calls with arguments that do not fit, refused with the name that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from asynckfold.errors import SignatureError, nearest
from asynckfold.jobs.argument import arguments
from asynckfold.jobs.trainer_params import TrainerParams

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

OTHER_NAMES = {
    **dict.fromkeys(("root", "out", "output_dir", "default_root_dir", "path"), "root_dir"),
    **dict.fromkeys(("seed", "random_seed"), "random_state"),
    **dict.fromkeys(("k", "folds", "num_folds"), "kfolds"),
    **dict.fromkeys(("data", "X", "train_data", "train_dataset"), "dataset"),
    **dict.fromkeys(("loss", "loss_fn", "criterion_fn"), "criterion"),
    **dict.fromkeys(("metric", "metrics", "scorer"), "scoring"),
    **dict.fromkeys(("device", "gpus", "accelerator"), "devices"),
    **dict.fromkeys(("workers", "max_workers", "num_workers", "jobs"), "n_jobs"),
    **dict.fromkeys(("timeout", "time_limit"), "time_budget_s"),
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("amp", "dtype"), "precision"),
}
"""What other libraries call our arguments."""

OF_OPTIMIZER = ("optimizer", "optim", "lr", "learning_rate", "momentum", "weight_decay")
"""Arguments of other libraries that `opt_fn` stands for."""


ANCESTOR_NAMES = {"train_dataset": "dataset", "get_optimizer": "opt_fn"}
"""What the project that this one grew out of calls two arguments; its scripts may pass them."""


def renamed(kwargs: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return keyword arguments under our names, where the call has not used these itself.

    >>> renamed({"get_optimizer": 1, "models": 2}, ["models", "opt_fn"])
    {'opt_fn': 1, 'models': 2}
    """
    ours = {
        name: ANCESTOR_NAMES[name]
        for name in kwargs
        if ANCESTOR_NAMES.get(name) in {*known} - {*kwargs}
    }
    return {ours.get(name, name): value for name, value in kwargs.items()}


def check_call(
    called: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    more: Iterable[str] = (),
) -> None:
    """Raise `SignatureError` if arguments do not fit; `more` are names that ``**kwargs`` takes."""
    known = {*signature.parameters, *more}
    for name in kwargs:
        if name not in known:
            hint = _hint(name, known)
            raise SignatureError(f"{called} got an unexpected keyword argument {name!r}.{hint}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise SignatureError(f"{called}: {error}") from None


def _hint(name: str, known: Iterable[str]) -> str:
    """Say where an argument belongs, or what it is called here.

    >>> _hint("seed", ["random_state"]), _hint("n_job", ["n_jobs"])
    (" It is called 'random_state' here.", " Did you mean 'n_jobs'?")
    """
    right = OTHER_NAMES.get(name, name)
    if right in known:
        return f" It is called {right!r} here."
    if right in arguments(TrainerParams):
        return f" It is a key of trainer_params: {{{right!r}: ...}}."
    if name in OF_OPTIMIZER:
        return " opt_fn, an argument of the call, makes the optimizer of a model."
    return nearest(name, known)


def checked(
    called: str, settings: Callable[..., Any] | None = None
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Check each call of a function; its ``**kwargs`` are arguments of `settings`.

    >>> @checked("half")
    ... def half(number):
    ...     return number / 2
    >>> half()
    Traceback (most recent call last):
    asynckfold.errors.SignatureError: half: missing a required argument: 'number'
    """

    def decorated(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        signature = inspect.signature(function)
        more = () if settings is None else tuple(inspect.signature(settings).parameters)

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            names: Any = renamed(kwargs, signature.parameters)
            check_call(called, signature, args, names, more)
            return function(*args, **names)

        return call

    return decorated
