"""Measurements of asynckfold on the machine at hand: each subject returns one table.

::

    measure(subject) ─► bench/SUBJECT.py: table(**settings) ─► BenchTable ─► terminal, JSON, page

A speed is the ratio of two things timed in one run, turn by turn, as the median of several turns;
nothing here asserts a speed.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckfold.cli.bench.table import BenchTable

_SETTINGS = {
    "checkpoints": (),
    "crowd": (),
    "formats": (),
    "fusion": (),
    "nodes": ("data", "tell"),
    "packing": ("tell",),
    "place": (),
    "speed": ("data", "with_peers", "tell"),
    "trainers": ("data", "tell"),
    "use": (),
}
"""Subjects, and the settings of the command line that each takes."""


def measure(subject: str, *, quick: bool = False, **settings: Any) -> BenchTable:
    """Run one benchmark, in seconds and roughly with `quick`.

    Each subject takes those of the settings ``data``, ``with_peers`` and ``tell`` that it knows.
    """
    from asynckfold.cli.bench.table import machine_facts

    module = importlib.import_module(f"{__name__}.{subject}")
    known = {name: settings[name] for name in _SETTINGS[subject] if name in settings}
    table: BenchTable = module.table(**(module.QUICK if quick else {}), **known)
    return replace(table, machine=machine_facts())
