"""Where the processes of a watched run tell how far they are, and may be held to be killed there.

Nothing of asynckfold is called, and only how often it saves a job is changed. Python's own audit
events tell of files that are opened and renamed and of processes that are forked, and SQLite tells
of the statements that it executes; each is told to the campaign before it happens, and happens when
the campaign says so.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
from typing import Any

ADDRESS = "ASYNCKFOLD_CHAOS"
"""The environment variable that names the campaign's socket."""

PATIENCE_SECONDS = 30.0
"""Whoever is held longer goes on: the campaign must not be what hangs."""

EPOCH_SECONDS = 0.2
"""Between checkpoints, instead of one: so that jobs of one second have some to come back to."""

_PHASES = (
    ("checkpoint", re.compile(r"checkpoint-[^/]+\.tmp")),
    ("resume", re.compile(r"checkpoint-[^/]+\.safetensors")),
    ("report", re.compile(r"(?:\.html|\.png|\.csv|\.json|(?<!splits)\.npz)\.\d+\.tmp")),
)
_DIED = re.compile(r"""INSERT OR REPLACE INTO attempts .*,'(?:died|oom|hang)','.*"pid":(\d+)""")


def watch() -> None:
    """Begin to tell."""
    sqlite3.connect = _connect
    sys.addaudithook(_happens)
    atexit.register(reach, "shutdown")
    reach("start")


def reach(phase: str) -> None:
    """Tell the campaign what happens next here; return when it may."""
    line = _line()
    if line is None:
        return
    try:
        with _line_lock:
            line.send(f"{phase} {os.getpid()}".encode())
            line.recv(1)
    except OSError:
        _lines.pop(os.getpid()).close()  # the campaign is gone, or holds too long


def start_child() -> None:
    """Start one process below this one, as a DataLoader with workers does; it does nothing."""
    if os.getpid() not in _children:
        _children[os.getpid()] = subprocess.Popen(["sleep", "600"])


_children: dict[int, subprocess.Popen[bytes]] = {}
_lines: dict[int, socket.socket] = {}
_line_lock = threading.Lock()


def _line() -> socket.socket | None:
    """Return this process's own connection: one that was inherited belongs to the parent."""
    pid, address = os.getpid(), os.environ.get(ADDRESS)
    if address is None:
        return None
    if pid not in _lines:
        _lines.clear()
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(PATIENCE_SECONDS)
        try:
            line.connect(address)
        except OSError:
            line.close()
            return None
        _lines[pid] = line
    return _lines[pid]


def _happens(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _opens(arguments[0])
    elif event == "os.rename":
        _touches(arguments[0])
    elif event == "os.fork":
        reach("spawn")
    elif event == "os.killpg":
        reach("shutdown")


def _opens(path: Any) -> None:
    if not isinstance(path, str):
        return
    # Files are opened below a folder that is open, so by their names alone.
    if path.endswith("log.txt"):
        # Each job of a worker begins with its log.
        checkpoint = sys.modules["asynckfold.training.checkpoint"]
        checkpoint.EPOCH_SECONDS, checkpoint.SHARE = EPOCH_SECONDS, 1.0  # type: ignore[attr-defined]
    else:
        _touches(path)


def _touches(path: Any) -> None:
    text = os.fspath(path)
    for phase, pattern in _PHASES:
        if pattern.search(text):
            reach(phase)
            return


def _connect(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
    """In place of ``sqlite3.connect``."""
    reach("opened")
    connection = _plain_connect(*arguments, **keywords)
    connection.set_trace_callback(_executes)
    return connection


_plain_connect = sqlite3.connect


def _executes(statement: str) -> None:
    if statement == "COMMIT":
        reach("commit")
    elif statement.startswith("DELETE FROM results WHERE status NOT IN"):
        reach("begun")
    elif match := _DIED.match(statement):
        reach(f"died-{match[1]}")
