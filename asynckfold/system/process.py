"""Controls a process: affinity, niceness, memory, children; without psutil, for use in workers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def has_gpu(*, dev: Path = Path("/dev")) -> bool:
    """Return whether this machine has the device file of a GPU; loads no driver."""
    return any((dev / name).exists() for name in ("nvidiactl", "kfd", "dxg"))


def free_memory() -> int:
    """Return the bytes available without swapping; a huge number if unknown."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return 1 << 62


def open_files() -> int:
    """Return the number of open descriptors of this process; 0 if unknown."""
    try:
        return len(os.listdir(PROC / "self" / "fd"))  # noqa: PTH208
    except OSError as error:
        # At the limit not even this list can be opened.
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno == errno.EMFILE else 0


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Adopt descendants whose parents end (subreaper), whatever their group or session."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the children of this process, including adopted ones; empty if unknown."""
    pids: set[int] = set()
    for thread in _threads(os.getpid()):
        with contextlib.suppress(OSError):
            words = (PROC / "self" / "task" / str(thread) / "children").read_text().split()
            pids.update(map(int, words))
    return pids


def runaways() -> set[int]:
    """Return the children of this process that have left its session, as daemons do."""
    pids, session = set(), os.getsid(0)
    for pid in children():
        with contextlib.suppress(OSError):
            if os.getsid(pid) != session:
                pids.add(pid)
    return pids


def pin(pid: int, cores: Sequence[int]) -> bool:
    """Pin all threads of a process, 0 being the calling one; no cores change nothing.

    Returns
    -------
    bool
        False if the kernel refused (a core went offline, another user's process, the process is
        gone): it then goes on unpinned, with the same numbers.

    Examples
    --------
    >>> pin(0, sorted(os.sched_getaffinity(0)))
    True
    """
    if not cores:
        return True
    wanted, pinned = frozenset(cores), set[int]()
    while fresh := _threads(pid or os.getpid()) - pinned:
        # New threads inherit the mask of a thread that may not be pinned yet.
        for thread in fresh:
            if not _pin_thread(thread, wanted):
                return False
        pinned |= fresh
    return bool(pinned)


def _threads(pid: int) -> set[int]:
    try:
        return {int(entry.name) for entry in (PROC / str(pid) / "task").iterdir()}
    except OSError:
        return set()


def _pin_thread(thread: int, cores: frozenset[int]) -> bool:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:
        return True  # the thread ended
    except (OSError, ValueError, OverflowError):
        return False
    return True


def renice(level: int) -> None:
    """Raise the niceness of this process and its future threads and children to this level."""
    os.setpriority(os.PRIO_PROCESS, 0, max(level, os.getpriority(os.PRIO_PROCESS, 0)))


GROUP_TRIES, GROUP_SECONDS = 20, 0.1
"""The kernel accepts one change of a session's niceness per 0.1 s, over all sessions."""


def renice_session() -> bool:
    """Give a new session the niceness of its leader, this process; return whether it has it.

    If the kernel divides the CPU among sessions (autogroup, see sched(7)), niceness counts only
    within a session, and a new session starts at 0.
    """
    level = os.getpriority(os.PRIO_PROCESS, 0)
    for _ in range(GROUP_TRIES if level > 0 else 0):
        try:
            (PROC / "self" / "autogroup").write_text(str(level))
            return True
        except BlockingIOError:
            time.sleep(GROUP_SECONDS)
        except OSError:
            return False  # without autogroup niceness counts among all processes
    return False


def peak_memory(*, proc: Path = PROC) -> int:
    """Return the largest resident set since the last reset (without ``VmHWM``: ever), in bytes."""
    try:
        for line in (proc / "self" / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory(*, keeps_freed: bool = False, proc: Path = PROC) -> bool:
    """Reset the peak to the present use; return whether the kernel did it (Linux 4.0, proc(5)).

    With `keeps_freed`, free memory that malloc keeps counts. Else it is returned, and each page
    costs a fault when it is used again: a sixth of short jobs of large models.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not keeps_freed:
        trim(ctypes.c_size_t(0))
    try:
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

KEPT_BLOCK = 32 << 20
"""Largest block that is kept, in bytes: the maximum of glibc."""

KEPT_BYTES = (1 << 31) - 1
"""Free bytes that are kept at the end of the heap: the maximum of `mallopt`."""


def keep_freed_memory() -> bool:
    """Let malloc reuse freed memory instead of returning it to the kernel; before any thread.

    By default glibc maps each larger block anew, and in every training step the kernel clears the
    pages of the activations: 1,440 per step for five LeNets on 32×3×32×32 (1 core of an AMD EPYC),
    which took 7.5 ms per job instead of 5.9. Small models do not change. `reset_peak_memory`
    returns the memory. Returns False without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((_M_MMAP_THRESHOLD, KEPT_BLOCK), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in settings)
