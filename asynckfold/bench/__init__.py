"""Measurements of asynckfold on the machine at hand: each subject returns one table.

A speed is a ratio of two things that were timed in one run, turn by turn, and the median of several
turns; nothing here asserts a speed.
"""

from asynckfold.bench.checkpoints import checkpoint_table
from asynckfold.bench.formats import format_table
from asynckfold.bench.fusion import fusion_table
from asynckfold.bench.nodes import QUICK as QUICK_NODES
from asynckfold.bench.nodes import nodes_table
from asynckfold.bench.packing import QUICK as QUICK_PACKING
from asynckfold.bench.packing import packing_table
from asynckfold.bench.place import place_table
from asynckfold.bench.speed import QUICK, speed_table
from asynckfold.bench.table import BenchTable
from asynckfold.bench.trainers import trainers_table
from asynckfold.bench.use import use_table

__all__ = [
    "QUICK",
    "QUICK_NODES",
    "QUICK_PACKING",
    "BenchTable",
    "checkpoint_table",
    "format_table",
    "fusion_table",
    "nodes_table",
    "packing_table",
    "place_table",
    "speed_table",
    "trainers_table",
    "use_table",
]
