"""A cache of measured costs for later runs on this machine: one small file per model and batch.

It is in ``$XDG_CACHE_HOME/asynckfold`` or ``~/.cache/asynckfold``. Missing or damaged entries are
measured again. It holds numbers only; nothing in it names code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asynckfold.errors import StorageError
from asynckfold.jobs.cost import Cost
from asynckfold.system.files import make_folder, write_whole

MOST_BYTES = 100_000
"""A larger file is not an entry."""


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything that timings depend on: plain data, in any order.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the cache folder; None without a home.

    >>> folder({"XDG_CACHE_HOME": "/fast"})
    PosixPath('/fast/asynckfold')
    """
    environ = os.environ if environ is None else environ
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        # The XDG Base Directory Specification says to ignore relative paths.
        return given / "asynckfold"
    home = environ.get("HOME", "")
    return Path(home, ".cache", "asynckfold") if Path(home).is_absolute() else None


def recall(key: str, place: Path | None) -> Cost | None:
    """Return the cached cost, or None if there is none that can be read."""
    if place is None:
        return None
    try:
        with _path(key, place).open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        raw: Any = json.loads(text) if len(text) <= MOST_BYTES else {}
        return Cost.from_dict(raw["cost"]) if raw["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def remember(key: str, cost: Cost, place: Path | None) -> Cost:
    """Store a cost and return the stored one: what another run wrote first stays.

    So runs that probe at the same time decide by the same numbers.
    """
    found = recall(key, place)
    if found is not None or place is None:
        return found or cost
    text = json.dumps({"key": key, "cost": cost.to_dict()})
    # A full or read-only home only costs the next run a probe.
    with contextlib.suppress(OSError, StorageError):
        make_folder(place)
        write_whole(_path(key, place), text.encode())
    return recall(key, place) or cost


def _path(key: str, place: Path) -> Path:
    return place / f"{key}.json"
