"""The verb ``bench``: measure asynckfold on this machine; each subject returns one table.

::

    bench ─► measure(subject) ─► SUBJECT.py: table(**settings) ─► BenchTable ─► terminal, JSON, page

A speed is the ratio of two things timed in one run, turn by turn, as the median of several turns;
nothing here asserts a speed.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.cli.output import Output
from asynckfold.errors import Problem, nearest, refuse
from asynckfold.system.files import write_whole

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


def bench(parsed: argparse.Namespace, out: Output) -> int:
    """Measure one subject and print its table."""
    from rich.table import Table

    refuse([*parsed.problems, *_problems(parsed)])
    data = Path(parsed.data) if parsed.data else None
    settings = {"data": data, "with_peers": parsed.peers, "tell": out.error}
    table = measure(parsed.subject, quick=parsed.quick, **settings)
    out.data(table.to_json())
    shown = Table(*table.columns, title=table.title, box=None, pad_edge=False)
    for row in table.cells():
        shown.add_row(*row)
    out.say(shown)
    for note in table.notes:
        out.say(note)
    if parsed.save:
        write_whole(Path(parsed.save), table.to_markdown(_command(parsed)).encode())
        out.say(f"page: {parsed.save}")
    return 0


def _command(parsed: argparse.Namespace) -> str:
    """Return the command for a page, without paths of this machine."""
    words = ["asynckfold", "dev", "bench", parsed.subject]
    for flag, is_set in (("--quick", parsed.quick), ("--peers", parsed.peers)):
        words += [flag] * bool(is_set)
    return shlex.join([*words, *(["--data", "DIR"] if parsed.data else [])])


def _problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    if parsed.subject not in _SETTINGS:
        rule = f"SUBJECT must be one of {', '.join(_SETTINGS)}"
        guess = nearest(parsed.subject, _SETTINGS).strip()
        yield Problem(
            rule, repr(parsed.subject), guess or "`asynckfold dev bench --help` explains them."
        )
        return
    for flag, value, setting in (
        ("--data", parsed.data, "data"),
        ("--peers", parsed.peers, "with_peers"),
    ):
        if value and setting not in _SETTINGS[parsed.subject]:
            only = ", ".join(name for name, known in _SETTINGS.items() if setting in known)
            yield Problem(f"{flag} applies to {only} only", f"bench {parsed.subject}", "Drop it.")


def measure(subject: str, *, quick: bool = False, **settings: Any) -> BenchTable:
    """Run one benchmark, in seconds and roughly with `quick`.

    Each subject takes those of the settings ``data``, ``with_peers`` and ``tell`` that it knows.
    """
    from asynckfold.cli.bench.table import machine_facts

    module = importlib.import_module(f"{__name__}.{subject}")
    known = {name: settings[name] for name in _SETTINGS[subject] if name in settings}
    table: BenchTable = module.table(**(module.QUICK if quick else {}), **known)
    return replace(table, machine=machine_facts())
