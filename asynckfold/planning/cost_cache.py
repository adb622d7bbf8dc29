"""What probes found, kept for later runs on this machine: one small file for each model and batch.

``$XDG_CACHE_HOME/asynckfold`` (or ``~/.cache/asynckfold``) is a convenience: what is missing,
damaged or cannot be written is measured again. It holds numbers only; nothing in it names code.
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
"""A larger file is none of ours."""


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything that seconds depend on: plain data, in any order.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return where costs are kept; None where there is no home.

    >>> folder({"XDG_CACHE_HOME": "/fast"})
    PosixPath('/fast/asynckfold')
    """
    environ = os.environ if environ is None else environ
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        # As the XDG Base Directory Specification says: a relative path is ignored.
        return given / "asynckfold"
    home = environ.get("HOME", "")
    return Path(home, ".cache", "asynckfold") if Path(home).is_absolute() else None


def recall(key: str, place: Path | None) -> Cost | None:
    """Return the cost that was kept under `key`, or None where there is none that can be read."""
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
    """Keep a cost, and return what is kept: what another run wrote first stays.

    So that runs that probe at the same time decide by the same numbers.
    """
    found = recall(key, place)
    if found is not None or place is None:
        return found or cost
    text = json.dumps({"key": key, "cost": cost.to_dict()})
    # A home that is full or read-only costs the next run a probe, and nothing else.
    with contextlib.suppress(OSError, StorageError):
        make_folder(place)
        write_whole(_path(key, place), text.encode())
    return recall(key, place) or cost


def _path(key: str, place: Path) -> Path:
    return place / f"{key}.json"
