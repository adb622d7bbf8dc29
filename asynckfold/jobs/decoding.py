"""Decode plain data from a file that others may have written.

JSON has no types, and a run's folder may come from anywhere. What does not fit the annotation of
its field is refused here, once.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

MOST_BYTES = 1 << 28
"""Of one JSON text; a plan of 100,000 jobs has 12 MB."""

MOST_DEPTH = 32

LARGEST = 1 << 63

FAULTS = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What comes of data that are not what they should be, where they are not decoded here."""

Kind = TypeVar("Kind")


def parsed(text: object) -> Any:
    """Parse JSON text; raise ValueError where it is invalid, too long, or nested too deeply."""
    if not isinstance(text, str):
        raise ValueError(f"JSON is text, not {type(text).__name__}")
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} characters of JSON, more than {MOST_BYTES}")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if _depth(found) > MOST_DEPTH:
        raise ValueError(f"JSON is nested more than {MOST_DEPTH} deep")
    return found


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= MOST_DEPTH:
        depth += 1
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
    return depth


def decoded(kind: type[Kind], raw: Any, name: str = "value") -> Kind:
    """Convert plain data to an annotated type; raise ValueError for the first misfit.

    Knows dataclasses, ``Mapping``, ``tuple``, ``Sequence``, ``list``, unions, ``int``, ``float``,
    ``str``, ``bool``, ``None`` and ``Any``, nested. `name` is used in errors.

    >>> decoded(tuple[int, ...], [1, 2])
    (1, 2)
    >>> decoded(dict[str, float], {"a": "x"}, "scores")
    Traceback (most recent call last):
    ValueError: scores.a must be a number, not str
    """
    found: Kind = _decoded(kind, raw, name)
    return found


def _decoded(kind: Any, raw: Any, name: str) -> Any:
    if kind is Any:
        return raw
    if kind in _PLAIN:
        return _plain(kind, raw, name)
    if is_dataclass(kind):
        return _record(kind, raw, name)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner, raw, name)
    if origin in (dict, Mapping):
        return _mapping(inner, raw, name)
    if origin in (tuple, list, Sequence):
        return _sequence(origin, inner, raw, name)
    raise TypeError(f"{name}: no rule for {kind}")


_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _plain(kind: type, raw: Any, name: str) -> Any:
    fits = (int, float) if kind is float else kind
    # For Python, true is a number.
    if not isinstance(raw, fits) or (isinstance(raw, bool) and kind is not bool):
        raise ValueError(f"{name} must be {_PLAIN[kind]}, not {type(raw).__name__}")
    if isinstance(raw, int) and abs(raw) >= LARGEST:
        raise ValueError(f"{name} is too large a number")
    return raw  # unchanged, since fingerprints are taken over its text


def _record(kind: Any, raw: Any, name: str) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{name} must be an object, not {type(raw).__name__}")
    hints, known = _hints(kind), {item.name: item for item in fields(kind) if item.init}
    for key in raw:
        if key not in known:
            raise ValueError(f"{name} has no {str(key)[:60]!r}")
    for key, item in known.items():
        is_optional = item.default is not MISSING or item.default_factory is not MISSING
        if key not in raw and not is_optional:
            raise ValueError(f"{name} lacks {key}")
    return kind(**{key: _decoded(hints[key], raw[key], f"{name}.{key}") for key in raw})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _one_of(kinds: Sequence[Any], raw: Any, name: str) -> Any:
    if raw is None and type(None) in kinds:
        return None
    given = [kind for kind in kinds if kind is not type(None)]
    for kind in given[:-1]:
        try:
            return _decoded(kind, raw, name)
        except ValueError:
            continue
    return _decoded(given[-1], raw, name)


def _mapping(inner: Sequence[Any], raw: Any, name: str) -> dict[Any, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{name} must be an object, not {type(raw).__name__}")
    key_kind, value_kind = inner
    return {
        _key(key_kind, key, name): _decoded(value_kind, value, f"{name}.{str(key)[:60]}")
        for key, value in raw.items()
    }


def _key(kind: Any, key: str, name: str) -> Any:
    """Convert a key, which JSON stores as text."""
    if kind is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"{name} has a key that is no whole number") from None


def _sequence(origin: Any, inner: Sequence[Any], raw: Any, name: str) -> Any:
    if not isinstance(raw, (list, tuple)):
        raise ValueError(f"{name} must be a list, not {type(raw).__name__}")
    made = list if origin is list else tuple
    if origin is tuple and inner[-1] is not Ellipsis:
        if len(raw) != len(inner):
            raise ValueError(f"{name} must have {len(inner)} parts, not {len(raw)}")
        return made(_decoded(kind, item, name) for kind, item in zip(inner, raw, strict=True))
    return made(_decoded(inner[0], item, f"{name}[{at}]") for at, item in enumerate(raw))


def within(value: float, low: float, high: float, name: str) -> float:
    """Return a number; raise ValueError where it is out of range."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low:g} to {high:g}, not {value:g}")
    return value


def finite(values: Mapping[str, float], low: float = -1e12, high: float = 1e12) -> None:
    """Raise ValueError where a named number is NaN, infinite, or out of range."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number")
        within(value, low, high, name)
