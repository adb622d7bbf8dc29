"""What the kernel counts: busy seconds, processes, memory. The only place of psutil."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

# What psutil and the files below it raise when a reading fails.
UNREADABLE = (
    psutil.Error,
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    AttributeError,
    TypeError,
    ArithmeticError,
    ImportError,
)


def read_core_seconds() -> dict[int, float]:
    """Return the busy seconds of each online core since boot, by core number.

    Time that a hypervisor stole is left out: it is missing where this run computes, and fewer jobs
    would not bring it back.
    """
    times = psutil.cpu_times(percpu=True)
    numbers = _online_cores(len(times))
    if len(numbers) != len(times):
        return {}
    parts = ("user", "nice", "system", "irq", "softirq")
    return {
        number: sum(getattr(core, part, 0.0) for part in parts)
        for number, core in zip(numbers, times, strict=True)
    }


def _online_cores(count: int, path: Path = Path("/sys/devices/system/cpu/online")) -> list[int]:
    """Numbers of the online cores: psutil numbers through, also where one was taken offline."""
    try:
        text = path.read_text().strip()
    except OSError:
        return list(range(count))
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def read_process(pid: int) -> tuple[float, int]:
    """Return a process' CPU seconds so far, and the core it ran on last."""
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.cpu_num()


def read_age(pid: int) -> float:
    """Return for how many seconds a process has been there, whatever the wall clock does.

    Without Linux's process file system it is asked of the wall clock.
    """
    try:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.time() - psutil.Process(pid).create_time()


def read_descendants() -> dict[int, int]:
    """Return the parent of each process that descends from this one."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = child.ppid()
        except psutil.NoSuchProcess:
            continue  # it ended between the two readings
    return found


def read_private_memory(pid: int) -> int:
    """Return the resident bytes that come back when a process ends: without what it shares."""
    memory = psutil.Process(pid).memory_info()
    return max(0, int(memory.rss) - int(getattr(memory, "shared", 0)))


def read_total_memory() -> int:
    """Return the bytes of memory that the machine has."""
    return int(psutil.virtual_memory().total)


def read_available_memory() -> int:
    """Return the bytes that can be taken without swapping."""
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class Readers:
    """How the machine is read; a test brings series of its own."""

    core_seconds: Callable[[], Mapping[int, float]] = read_core_seconds
    process: Callable[[int], tuple[float, int]] = read_process
    descendants: Callable[[], Mapping[int, int]] = read_descendants
    private_memory: Callable[[int], int] = read_private_memory
    available_memory: Callable[[], int] = read_available_memory
    total_memory: Callable[[], int] = read_total_memory
    age: Callable[[int], float] = read_age
