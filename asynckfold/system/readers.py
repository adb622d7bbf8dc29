"""Counters of the kernel: busy seconds, processes, memory. psutil is used only here."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil

TICKS = os.sysconf("SC_CLK_TCK")
"""Units of the kernel's counters in a second."""

# Raised by psutil, and by reading the files below it.
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


class CounterReaders:
    """Reads the counters; tests replace it."""

    def core_seconds(self) -> dict[int, float]:
        """Return the busy seconds of each online core since boot, by core number.

        Without stolen time: fewer jobs would not bring it back.
        """
        # Not by psutil, which numbers online cores without gaps.
        lines = Path("/proc/stat").read_text().splitlines()
        cores = [line[3:].split() for line in lines if re.match(r"cpu\d", line)]
        return {
            int(number): sum(map(int, (user, nice, system, irq, softirq))) / TICKS
            for number, user, nice, system, _, _, irq, softirq, *_ in cores
        }

    def process(self, pid: int) -> tuple[float, int]:
        """Return the CPU seconds of a process, and the core it ran on last."""
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, process.cpu_num()

    def age(self, pid: int) -> float:
        """Return the age of a process in seconds, independent of the wall clock."""
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / TICKS

    def descendants(self) -> dict[int, int]:
        """Return the parent of each descendant of this process."""
        parents = {}
        for child in psutil.Process().children(recursive=True):
            try:
                parents[child.pid] = child.ppid()
            except psutil.NoSuchProcess:
                continue  # it ended between the two readings
        return parents

    def private_memory(self, pid: int) -> int:
        """Return the resident, unshared bytes of a process, which its end would free."""
        memory = psutil.Process(pid).memory_info()
        return max(0, int(memory.rss) - int(getattr(memory, "shared", 0)))

    def total_memory(self) -> int:
        """Return the bytes of memory that the machine has."""
        return int(psutil.virtual_memory().total)

    def available_memory(self) -> int:
        """Return the bytes that can be taken without swapping."""
        return int(psutil.virtual_memory().available)
