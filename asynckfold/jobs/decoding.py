"""Records as JSON text and back, checked by the annotations of their dataclasses.

One codec for plan, results and all else in ``run.db``. JSON of the standard library keeps NaN and
infinity, and the text can be read with any tool; msgspec checks the types.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

FAULTS = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Exceptions that unexpected data raise in code that does not check it."""

Kind = TypeVar("Kind")


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector, which looks through millions of new values in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def encoded(value: Any, *, is_sorted: bool = False) -> str:
    """Return a record as JSON; numbers of NumPy become plain ones.

    >>> encoded({"loss": float("nan"), "sizes": (1, 2)})
    '{"loss":NaN,"sizes":[1,2]}'
    """
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
    return json.dumps(plain, separators=(",", ":"), sort_keys=is_sorted)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    kinds: tuple[Any, ...] = (str, int, float, list, tuple)
    for kind in kinds:
        if isinstance(value, kind):  # of a subclass, such as torch's version
            return kind(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a record cannot hold {type(value).__name__}")


def parsed(text: object) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none."""
    if not isinstance(text, str):
        raise ValueError(f"JSON is text, not {type(text).__name__}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def decoded(kind: type[Kind], raw: Any, name: str = "value") -> Kind:
    """Return JSON data as an annotated type.

    Parameters
    ----------
    kind : type
        Any nesting of dataclasses, mappings, sequences and plain types.
    raw : object
        From `parsed`.
    name : str
        The name of the value in errors.

    Raises
    ------
    ValueError
        Names the first value that does not fit, or is unknown.

    Examples
    --------
    >>> decoded(tuple[int, ...], [1, 2])
    (1, 2)
    >>> decoded(dict[str, float], {"a": "x"}, "scores")
    Traceback (most recent call last):
    ValueError: scores: Expected `float`, got `str` - at `$[...]`
    """
    try:
        value: Kind = msgspec.convert(raw, kind, str_keys=True)
        unknown = _unknown([raw], [msgspec.to_builtins(value, str_keys=True)])
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None
    if unknown:
        raise ValueError(f"{name} has no {unknown[:60]!r}")
    return value


def _unknown(raw: Any, known: Any) -> str:
    """Return the first key of a JSON object or list that no field took, or ``""``."""
    if isinstance(raw, dict):
        if not raw.keys() <= known.keys():
            return str(next(key for key in raw if key not in known))
        raw, known = raw.values(), map(known.get, raw)
    for item, other in zip(raw, known, strict=False):
        # Not into rows of numbers, which most lists are.
        is_nested = type(item) is list and not _NESTED.isdisjoint(map(type, item))
        if (is_nested or type(item) is dict) and (unknown := _unknown(item, other)):
            return unknown
    return ""


_NESTED = {dict, list}
