"""Names of candidates: of a model, an LR schedule, and the values that a grid gives them.

::

    model "net/width=64"  LR schedule "cosine/lr=0.01"  ──►  candidate "net/cosine/lr=0.01,width=64"

Names that users give hold no slash, so what stands before the first one is such a name, whatever
it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

Value = bool | int | float | str | None

_WORDS: dict[str, Value] = {"None": None, "True": True, "False": False}
_WHOLE = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
_QUOTED = re.compile(r"[%/\\,=\x00-\x1f\x7f]")


def text_of(value: Value) -> str:
    """Return a value as text that `value_of` reads.

    >>> text_of(1e-3), text_of("a/b"), text_of(None)
    ('0.001', 'a%2Fb', 'None')
    """
    return _QUOTED.sub(lambda match: f"%{ord(match[0]):02X}", str(value))


def value_of(text: str) -> Value:
    """Return the value of a text; what is no number and no constant is a string.

    >>> value_of("0.001"), value_of("64"), value_of("a%2Fb"), value_of("None")
    (0.001, 64, 'a/b', None)
    """
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text):
        return int(text) if len(text) < 20 else text
    if _NUMBER.fullmatch(text):
        return float(text)
    return re.sub(r"%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), text)


def with_values(name: str, values: Mapping[str, Value]) -> str:
    """Return the name of a model or an LR schedule with values of a grid.

    >>> with_values("net", {"width": 64, "depth": 2}), with_values("net", {})
    ('net/depth=2,width=64', 'net')
    """
    return f"{name}/{_joined(values)}" if values else name


def base_of(name: str) -> str:
    """Return the name that the user gave.

    >>> base_of("net/depth=2,width=64"), base_of("dropout=0.1")
    ('net', 'dropout=0.1')
    """
    return name.partition("/")[0]


@lru_cache(maxsize=4096)
def values_of(*names: str) -> Mapping[str, Value]:
    """Return the values that names hold, sorted by parameter.

    >>> values_of("net/width=64", "cosine/lr=0.01")
    {'lr': 0.01, 'width': 64}
    """
    pairs = [
        pair.partition("=") for name in names for pair in name.partition("/")[2].split(",") if pair
    ]
    return {parameter: value_of(text) for parameter, _, text in sorted(pairs)}


@lru_cache(maxsize=4096)
def candidate_name(model: str, lr_schedule: str) -> str:
    """Return the name of a candidate.

    >>> candidate_name("net", "cosine")
    'net/cosine'
    >>> candidate_name("net/width=64", "cosine/lr=0.01")
    'net/cosine/lr=0.01,width=64'
    """
    joined = _joined(values_of(model, lr_schedule))
    return f"{base_of(model)}/{base_of(lr_schedule)}" + (f"/{joined}" if joined else "")


def params_of(model: str, lr_schedule: str) -> dict[str, Value]:
    """Return what makes a candidate, as ``best_params_`` shows it.

    >>> params_of("net", "cosine/lr=0.01")
    {'model': 'net', 'scheduler': 'cosine', 'lr': 0.01}
    """
    given = values_of(model, lr_schedule)
    return {"model": base_of(model), "scheduler": base_of(lr_schedule), **given}


def _joined(values: Mapping[str, Value]) -> str:
    return ",".join(f"{name}={text_of(values[name])}" for name in sorted(values))
