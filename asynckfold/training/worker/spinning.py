"""Adapt how threads wait for each other to whether other processes use the same cores.

After each parallel part of a step, libgomp's threads spin for some milliseconds. On idle cores that
is fastest; on shared ones a spinning thread takes the place of the one that it waits for: at load 5
to 8 on 2 cores (AMD EPYC, torch 2.15), a step of LeNet took 140 to 430 ms, and 13 to 33 with little
spinning. At rest, little spinning costs: 7 ms instead of 3 for LeNet, 129 instead of 113 for VGG11.

So a worker measures how long its threads wait for a core. If they do, it tries little spinning, and
keeps the faster way for some seconds. libgomp takes no new settings once it runs, but spins little
when it has more threads than cores (``gomp_throttled_spin_count_var``, libgomp's
config/linux/wait.h): so it gets a further pool of sleeping threads. How threads wait changes no
bit.

::

    spinning ── they wait for cores ──► little, on trial ── slower ──► spinning, for a while
        ▲                                   └─ as fast, or faster ─┐
        └──────── they have their cores, or a while is over ───────┴─► little
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
"""The number of cores that libgomp assumes: those of the process when torch was imported."""

LOOK_SECONDS, LOOK_BATCHES = 0.25, 2
"""Least length of a measurement."""

CROWDED, CALM = 0.1, 0.05
"""Seconds that all threads together wait for a core, per second: from the first on, little spinning
is tried; below the second, threads spin. Two threads on two idle cores wait 0.01 to 0.03, beside
one busy process about 0.5."""

WHILE = 64
"""Measurements after which the slower way is tried again: other processes come and go."""


def waited(proc: Path = Path("/proc")) -> float:
    """Return the seconds that runnable threads of this process waited for a core.

    The second number of ``schedstat`` (see the kernel's sched-stats.rst); 0 if it is not counted.
    """
    try:
        files = [task / "schedstat" for task in (proc / "self" / "task").iterdir()]
    except OSError:
        return 0.0
    return sum(map(_waited, files)) / 1e9


def _waited(file: Path) -> int:
    try:
        return int(file.read_text().split()[1])
    except (OSError, IndexError):
        return 0  # the thread ended


class SpinSwitch:
    """Switches a worker's threads between spinning and little spinning.

    `add_threads` starts sleeping threads in libgomp, see `add_sleeping_threads`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] = waited,
        add_threads: Callable[[int], Callable[[], None] | None] | None = None,
    ) -> None:
        self._clock, self._waited, self._add_threads = (
            clock,
            waited,
            add_threads or add_sleeping_threads,
        )
        self._end_threads: Callable[[], None] | None = None
        self._refused = False
        self._to_beat: float | None = None
        self._looks_left = self._batches = 0
        self._at, self._before = clock(), waited()

    @property
    def little(self) -> bool:
        """Whether threads spin little now."""
        return self._end_threads is not None

    def look(self) -> None:
        """Count a batch; now and then measure, and decide."""
        self._batches += 1
        now = self._clock()
        passed = now - self._at
        if passed < LOOK_SECONDS or self._batches < LOOK_BATCHES:
            return
        waited = self._waited() if torch.get_num_threads() > 1 else self._before
        # The seconds of threads that ended are missing from the sum.
        share, rate = max(0.0, waited - self._before) / passed, self._batches / passed
        self._at, self._before, self._batches = now, waited, 0
        if share < CALM:
            self.end()
        elif self.little:
            self._judge(rate)
        elif share >= CROWDED:
            self._try(rate)

    def _try(self, rate: float) -> None:
        self._looks_left -= 1
        if self._looks_left >= 0 or self._refused:
            return
        self._end_threads = self._add_threads(CORES)
        self._refused, self._to_beat = not self.little, rate

    def _judge(self, rate: float) -> None:
        self._looks_left -= 1
        if self._to_beat is not None:
            slower, self._to_beat, self._looks_left = rate < self._to_beat, None, WHILE
            if slower:
                self._spin()
        elif self._looks_left < 0:
            self._spin()

    def _spin(self) -> None:
        if self._end_threads is not None:
            self._end_threads()
            self._end_threads = None

    def end(self) -> None:
        """Return to spinning."""
        self._spin()
        self._to_beat, self._looks_left = None, 0


def add_sleeping_threads(count: int) -> Callable[[], None] | None:
    """Start `count` sleeping threads in libgomp; return a function that ends them.

    None if torch uses another library.
    """
    library = _libgomp()
    if library is None:
        return None
    there, over = threading.Event(), threading.Event()

    def keep() -> None:
        # A pool belongs to the thread that started it, and ends with it.
        library.GOMP_parallel(
            ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p), None, count + 1, 0
        )
        there.set()
        over.wait()

    keeper = threading.Thread(target=keep, name="spinning", daemon=True)
    keeper.start()
    there.wait()

    def end_threads() -> None:
        over.set()
        keeper.join()

    return end_threads


@cache
def _libgomp() -> ctypes.CDLL | None:
    """Return torch's OpenMP library, if it is GNU's."""
    try:
        if "libgomp" not in Path("/proc/self/maps").read_text():
            return None
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.GOMP_parallel.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
        ]
        library.GOMP_parallel.restype = None
        return library if library.omp_get_thread_num else None
    except (OSError, AttributeError):
        return None
