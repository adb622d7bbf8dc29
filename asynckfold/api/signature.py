"""Calls with arguments that do not fit, refused with the name that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from asynckfold.errors import SignatureError, nearest

Given = ParamSpec("Given")
Made = TypeVar("Made")


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
            guess = nearest(name, known)
            raise SignatureError(f"{called} got an unexpected keyword argument {name!r}.{guess}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise SignatureError(f"{called}: {error}") from None


def checked(
    called: str, settings: Callable[..., Any] | None = None
) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Check each call of a function; its ``**kwargs`` are arguments of `settings`.

    >>> @checked("half")
    ... def half(number):
    ...     return number / 2
    >>> half()
    Traceback (most recent call last):
    asynckfold.errors.SignatureError: half: missing a required argument: 'number'
    """

    def decorated(function: Callable[Given, Made]) -> Callable[Given, Made]:
        signature = inspect.signature(function)
        more = () if settings is None else tuple(inspect.signature(settings).parameters)

        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Made:
            check_call(called, signature, args, kwargs, more)
            return function(*args, **kwargs)

        return call

    return decorated
