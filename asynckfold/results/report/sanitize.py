"""Make text of users and their code safe to show: no control characters, capped, no surrogates.

Applied where text leaves: by the page, its figures, results.json and the tables.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from asynckfold.jobs.placement import Wait
from asynckfold.system.plain_text import plain

LIMIT = 64 * 1024


def clean(value: object, limit: int = LIMIT) -> str:
    """Return text without control characters, capped, with the home folder as ``~``.

    >>> clean("a\\x1b[31mred\\x00")
    'ared\ufffd'
    >>> clean("x" * 9, limit=4)
    'xxxx… (5 more)'
    """
    text = plain(str(value))
    if "/" in text and len(home := _home()) > 1 and home in text:
        text = re.sub(re.escape(home) + r"(?![\w.-])", "~", text)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more)"


@cache
def _home() -> str:
    return os.path.expanduser("~")  # noqa: PTH111


def plain_data(value: Any, text: Callable[[object], str] = str) -> Any:
    """Return dataclasses and mappings as plain data for JSON: NaN and infinities become None.

    `text` makes text safe to show.
    """
    kind: Any = type(value)
    if isinstance(value, (tuple, list)):
        # Most values are numbers in rows, which are copied whole.
        kinds = {*map(type, value)}
        if kinds == {int} or (kinds == {float} and all(map(math.isfinite, value))):
            return [*value]
        return [plain_data(item, text) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Wait, str)):
        return text(value)
    if names := _fields_of(kind):
        return {name: plain_data(getattr(value, name), text) for name in names}
    if isinstance(value, Mapping):
        return {text(key): plain_data(item, text) for key, item in value.items()}
    return value


@cache
def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind)) if is_dataclass(kind) else ()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as one level: ``{"versions": {"torch": …}}`` → ``versions.torch``."""
    level: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            level |= flat(value, f"{name}.")
        else:
            level[name] = _joined(value)
    return level


def _joined(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
