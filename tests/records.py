"""What a run on disk is made of: a plan, and results for it. Imports nothing that takes long."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asynckfold import Epoch, Fold, Job, Plan, Result, RunStore, TrainerParams
from asynckfold.store.database import COLUMNS, checksum

__all__ = [
    "FIRST",
    "FOLDS",
    "MANY",
    "PLAN",
    "Path",
    "RunStore",
    "begin",
    "finish",
    "make_result",
    "np",
    "os",
    "signal",
    "sqlite3",
    "sys",
]
"""What `other_process` knows."""

TARGETS = np.array([0, 1] * 6)
SHA256_OF_FOLDS = "908d9532aa503b795ea32ba1501397948429e80a1bf063bd83d8f6ebd91fe20c"


def make_plan(
    models: tuple[str, ...] = ("A", "B"), **changes: Any
) -> tuple[Plan, tuple[Fold, ...]]:
    rows = np.arange(12)
    folds = tuple(
        Fold(0, index, rows[rows % 3 != index], rows[rows % 3 == index]) for index in range(3)
    )
    jobs = tuple(Job(model, "cosine", 0, fold, seed=fold) for model in models for fold in range(3))
    plan = Plan(jobs, TrainerParams(), 4, 1, 0, "cpu", ("accuracy",), "data", SHA256_OF_FOLDS)
    return replace(plan, **changes), folds


PLAN, FOLDS = make_plan()
MANY = make_plan(tuple(f"M{number}" for number in range(200)))[0]
FIRST = PLAN.jobs[0].id


def begin(root: Path, plan: Plan = PLAN) -> RunStore:
    store = RunStore.hold(root)
    store.begin(plan, FOLDS, TARGETS, {"command": "test"})
    return store


def write_checksums(db: sqlite3.Connection) -> None:
    """Write valid checksums for all rows of a run, as who changes a row by hand would."""
    db.create_function("valid", -1, checksum)
    for table, columns in COLUMNS.items():
        db.execute(f"UPDATE {table} SET checksum = valid({columns})")


def make_result(job_id: str, attempt: int = 1, **changes: Any) -> Result:
    result = Result(
        job_id,
        attempt,
        "done",
        {"accuracy": 0.75},
        (Epoch(1, 0.5, 0.6, 0.7, 1e-3, 0.1), Epoch(2, 0.4, 0.5, None, 1e-4, 0.1)),
        np.arange(8, dtype=np.float32).reshape(4, 2),
        "weights",
        1.5,
        0.25,
        1 << 30,
        123,
        (0, 1),
        2,
        "cpu",
        0.5,
        2.5,
    )
    return replace(result, **changes)


def finish(store: RunStore, job_id: str, **changes: Any) -> bool:
    attempt = store.start_attempt(job_id, (0,), 1, "cpu", 1.0)
    return store.record(make_result(job_id, attempt, **changes))


def other_process(root: Path, body: str) -> subprocess.Popen[str]:
    """A process that knows `root` and this file's names, and runs `body`."""
    code = f"from tests.records import *\nroot = Path({str(root)!r})\n{body}"
    home = Path(__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=home
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
