"""Is what stands in ``run.db`` what was written? A seal on every row, and SQLite's own check."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.plan import Plan
from asynckfold.store.schema import COLUMNS, FORMAT, STATEMENTS
from asynckfold.store.soundness import cell_checks, strangers
from asynckfold.system.plain_text import one_line

_LACKING = """
SELECT job_id FROM attempts WHERE outcome IN ('ok', 'diverged')
AND job_id NOT IN (SELECT job_id FROM results) LIMIT 1
"""
"""A result and the end of its attempt are one transaction: a torn copy may hold half of it."""


def verify(db: sqlite3.Connection, path: Path) -> None:
    """Check a run at rest: its tables, its size, its pages, and every row.

    50 ms for a run of 1,000 results with 8 MB of outputs (2 cores, printed by
    tests/durability/test_damage.py).
    """
    check_schema(db, path)
    check_size(db, path)
    check_pages(db, path)
    for _ in checked(
        db.execute(f"SELECT {COLUMNS['results']}, seal FROM results"), "results", path
    ):
        pass
    check_contents(db, path)


def check_contents(db: sqlite3.Connection, path: Path) -> None:
    """Check every row but those of results, and that all rows are of jobs of the plan."""
    for table in COLUMNS:
        if table != "results":
            _check_rows(db, path, table)
    row = db.execute(_LACKING).fetchone()
    if row:
        raise StoreCorruptError(f"{path} is damaged: the result of {one_line(row[0])} is gone")
    plan = db.execute("SELECT value FROM meta WHERE key = 'plan'").fetchone()
    try:
        stranger = next(strangers(db, Plan.from_json(plan[0])), "") if plan else ""
    except ValueError as error:
        stranger = str(error)
    if stranger:
        raise StoreCorruptError(f"{path} is damaged: {one_line(stranger)}")


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Check that a file is a run of this format, with our tables and nothing else."""
    found = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if not any(str(text).startswith("CREATE TABLE meta ") for text in found):
        raise StoreCorruptError(f"{path} is not a run of asynckfold")
    written = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if written and written[0] != str(FORMAT):
        raise StoreCorruptError(
            f"{path} has format {one_line(str(written[0])[:60])}, this asynckfold reads format "
            f"{FORMAT}"
        )
    if found != set(STATEMENTS):
        raise StoreCorruptError(f"{path} is not a run of asynckfold: its tables differ")


def check_size(db: sqlite3.Connection, path: Path) -> int:
    """Return the bytes of the file, which must be as many as its header says."""
    # Read something first: both numbers are then of one transaction.
    db.execute("SELECT COUNT(*) FROM main.meta").fetchone()
    (pages,), (size,) = (
        db.execute(f"PRAGMA main.{name}").fetchone() for name in ("page_count", "page_size")
    )
    there = path.stat().st_size
    if pages * size != there:
        raise StoreCorruptError(
            f"{path} is damaged: it has {there:,} bytes, and by its header {pages * size:,}"
        )
    return there


def check_pages(db: sqlite3.Connection, path: Path, table: str | None = None) -> None:
    """Check that SQLite finds the whole file sound, or one table of it with its indexes."""
    (word, *_) = db.execute(f"PRAGMA main.integrity_check({table or 1})").fetchone()
    if word != "ok":
        raise StoreCorruptError(f"{path} is damaged: {' '.join(str(word).split())}")


def _check_rows(db: sqlite3.Connection, path: Path, table: str) -> None:
    for _ in checked(db.execute(f"SELECT {COLUMNS[table]}, seal FROM {table}"), table, path):
        pass


def checked(rows: Iterable[Sequence[Any]], table: str, path: Path) -> Iterator[list[Any]]:
    """Yield the values of the rows that are as they were written, each from (values, checksum).

    Raises
    ------
    StoreCorruptError
        After the last row, if others are not, or have values that nobody writes.
    """
    columns, changed, wrong = cell_checks(table), [], ""
    checks = [check for _, check in columns]
    # Row by row here, since SQLite would drop a Ctrl-C that came while it called `checksum`.
    for *values, seal in rows:
        if seal != checksum(*values):
            changed.append(values[0])
        elif not any(check(value) for check, value in zip(checks, values, strict=True)):
            yield values
        elif not wrong:
            wrong = next(
                f"{name} of {table} {found}"
                for (name, check), value in zip(columns, values, strict=True)
                if (found := check(value))
            )
    if changed:
        raise StoreCorruptError(
            f"{path} is damaged: {len(changed)} rows of {table} are not what was written, the "
            f"first of {columns[0][0]} {str(changed[0])[:60]!r}"
        )
    if wrong:
        raise StoreCorruptError(f"{path} is damaged: {wrong}")


def checksum(*values: object) -> int:
    """Return the CRC-32 of one row."""
    plain = repr([value for value in values if not isinstance(value, bytes)])
    total = zlib.crc32(plain.encode("utf-8", "surrogatepass"))
    for value in values:
        if isinstance(value, bytes):
            total = zlib.crc32(value, total)
    return total
