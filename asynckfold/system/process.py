"""What a process can be told: which cores its threads may use, its niceness, its memory.

Everything here goes through ``/proc`` and works inside a worker, where psutil is not loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def has_gpu(*, dev: Path = Path("/dev")) -> bool:
    """Return whether this machine has a device in which torch may see a GPU; asks no driver."""
    return any((dev / name).exists() for name in ("nvidiactl", "kfd", "dxg"))


def free_memory(*, proc: Path = PROC) -> int:
    """Return the bytes that this machine can give without swapping; very many where unknown."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return 1 << 62


def open_files(*, proc: Path = PROC) -> int:
    """Return how many descriptors this process has open; 0 where that cannot be known."""
    try:
        return len(os.listdir(proc / "self" / "fd"))  # noqa: PTH208
    except OSError as error:
        # Where it may open no more, not even this list: all that it may.
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno == errno.EMFILE else 0


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, the process `parent`, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Let what is started below this process be its child once its own parents are gone.

    Whatever group or session it has made for itself, it is found among the `children` then.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(*, proc: Path = PROC) -> set[int]:
    """Return the children of this process, adopted ones too; none where that cannot be known."""
    found: set[int] = set()
    for thread in _threads(os.getpid(), proc):
        with contextlib.suppress(OSError):
            words = (proc / "self" / "task" / str(thread) / "children").read_text().split()
            found.update(map(int, words))
    return found


def runaways() -> set[int]:
    """Return the children of this process that have left its session, as daemons do."""
    found, own = set(), os.getsid(0)
    for pid in children():
        with contextlib.suppress(OSError):
            if os.getsid(pid) != own:
                found.add(pid)
    return found


def pin(pid: int, cores: Sequence[int], *, proc: Path = PROC) -> bool:
    """Let all threads of a process run on these cores only.

    Parameters
    ----------
    pid : int
        The process; 0 is the calling one.
    cores : sequence of int
        Core numbers; empty leaves the process as it is.
    proc : Path
        Where the process file system is.

    Returns
    -------
    bool
        False when the kernel refused (a core was taken offline, another user's process, the
        process is gone): it then runs on, less well placed, with the same numbers.

    Examples
    --------
    >>> pin(0, sorted(os.sched_getaffinity(0)))
    True
    """
    if not cores:
        return True
    wanted, pinned = frozenset(cores), set[int]()
    while fresh := _threads(pid or os.getpid(), proc) - pinned:
        # Threads that start meanwhile inherit the mask of a thread that may not be pinned yet.
        for thread in fresh:
            if not _pin_thread(thread, wanted):
                return False
        pinned |= fresh
    return bool(pinned)


def _threads(pid: int, proc: Path) -> set[int]:
    try:
        return {int(entry.name) for entry in (proc / str(pid) / "task").iterdir()}
    except OSError:
        return set()


def _pin_thread(thread: int, cores: frozenset[int]) -> bool:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:
        return True  # the thread ended; the others are still to be pinned
    except (OSError, ValueError, OverflowError):
        return False
    return True


def renice(level: int) -> None:
    """Be at least so nice, and all that is started from now on with it; call it before any thread.

    A process that is nicer already stays so: only a superuser could take that back.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(level, os.getpriority(os.PRIO_PROCESS, 0)))


GROUP_TRIES, GROUP_SECONDS = 20, 0.1
"""The kernel takes one change of a session's level in 0.1 s, of all sessions together."""


def renice_session(*, proc: Path = PROC) -> bool:
    """Give a new session the niceness of this process, which leads it; return whether it has it.

    Where the kernel shares out the CPU among sessions (autogroup, see sched(7)), a level counts
    only within its session, and a new session begins without one.
    """
    level = os.getpriority(os.PRIO_PROCESS, 0)
    for _ in range(GROUP_TRIES if level > 0 else 0):
        try:
            (proc / "self" / "autogroup").write_text(str(level))
            return True
        except BlockingIOError:
            time.sleep(GROUP_SECONDS)
        except OSError:
            return False  # a kernel without it, where levels count among all processes
    return False


def peak_memory(*, proc: Path = PROC) -> int:
    """Return the largest resident set of this process since the last reset, in bytes.

    Without ``VmHWM`` it is the peak since the start of the process.
    """
    try:
        for line in (proc / "self" / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no process file system: the older call below knows it as well
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory(*, proc: Path = PROC) -> bool:
    """Start the peak anew from what is in use now; return whether the kernel did it.

    Writes 5 to ``clear_refs``, see proc(5); Linux 4.0 or newer.
    """
    _give_back_memory()
    try:
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

KEPT_BLOCK = 32 << 20
"""Bytes of the largest block that is kept: glibc takes no more."""

KEPT_BYTES = (1 << 31) - 1
"""Free bytes at the end of the heap that are kept: the most that `mallopt` can be told."""


def keep_freed_memory() -> bool:
    """Let malloc reuse what is freed instead of returning it to the kernel; before any thread.

    By default glibc maps each larger block anew, and every step of a training pays for the kernel
    to clear the pages of its activations: 1,440 a step for five LeNets on 32×3×32×32 (1 core of an
    AMD EPYC), which then took 7.5 ms a job instead of 5.9. Small models do not change. What is kept
    is given back by `reset_peak_memory`.

    Returns
    -------
    bool
        False where the C library is no glibc, and nothing changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((_M_MMAP_THRESHOLD, KEPT_BLOCK), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in settings)


def _give_back_memory() -> None:
    """Return what malloc keeps to the kernel, so that it is counted for nobody."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
