"""Is what stands in ``run.db`` what was written? A seal on every row, and SQLite's own check."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path

from asynckfold.errors import StoreCorruptError
from asynckfold.store.schema import COLUMNS, FORMAT, STATEMENTS

_LACKING = """
SELECT job_id FROM attempts WHERE outcome IN ('ok', 'diverged')
AND job_id NOT IN (SELECT job_id FROM results) LIMIT 1
"""
"""A result and the end of its attempt are one transaction: a torn copy may hold half of it."""


def verify(db: sqlite3.Connection, path: Path) -> None:
    """Check a run at rest: that it is one, that SQLite finds it sound, and the seal of every row.

    50 ms for a run of 1,000 results with 8 MB of outputs (2 cores, printed by
    tests/durability/test_damage.py).
    """
    found = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if not any(str(text).startswith("CREATE TABLE meta ") for text in found):
        raise StoreCorruptError(f"{path} is not a run of asynckfold")
    written = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if written and written[0] != str(FORMAT):
        raise StoreCorruptError(
            f"{path} has format {written[0]}, this asynckfold reads format {FORMAT}"
        )
    if found != set(STATEMENTS):
        raise StoreCorruptError(f"{path} is not a run of asynckfold: its tables differ")
    (word,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if word != "ok":
        raise StoreCorruptError(f"{path} is damaged: {word}")
    for table, columns in COLUMNS.items():
        # Row by row here, since SQLite would drop a Ctrl-C that came while it called `checksum`.
        rows = db.execute(f"SELECT {columns}, seal FROM {table}")
        changed = [key for key, *others, seal in rows if seal != checksum(key, *others)]
        if changed:
            raise StoreCorruptError(
                f"{path} is damaged: {len(changed)} rows of {table} are not what was written, the "
                f"first of {columns.split(', ')[0]} {changed[0]!r}"
            )
    row = db.execute(_LACKING).fetchone()
    if row:
        raise StoreCorruptError(f"{path} is damaged: the result of {row[0]} is gone")


def checksum(*values: object) -> int:
    """Return the CRC-32 of one row."""
    plain = repr([value for value in values if not isinstance(value, bytes)])
    total = zlib.crc32(plain.encode("utf-8", "surrogatepass"))
    for value in values:
        if isinstance(value, bytes):
            total = zlib.crc32(value, total)
    return total
