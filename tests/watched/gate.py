"""Where the processes of a watched run note how far they are, and wait to be killed there.

Nothing of asynckfold is called, and only how often it saves a job is changed. Python's own audit
events tell of files that are opened and renamed and of processes that are forked, SQLite tells of
the statements that it executes. All notes are files in one folder::

    resumed    there was a plan before the command began
    begun      it trains; what trained before was a dry run
    stage      the phase that lasts: resume, train, report, shutdown
    aim        the phase, its how-manieth time from then on, and the number of a kill
    held       the process that is there now; it goes on when this file is gone
    deaths     lines "pid seconds": when the sweep stored that a worker died
"""

from __future__ import annotations

import atexit
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "ASYNCKFOLD_CHAOS"
"""The environment variable that names the folder of notes."""

PATIENCE_SECONDS = 30.0
"""Whoever is held longer goes on: the campaign must not be what hangs."""

EPOCH_SECONDS = 0.2
"""Between checkpoints, instead of one: so that jobs of one second have some to come back to."""

LASTING = ("resume", "train", "report", "shutdown")
_PHASES = (
    ("checkpoint", re.compile(r"checkpoint-[^/]+\.tmp")),
    ("resume", re.compile(r"checkpoint-[^/]+\.safetensors")),
    # Not the page, which is also written while jobs run.
    ("report", re.compile(r"(?:\.png|\.csv|\.json|(?<!splits)\.npz)\.\d+\.tmp")),
)
_DIED = re.compile(r"""INSERT OR REPLACE INTO attempts .*,'(?:died|oom|hang)','.*"pid":(\d+)""")
_children: dict[int, subprocess.Popen[bytes]] = {}


def watch() -> None:
    """Begin to note."""
    sqlite3.connect = _connect
    sys.addaudithook(_happens)
    atexit.register(reach, "shutdown")
    reach("start")


def reach(phase: str) -> None:
    """Note what happens next here; return when it may."""
    if FOLDER not in os.environ or not _lasts(phase):
        return
    aim = read("aim").split()
    if aim[:1] != [phase] or note(f"reached-{aim[2]}", ".") != int(aim[1]):
        return
    note("held", f"{os.getpid()}")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while read("held") and time.monotonic() < deadline:
        time.sleep(0.002)


def _lasts(phase: str) -> bool:
    """Whether a phase means what it says; note it if it lasts."""
    if phase == "resume" and not read("resumed"):
        return False
    if phase == "train" and not read("begun"):
        return False
    stage = read("stage")
    if phase == "shutdown" and stage not in ("report", "shutdown"):
        return False  # the end of a worker, not of the run
    if phase in LASTING and phase != stage:
        note("stage", f"{phase}\n")
    return True


def read(name: str) -> str:
    """Return the last line of a note, ``""`` where there is none."""
    try:
        return Path(os.environ[FOLDER], name).read_text().strip().rpartition("\n")[2]
    except OSError:
        return ""


def note(name: str, text: str) -> int:
    """Add to a note; return its size."""
    file = os.open(Path(os.environ[FOLDER], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, text.encode())
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


def start_child() -> None:
    """Start one process below this one, as a DataLoader with workers does; it does nothing."""
    if os.getpid() not in _children:
        _children[os.getpid()] = subprocess.Popen(["sleep", "600"])


def _happens(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith("log.txt"):
        # Each job of a worker begins with its log.
        checkpoint = sys.modules["asynckfold.training.checkpoint"]
        checkpoint.EPOCH_SECONDS, checkpoint.SHARE = EPOCH_SECONDS, 1.0  # type: ignore[attr-defined]
    elif event == "os.fork":
        reach("spawn")
    elif event == "os.killpg":
        reach("shutdown")
    elif event in ("open", "os.rename") and isinstance(arguments[0], str | os.PathLike):
        path = os.fspath(arguments[0])
        for phase, pattern in _PHASES:
            if isinstance(path, str) and pattern.search(path):
                reach(phase)
                return


def _connect(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
    """In place of ``sqlite3.connect``."""
    reach("resume")
    connection = _plain_connect(*arguments, **keywords)
    connection.set_trace_callback(_executes)
    return connection


_plain_connect = sqlite3.connect


def _executes(statement: str) -> None:
    if statement == "COMMIT":
        reach("commit")
    elif statement.startswith("DELETE FROM outputs WHERE job_id NOT IN"):
        note("begun", "1")
        reach("resume")
    elif match := _DIED.match(statement):
        note("deaths", f"{match[1]} {time.monotonic()}\n")
