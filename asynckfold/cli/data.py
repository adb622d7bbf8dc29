"""The verb ``data``: columns, classes and omissions of a data source."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from asynckfold.cli.flags import with_defaults
from asynckfold.cli.output import Output
from asynckfold.data.sources import Inspection, TableOptions, column_words, inspect
from asynckfold.data.sources.columns import FEATURE, LEFT_OUT, REFUSED
from asynckfold.errors import refuse
from asynckfold.results.report.sentences import plural

_MOST_ROWS = 30
_MOST_WIDTH = 50
_RARE = 10


def data(parsed: argparse.Namespace, out: Output) -> int:
    """Print columns, classes and notes; then the problems for which run would refuse the data."""
    refuse(parsed.problems)
    parsed = with_defaults(parsed)
    found = inspect(
        parsed.source,
        data_root=Path(parsed.data_root),
        download=parsed.download,
        choice=TableOptions(
            parsed.target,
            parsed.header,
            column_words(parsed.drop),
            column_words(parsed.keep),
            column_words(parsed.category),
            column_words(parsed.groups),
            column_words(parsed.fold_column),
        ),
        limit=parsed.limit,
        random_state=parsed.seed,
    )
    out.data(_numbers(found))
    out.say(f"{found.name}: {_sizes(found)}")
    if found.columns:
        out.say("; ".join(found.notes[:1]))
        out.say()
        out.say(_column_table(found))
    if found.classes:
        out.say()
        out.say(_class_table(found))
    lines = list(_lines(found))
    if lines:
        out.say()
    for line in lines:
        out.say(line)
    refuse(found.problems)
    return 0


def _numbers(found: Inspection) -> dict[str, Any]:
    """Return the object of ``--json``."""
    return {
        "data": found.name,
        "kind": found.kind,
        "samples": found.samples,
        "sample_shape": list(found.sample_shape),
        "classes": found.classes,
        "columns": [{**asdict(item.column), "values": item.values} for item in found.columns],
        "repeated": found.repeated,
        "notes": list(found.notes),
        "problems": [asdict(problem) for problem in found.problems],
    }


def _sizes(found: Inspection) -> str:
    if found.columns:
        what = f"{plural(found.samples, 'row')}, {plural(found.sample_shape[0], 'feature')}"
    else:
        shape = "×".join(map(str, found.sample_shape))
        what = f"{plural(found.samples, 'image')} of {shape}"
    return f"{what}, {len(found.classes)} {'class' if len(found.classes) == 1 else 'classes'}"


def _column_table(found: Inspection) -> Table:
    """Return a row for each column; of many plain features only the first."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    missing = any(item.column.missing for item in found.columns)
    table.add_column("column")
    table.add_column("role")
    table.add_column("type")
    table.add_column("different", justify="right")
    if missing:
        table.add_column("missing", justify="right")
    table.add_column("values, or reason")
    plain = hidden = 0
    for item in found.columns:
        column = item.column
        plain += column.role == FEATURE
        if column.role == FEATURE and plain > _MOST_ROWS:
            hidden += 1
            continue
        style = {LEFT_OUT: "yellow", REFUSED: "red"}.get(column.role, "")
        cells = [column.name, column.role, column.dtype, f"{column.different:,}"]
        cells += [f"{column.missing:,}" if column.missing else ""] if missing else []
        cells.append(column.why or _cut(item.values))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    if hidden:
        table.add_row(Text(f"… and {hidden:,} more features"))
    return table


def _class_table(found: Inspection) -> Table:
    """Return a row for each class with its number of samples; of many only the first."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("class")
    table.add_column("samples", justify="right")
    table.add_column("share", justify="right")
    total = max(1, sum(found.classes.values()))
    for name, count in list(found.classes.items())[:_MOST_ROWS]:
        table.add_row(Text(_cut(name)), f"{count:,}", f"{100 * count / total:.1f} %")
    if len(found.classes) > _MOST_ROWS:
        table.add_row(f"… and {len(found.classes) - _MOST_ROWS:,} more")
    return table


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_WIDTH else f"{text[: _MOST_WIDTH - 1]}…"


def _lines(found: Inspection) -> Iterator[str]:
    # The first note of a table stands above it.
    yield from found.notes[1:] if found.columns else found.notes
    if found.repeated:
        what = "row" if found.columns else "image"
        verb = "equals" if found.repeated == 1 else "equal"
        count = plural(found.repeated, what)
        yield f"{count} {verb} an earlier one, perhaps on the other side of a fold"
    rarest = min(found.classes, key=lambda name: found.classes[name], default="")
    samples = found.classes.get(rarest, 0)
    if 0 < samples < _RARE:
        most = f"at most {samples} folds" if samples > 1 else "too few to cross-validate"
        yield f"the rarest class, {rarest}, has {plural(samples, 'sample')}: {most}"
    if found.columns and not found.problems:
        yield "each feature is standardised on the training part of each fold"
