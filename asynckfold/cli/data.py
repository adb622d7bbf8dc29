"""The verb ``data``: columns, classes and omissions of a data source."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.cli.flags import with_defaults
from asynckfold.cli.output import Output, table_of
from asynckfold.data.sources import Inspection, TableOptions, column_words, inspect
from asynckfold.data.sources.columns import FEATURE, LEFT_OUT, REFUSED
from asynckfold.errors import refuse
from asynckfold.jobs.objective import REGRESSION
from asynckfold.results.report.sentences import plural

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 30
"""Plain features, and classes, in their tables."""

MOST_WIDTH = 50
"""Characters of a name."""

COLUMN_FACTS = ("name", "role", "dtype", "why", "categories", "missing", "different", "values")
"""What ``--json`` says of a column."""

RARE = 10
"""Samples of a class below which the number of folds is limited."""


def data(parsed: argparse.Namespace, out: Output) -> int:
    """Print columns, classes and notes; then the problems for which run would refuse the data."""
    refuse(parsed.problems)
    parsed = with_defaults(parsed)
    words = (parsed.drop, parsed.keep, parsed.category, parsed.groups, parsed.fold_column)
    source = inspect(
        parsed.source,
        data_root=Path(parsed.data_root),
        download=parsed.download,
        choice=TableOptions(
            parsed.target,
            parsed.header,
            *map(column_words, words),
            regression=parsed.task == REGRESSION,
        ),
        limit=parsed.limit,
        random_state=parsed.seed,
    )
    out.data(_numbers(source))
    out.say(f"{source.name}: {_sizes(source)}")
    if source.columns:
        out.say("; ".join(source.notes[:1]))
        out.say()
        out.say(_column_table(source))
    if source.classes:
        out.say()
        out.say(_class_table(source))
    lines = list(_lines(source))
    if lines:
        out.say()
    for line in lines:
        out.say(line)
    refuse(source.problems)
    return 0


def _numbers(source: Inspection) -> dict[str, Any]:
    """Return the object of ``--json``."""
    return {
        "data": source.name,
        "kind": source.kind,
        "samples": source.samples,
        "sample_shape": list(source.sample_shape),
        "classes": source.classes,
        "columns": [
            {name: getattr(column, name) for name in COLUMN_FACTS} for column in source.columns
        ],
        "repeated": source.repeated,
        "notes": list(source.notes),
        "problems": [asdict(problem) for problem in source.problems],
    }


def _sizes(source: Inspection) -> str:
    if source.columns:
        what = f"{plural(source.samples, 'row')}, {plural(source.sample_shape[0], 'feature')}"
    else:
        shape = "×".join(map(str, source.sample_shape))
        what = f"{plural(source.samples, 'image')} of {shape}"
    if not source.classes:
        return what
    return f"{what}, {len(source.classes)} {'class' if len(source.classes) == 1 else 'classes'}"


def _column_table(source: Inspection) -> Table:
    """Return a row for each column; of many plain features only the first."""
    missing = ["missing"] * any(item.missing for item in source.columns)
    columns = ["column", "role", "type", "different", *missing, "values, or reason"]
    shown = [item for item in source.columns if item.role != FEATURE]
    plain = [item for item in source.columns if item.role == FEATURE]
    shown += plain[:MOST_ROWS]
    rows, styles = [], []
    for item in sorted(shown, key=source.columns.index):
        empty = [f"{item.missing:,}" if item.missing else "" for _ in missing]
        cells = [item.name, item.role, item.dtype, f"{item.different:,}"]
        rows.append([*cells, *empty, item.why or _cut(item.values)])
        styles.append({LEFT_OUT: "yellow", REFUSED: "red"}.get(item.role, ""))
    if len(plain) > MOST_ROWS:
        rows.append([f"… and {len(plain) - MOST_ROWS:,} more features"])
    return table_of(columns, rows, ("column", "role", "type", columns[-1]), styles)


def _class_table(source: Inspection) -> Table:
    """Return a row for each class with its number of samples; of many only the first."""
    total = max(1, sum(source.classes.values()))
    rows = [
        [_cut(name), f"{count:,}", f"{100 * count / total:.1f} %"]
        for name, count in source.classes.items()
    ]
    more = [[f"… and {len(rows) - MOST_ROWS:,} more"]] * (len(rows) > MOST_ROWS)
    return table_of(["class", "samples", "share"], rows[:MOST_ROWS] + more, ("class",))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_WIDTH else f"{text[: MOST_WIDTH - 1]}…"


def _lines(source: Inspection) -> Iterator[str]:
    # The first note of a table stands above it.
    yield from source.notes[1:] if source.columns else source.notes
    if source.repeated:
        what = "row" if source.columns else "image"
        verb = "equals" if source.repeated == 1 else "equal"
        count = plural(source.repeated, what)
        yield f"{count} {verb} an earlier one, perhaps on the other side of a fold"
    rarest = min(source.classes, key=lambda name: source.classes[name], default="")
    samples = source.classes.get(rarest, 0)
    if 0 < samples < RARE:
        most = f"at most {samples} folds" if samples > 1 else "too few to cross-validate"
        yield f"the rarest class, {rarest}, has {plural(samples, 'sample')}: {most}"
    if source.columns and not source.problems:
        yield "each feature is standardised on the training part of each fold"
