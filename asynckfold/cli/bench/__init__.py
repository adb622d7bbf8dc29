"""Measurements of asynckfold on the machine at hand: each subject returns one table.

A speed is a ratio of two things that were timed in one run, turn by turn, and the median of several
turns; nothing here asserts a speed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckfold.cli.bench.checkpoints import checkpoint_table
    from asynckfold.cli.bench.crowd import crowd_table
    from asynckfold.cli.bench.formats import format_table
    from asynckfold.cli.bench.fusion import fusion_table
    from asynckfold.cli.bench.nodes import QUICK as QUICK_NODES
    from asynckfold.cli.bench.nodes import nodes_table
    from asynckfold.cli.bench.packing import QUICK as QUICK_PACKING
    from asynckfold.cli.bench.packing import packing_table
    from asynckfold.cli.bench.place import place_table
    from asynckfold.cli.bench.speed import QUICK, speed_table
    from asynckfold.cli.bench.table import BenchTable
    from asynckfold.cli.bench.trainers import trainers_table
    from asynckfold.cli.bench.use import use_table

__all__ = [
    "QUICK",
    "QUICK_NODES",
    "QUICK_PACKING",
    "BenchTable",
    "checkpoint_table",
    "crowd_table",
    "format_table",
    "fusion_table",
    "nodes_table",
    "packing_table",
    "place_table",
    "speed_table",
    "trainers_table",
    "use_table",
]

_PLACES = {
    "QUICK": ("speed", "QUICK"),
    "QUICK_NODES": ("nodes", "QUICK"),
    "QUICK_PACKING": ("packing", "QUICK"),
    "BenchTable": ("table", "BenchTable"),
    "checkpoint_table": ("checkpoints", "checkpoint_table"),
    "crowd_table": ("crowd", "crowd_table"),
    "format_table": ("formats", "format_table"),
    "fusion_table": ("fusion", "fusion_table"),
    "nodes_table": ("nodes", "nodes_table"),
    "packing_table": ("packing", "packing_table"),
    "place_table": ("place", "place_table"),
    "speed_table": ("speed", "speed_table"),
    "trainers_table": ("trainers", "trainers_table"),
    "use_table": ("use", "use_table"),
}
"""Room and name, imported on use: workers that train what one subject made need no other."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, own = _PLACES[name]
    return getattr(importlib.import_module(f"{__name__}.{room}"), own)
