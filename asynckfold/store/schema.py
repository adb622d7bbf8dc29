"""The tables of ``run.db``."""

from __future__ import annotations

import re

FORMAT = 2

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, seal INTEGER);
CREATE TABLE sessions (session INTEGER PRIMARY KEY, pid INTEGER, host TEXT, started TEXT,
    offset REAL NOT NULL, seconds REAL NOT NULL, packed REAL NOT NULL DEFAULT 0,
    seal INTEGER);
CREATE TABLE attempts (job_id TEXT NOT NULL, attempt INTEGER NOT NULL, session INTEGER NOT NULL,
    started REAL NOT NULL, ended REAL, outcome TEXT, cores TEXT, threads INTEGER, device TEXT,
    pid INTEGER, expected REAL, error TEXT, seal INTEGER, PRIMARY KEY (job_id, attempt));
CREATE TABLE epochs (job_id TEXT NOT NULL, attempt INTEGER NOT NULL, number INTEGER NOT NULL,
    train_loss REAL, valid_loss REAL, accuracy REAL, lr REAL, seconds REAL,
    seal INTEGER, PRIMARY KEY (job_id, attempt, number));
CREATE TABLE results (job_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, status TEXT NOT NULL,
    scores TEXT NOT NULL, epochs TEXT NOT NULL, outputs BLOB, shape TEXT, weights TEXT,
    fit_seconds REAL, score_seconds REAL, peak_memory INTEGER, pid INTEGER, cores TEXT,
    threads INTEGER, device TEXT, started REAL, ended REAL, error TEXT, traceback TEXT,
    digest TEXT NOT NULL, seal INTEGER);
CREATE TABLE checkpoints (job_id TEXT NOT NULL, attempt INTEGER NOT NULL, epoch INTEGER NOT NULL,
    batch INTEGER NOT NULL, file TEXT NOT NULL, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
    seal INTEGER, PRIMARY KEY (job_id, file));
CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, job_id TEXT,
    text TEXT NOT NULL, seal INTEGER);
CREATE TABLE samples (at REAL NOT NULL, phase TEXT NOT NULL, used REAL NOT NULL, own REAL NOT NULL,
    cores TEXT NOT NULL, seal INTEGER);
"""

STATEMENTS = [text.strip() for text in SCHEMA.split(";") if text.strip()]
TYPES = {
    text.split()[2]: dict(re.findall(r"(\w+) (TEXT|INTEGER|REAL|BLOB)\b", text)[:-1])
    for text in STATEMENTS
}
"""The columns of each table and their types, without the checksum (the column ``seal``)."""

COLUMNS = {table: ", ".join(columns) for table, columns in TYPES.items()}
"""The columns that the checksum of a row covers."""
