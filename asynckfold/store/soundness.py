"""Checks that values of a run are possible: types, ranges, and the jobs, folds, samples they name.

A checksum shows that a row was not changed by accident, but whoever crafts a file writes checksums
too. So values are checked before anything else uses them.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asynckfold.jobs.decoding import decoded
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE, ENDED, Result
from asynckfold.store.schema import TYPES

if TYPE_CHECKING:
    from asynckfold.jobs.folds import Fold

_MAX_TEXT = 1 << 28
"""Characters of JSON, errors and tracebacks."""

_MAX_WORD = 1 << 16
"""Characters of any other text."""

_MAX_NUMBER = 1e12
"""Limit for seconds, counts and bytes: 30,000 years, a terabyte."""

_WORDS: Mapping[tuple[str, str], Collection[str]] = {
    ("results", "status"): ENDED,
    ("samples", "phase"): ("packed", "serial", "gpu"),
}
_NULLABLE: Mapping[str, Collection[str]] = {
    # SQLite stores NaN as NULL.
    "epochs": ("train_loss", "valid_loss", "accuracy", "lr", "seconds"),
    "results": ("outputs", "shape"),
    "attempts": ("ended", "outcome", "expected"),
    "events": ("job_id",),
}
_LONG = ("value", "scores", "epochs", "error", "traceback", "text", "shape", "cores")
_UNBOUNDED = ("train_loss", "valid_loss", "accuracy", "lr", "used", "own", "expected")

_BY_JOB = ("results", "attempts", "epochs", "checkpoints")

_PYTHON = {"TEXT": str, "INTEGER": int, "REAL": (int, float), "BLOB": bytes}

Check = Callable[[Any], str]


def cell_checks(table: str) -> tuple[tuple[str, Check], ...]:
    """Return (column, check) pairs; a check returns what is wrong with a value, or ``""``."""
    nullable = _NULLABLE.get(table, ())
    return tuple(
        (
            column,
            _cell_check(
                _PYTHON[kind],
                column not in nullable,
                _WORDS.get((table, column)),
                _MAX_TEXT if column in _LONG else _MAX_WORD,
                (-math.inf, math.inf) if column in _UNBOUNDED else (-1.0, _MAX_NUMBER),
            ),
        )
        for column, kind in TYPES[table].items()
    )


def _cell_check(
    types: Any,
    is_needed: bool,
    words: Collection[str] | None,
    max_text: int,
    bounds: tuple[float, float],
) -> Check:
    low, high = bounds

    def check(value: Any) -> str:
        if value is None:
            return "is missing" if is_needed else ""
        if not isinstance(value, types):
            return f"is of type {type(value).__name__}"
        if isinstance(value, str):
            if words is not None and value not in words:
                return f"is {value[:60]!r}"
            return "" if len(value) <= max_text else f"has {len(value)} characters"
        if isinstance(value, (int, float)) and not low <= value <= high:
            return f"is {value!r}"
        return ""

    return check


def unplanned_jobs(db: sqlite3.Connection, plan: Plan) -> Iterator[str]:
    """Yield rows that name a job outside the plan."""
    known = {job.id for job in plan.jobs}
    for table in _BY_JOB:
        for (name,) in db.execute(f"SELECT DISTINCT job_id FROM {table}"):
            if name not in known:
                yield f"{table} has a row of {name[:60]!r}, which is no job of the plan"


def check_result(result: Result) -> None:
    """Raise ValueError for impossible times; NaN where they were not measured."""
    trained = [item.seconds for item in result.epochs]
    for seconds in (*trained, *(item.seconds for item in result.pretraining)):
        if not (-1 <= seconds <= _MAX_NUMBER or math.isnan(seconds)):
            raise ValueError(f"an epoch of {result.job_id[:60]} took {seconds} s")


def check_folds(folds: Sequence[Fold], targets: Any, plan: Plan) -> None:
    """Raise ValueError unless folds index samples and targets are classes of the plan."""
    import numpy as np

    if targets.ndim < 1 or targets.dtype.kind not in "biufSU":
        raise ValueError("its targets are neither numbers nor names")
    for fold in folds:
        for rows in (fold.train, fold.valid, fold.inner_valid):
            is_sound = rows.ndim == 1 and rows.dtype.kind in "iu"
            if not is_sound or (rows.size and not 0 <= rows.min() <= rows.max() < len(targets)):
                raise ValueError(f"fold {fold.index} has rows that are not samples")
    if plan.classes and targets.ndim == 1:
        is_sound = targets.dtype.kind in "biu" or bool(np.isfinite(targets).all())
        if plan.objective is not None and plan.objective.signs:
            targets = (targets + 1) / 2
        most = max(len(plan.classes), 1 << 12)
        if not is_sound or not 0 <= targets.min() <= targets.max() < most:
            raise ValueError("its targets are not classes")


def check_outputs(plan: Plan, folds: Sequence[Fold], results: Mapping[str, Result]) -> None:
    """Raise ValueError unless outputs match the held-out samples of each job's fold."""
    rows = {fold.key: len(fold.valid) for fold in folds}
    shapes: dict[str, tuple[int, ...]] = {}
    for job in plan.jobs:
        result = results.get(job.id)
        if result is None or result.outputs is None or result.status != DONE:
            continue
        shape = result.outputs.shape
        if not shape or shape[0] != rows.get((job.repeat, job.fold)):
            raise ValueError(f"the outputs of {job.id[:60]} are not those of its held-out samples")
        columns = plan.objective_of(job.model).columns
        if columns is not None and columns.ragged and len(shape) == 2:
            continue
        if shapes.setdefault(job.candidate, shape[1:]) != shape[1:]:
            raise ValueError(f"the outputs of {job.candidate[:60]} differ in shape between folds")


def check_about(about: Mapping[str, Any]) -> None:
    """Raise ValueError for wrong types in the parts that are used; the rest is only shown."""
    words = about.get("cli") or []
    decoded(list[str], list(words) if isinstance(words, (list, tuple)) else words, "about.cli")
    command = about.get("command") or []
    if not isinstance(command, str):
        decoded(list[str], command, "about.command")
    decoded(str, about.get("folder", ""), "about.folder")
    decoded(dict[str, Any], about.get("decision") or {}, "about.decision")
    if any("\0" in text for text in (*words, about.get("folder", ""))):
        raise ValueError("about has a word that no command line can have")
