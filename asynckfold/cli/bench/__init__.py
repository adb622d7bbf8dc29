"""The verb ``bench``: measure asynckfold on this machine; each subject returns one table.

::

    bench ─► measure(subject) ─► SUBJECT.py: table(**settings) ─► BenchTable ─► terminal, JSON, page
                                                                  figures ─► PNG, SVG

A speed is the ratio of two things timed in one run, turn by turn, as the median of several turns;
nothing here asserts a speed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.cli.output import Output
from asynckfold.errors import InterruptedRunError, Problem, nearest, refuse
from asynckfold.system.files import write_whole

if TYPE_CHECKING:
    from asynckfold.cli.bench.table import BenchTable

_SETTINGS = {
    "checkpoints": (),
    "crowd": (),
    "engines": ("tell",),
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

_MORE = {"trainers": ("partitions",)}
"""Subjects of several tables, and the modules of the further ones."""


def bench(parsed: argparse.Namespace, out: Output) -> int:
    """Measure one subject and print its table."""
    from rich.table import Table

    refuse([*parsed.problems, *_problems(parsed)])
    data = Path(parsed.data) if parsed.data else None
    settings = {"data": data, "with_peers": parsed.peers, "tell": out.error}
    try:
        table = measure(parsed.subject, quick=parsed.quick, **settings)
    except KeyboardInterrupt as interrupt:
        # A sweep in it says that it can be continued, but its folder is gone.
        cause = interrupt.__cause__ or interrupt
        text = f"{str(cause) or 'interrupted'}; a benchmark keeps nothing"
        code = interrupt.exit_code if isinstance(interrupt, InterruptedRunError) else 130
        raise InterruptedRunError(text, code) from None
    out.data(table.to_json())
    for part in (table, *table.more):
        shown = Table(*part.columns, title=part.title, box=None, pad_edge=False)
        for row in part.cells():
            shown.add_row(*row)
        out.say(shown)
        for note in part.notes:
            out.say(note)
    if parsed.save:
        for path in _save(table, Path(parsed.save), _command(parsed)):
            out.say(f"{'page' if path.suffix == '.md' else 'picture'}: {path}")
    return 0


def _save(table: BenchTable, page: Path, command: str) -> Iterator[Path]:
    """Write the pictures and the page, and yield what was written."""
    charts = []
    if table.figures:
        from asynckfold.results.report.charts import as_svg, rendered

        for name, drawing in table.figures.items():
            charts.append(rendered(f"{page.stem}-{name}", drawing))
            for suffix, data in ((".png", charts[-1].png), (".svg", as_svg(drawing))):
                path = page.with_name(charts[-1].name + suffix)
                write_whole(path, data)
                yield path
    write_whole(page, table.to_markdown(command, charts).encode())
    yield page


def _command(parsed: argparse.Namespace) -> str:
    """Return the command for a page, without paths of this machine."""
    words = ["asynckfold", "dev", "bench", parsed.subject]
    for flag, is_set in (("--quick", parsed.quick), ("--peers", parsed.peers)):
        words += [flag] * bool(is_set)
    return shlex.join([*words, *(["--data", "DIR"] if parsed.data else [])])


def _problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    if parsed.save:
        yield from _page_problems(Path(parsed.save))
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


def _page_problems(page: Path) -> Iterator[Problem]:
    """Yield why a page cannot be written."""
    rule = "--save must name a file in a folder that exists and may be written to"
    if page.is_dir():
        yield Problem(rule, f"the folder {str(page)!r}", f"Pass for instance {page / 'bench.md'}.")
    elif not page.parent.is_dir():
        yield Problem(rule, f"{str(page)!r}, whose folder is not there", "Make it first.")
    elif not os.access(page.parent, os.W_OK | os.X_OK):
        yield Problem(rule, f"{str(page)!r}, whose folder is read-only", "Choose another one.")


def measure(subject: str, *, quick: bool = False, **settings: Any) -> BenchTable:
    """Run one benchmark, in seconds and roughly with `quick`.

    Each subject takes those of the settings ``data``, ``with_peers`` and ``tell`` that it knows.
    """
    from asynckfold.cli.bench.table import machine_facts

    known = {name: settings[name] for name in _SETTINGS[subject] if name in settings}
    tables: list[BenchTable] = []
    for name in (subject, *_MORE.get(subject, ())):
        module = importlib.import_module(f"{__name__}.{name}")
        tables.append(module.table(**(module.QUICK if quick else {}), **known))
    return replace(tables[0], more=tuple(tables[1:]), machine=machine_facts())
