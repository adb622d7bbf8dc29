"""Checks that ``run.db`` holds what was written: its tables, pages and a checksum per row."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.plan import Plan
from asynckfold.store.schema import COLUMNS, FORMAT, STATEMENTS
from asynckfold.store.soundness import cell_checks, unplanned_jobs
from asynckfold.system.plain_text import one_line

_WITHOUT_RESULT = """
SELECT job_id FROM attempts WHERE outcome IN ('ok', 'diverged')
AND job_id NOT IN (SELECT job_id FROM results) LIMIT 1
"""
"""A result and the end of its attempt are one transaction: a torn copy may hold half of it."""


def verify(db: sqlite3.Connection, path: Path) -> None:
    """Check a whole run that nobody writes.

    50 ms for a run of 1,000 results with 8 MB of outputs (2 cores, printed by
    tests/durability/test_damage.py).
    """
    check_schema(db, path)
    check_size(db, path)
    check_pages(db, path)
    _check_rows(db, path, "results")
    check_contents(db, path)


def check_contents(db: sqlite3.Connection, path: Path) -> None:
    """Check every row except those of results, and that all rows belong to jobs of the plan."""
    for table in COLUMNS:
        if table != "results":
            _check_rows(db, path, table)
    row = db.execute(_WITHOUT_RESULT).fetchone()
    if row:
        raise StoreCorruptError(f"{path} is damaged: the result of {one_line(row[0])} is gone")
    plan = db.execute("SELECT value FROM meta WHERE key = 'plan'").fetchone()
    try:
        problem = next(unplanned_jobs(db, Plan.from_json(plan[0])), "") if plan else ""
    except ValueError as error:
        problem = str(error)
    if problem:
        raise StoreCorruptError(f"{path} is damaged: {one_line(problem)}")


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Check that a file is a run of this format, with our tables and nothing else."""
    found = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if not any(str(text).startswith("CREATE TABLE meta ") for text in found):
        raise StoreCorruptError(f"{path} is not a run of asynckfold")
    written = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if written and written[0] != str(FORMAT):
        raise StoreCorruptError(
            f"a run must have format {FORMAT}: {path} has {one_line(str(written[0])[:60])}. "
            "Use another folder, or resume='never'"
        )
    if found != set(STATEMENTS):
        raise StoreCorruptError(f"{path} is not a run of asynckfold: its tables differ")


def check_size(db: sqlite3.Connection, path: Path) -> int:
    """Return the size of the file in bytes; it must match the file's header."""
    # A read starts the transaction, so that both numbers are from the same moment.
    db.execute("SELECT COUNT(*) FROM main.meta").fetchone()
    expected, found = size_of(db, "main"), path.stat().st_size
    if expected != found:
        raise StoreCorruptError(
            f"{path} is damaged: it has {found:,} bytes, and by its header {expected:,}"
        )
    return found


def size_of(db: sqlite3.Connection, schema: str) -> int:
    """Return the bytes of a database by its header."""
    (pages,) = db.execute(f"PRAGMA {schema}.page_count").fetchone()
    (size,) = db.execute(f"PRAGMA {schema}.page_size").fetchone()
    return int(pages * size)


def check_pages(db: sqlite3.Connection, path: Path, table: str | None = None) -> None:
    """Run SQLite's own check on the whole file, or on one table and its indexes."""
    (found, *_) = db.execute(f"PRAGMA main.integrity_check({table or 1})").fetchone()
    if found != "ok":
        raise StoreCorruptError(f"{path} is damaged: {' '.join(str(found).split())}")


def _check_rows(db: sqlite3.Connection, path: Path, table: str) -> None:
    for _ in checked(db.execute(f"SELECT {COLUMNS[table]}, seal FROM {table}"), table, path):
        pass


def checked(rows: Iterable[Sequence[Any]], table: str, path: Path) -> Iterator[list[Any]]:
    """Yield the values of sound rows; each row ends with its checksum.

    Raises
    ------
    StoreCorruptError
        After the last row, if any row was changed or holds an impossible value.
    """
    columns, changed, wrong = cell_checks(table), [], ""
    checks = [check for _, check in columns]
    # In Python row by row: SQLite would swallow a Ctrl-C during a call of `checksum`.
    for *values, stored in rows:
        if stored != checksum(*values):
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
