"""What a run may leave behind: nothing. Found by looking at the system, not by asking the code."""

from __future__ import annotations

import os
import time
from pathlib import Path


def descendants(pid: int | None = None) -> set[int]:
    """Return all living processes below `pid`, this one by default."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = status.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    grown = {pid or os.getpid()}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return found


def shared_memory() -> set[str]:
    """Return the names in ``/dev/shm``."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def gone(pids: set[int], seconds: float = 5.0) -> bool:
    """Whether all these processes end within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def described(pids: set[int]) -> list[str]:
    """Return what the living ones among these processes are, for a failure's message."""
    found = []
    for pid in sorted(pids):
        if alive(pid):
            words = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
            status = (Path("/proc") / str(pid) / "status").read_text()
            kept = [line for line in status.splitlines() if line.startswith(("State", "PPid"))]
            found.append(f"{pid} {kept} {words[-200:]!r}")
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        status = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
