"""What the machine has idle right now: cores, memory, GPUs. The only place of psutil and NVML.

::

    per-core busy seconds ─┐
    own processes' seconds ─┴─ foreign_shares() ── settle() ──┐
    available memory, control group, own resident memory ─────┼── Machine.load() → placement.Load
    NVML: free memory and use of each visible GPU ────────────┘

A core is busy when *others* use it. What this run uses is subtracted, core by core; what remains is
smoothed, and a core changes its mind at two different thresholds; the run changes its own at most
twice a minute (`steady`). Whatever cannot be read is
unknown, and the unknown is treated as it was, then as busy: the sweep goes on, one job at a time.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from asynckfold.engines.limits import (
    Host,
    Limit,
    allowed_cores,
    binding_limit,
    group_memory,
    limits,
)
from asynckfold.engines.steady import Mind, reconsider
from asynckfold.errors import Problem, refuse
from asynckfold.placement import Gpu, Load, Placement

# The kernel counts CPU time in ticks of 10 ms: a shorter window is wrong by more than 5 %.
WINDOW_SECONDS = 0.2
# Time constant of the smoothing: a lasting load is seen after 0.4 s and forgotten after 1.9 s,
# while a burst of 0.2 s (a shell, a save, a cron job) stays below BUSY_SHARE.
SMOOTHING_SECONDS = 1.0
# Beside a foreign share of 0.3 a job would get 0.7 of its core at most, and takes as much from the
# other; below 0.15 is what a desktop or a daemon needs anyway. The gap between the two is what
# keeps a core from changing its mind with every window.
BUSY_SHARE, IDLE_SHARE = 0.3, 0.15
# How long the last known state of a core stands for one that cannot be read.
STALE_SECONDS = 5.0
# Looking for the children of workers walks through all processes: 1 ms per 70 of them.
CHILDREN_SECONDS = 2.0
# Cores whose smoothed share differs by less are equally idle, so that noise does not choose.
_EQUAL_SHARE = 0.1

# What psutil and the files below it raise when a reading fails.
_UNREADABLE = (
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


# CPU: what others use


@dataclass(frozen=True)
class OwnUse:
    """CPU seconds of an own process in one window, and the cores it may have used, first choice
    first; NaN where they are not known.
    """

    seconds: float
    cores: tuple[int, ...]
    pinned: bool


def foreign_shares(
    busy: Mapping[int, float], own: Sequence[OwnUse], window: float
) -> dict[int, float]:
    """Return the share of each core that others used.

    Pinned processes are subtracted first and from their own cores only. A process that may run
    anywhere is subtracted from the core it ran on last, and where that one was not busy enough,
    from the others: the sum is right even when it moved within the window.

    Parameters
    ----------
    busy : Mapping of int to float
        Busy seconds of each core in the window; NaN where not known.
    own : sequence of OwnUse
        What this run used.
    window : float
        Seconds.

    Returns
    -------
    dict of int to float
        0 to 1; NaN where not known.

    Examples
    --------
    >>> foreign_shares({0: 1.0, 1: 0.5}, [OwnUse(1.0, (0,), True)], 1.0)
    {0: 0.0, 1: 0.5}
    """
    left = dict(busy)
    for use in sorted(own, key=lambda use: not use.pinned):
        if math.isnan(use.seconds):
            left |= {core: math.nan for core in use.cores if use.pinned and core in left}
        else:
            _subtract(left, use)
    return {core: _share(seconds, window) for core, seconds in left.items()}


def _share(seconds: float, window: float) -> float:
    """0 to 1, or NaN, which `min` and `max` alone would turn into a number."""
    return seconds if math.isnan(seconds) else min(1.0, max(0.0, seconds / window))


def _subtract(left: dict[int, float], use: OwnUse) -> None:
    """Take a process' seconds off its cores: evenly where pinned, else in order of choice."""
    cores = [core for core in use.cores if left.get(core, math.nan) > 0]
    rest = use.seconds
    if use.pinned:
        total = sum(left[core] for core in cores)
        part = min(1.0, rest / total) if total else 0.0
        left |= {core: left[core] * (1 - part) for core in cores}
        return
    for core in cores:
        taken = min(rest, left[core])
        left[core] -= taken
        rest -= taken


@dataclass(frozen=True)
class CoreState:
    """What is thought of one core: smoothed foreign share, verdict, and when it was last known."""

    share: float
    busy: bool
    known_at: float


def settle(before: CoreState | None, share: float, window: float, now: float) -> CoreState:
    """Return the new state of a core after a window in which others used `share` of it.

    An exponential moving average over time, so that windows of any length weigh by their seconds,
    and two thresholds. An unknown share (NaN) keeps the old state for a while; then, and without
    an old state, the core is busy.

    Examples
    --------
    >>> state = settle(None, 0.0, 1.0, now=1.0)
    >>> state.busy, settle(state, 1.0, 0.2, now=1.2).busy, settle(state, 1.0, 0.4, now=1.4).busy
    (False, False, True)
    """
    if not math.isfinite(share):
        if before is None:
            return CoreState(1.0, True, -math.inf)
        stale = now - before.known_at > STALE_SECONDS
        return CoreState(1.0, True, before.known_at) if stale else before
    if before is None or before.known_at == -math.inf:
        return CoreState(share, share > BUSY_SHARE, now)
    weight = 1 - math.exp(-window / SMOOTHING_SECONDS)
    smooth = before.share + weight * (share - before.share)
    busy = smooth > (IDLE_SHARE if before.busy else BUSY_SHARE)
    return CoreState(smooth, busy, now)


@dataclass(frozen=True)
class _Reading:
    """Counters at one moment."""

    at: float
    cores: Mapping[int, float]
    processes: Mapping[int, tuple[float, int]]


class LoadSampler:
    """Which cores others use; primed at construction, cheap to ask often.

    Parameters
    ----------
    cores : sequence of int
        The cores to watch.
    readers : Readers
        Where the counters come from.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        cores: Sequence[int],
        readers: Readers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cores = tuple(cores)
        self._readers = readers or Readers()
        self._clock = clock
        self._parents: Mapping[int, int] = {}
        self._parents_at = -math.inf
        self._usage: tuple[float, float, tuple[float, ...]] = (0.0, 0.0, (0.0,) * len(self.cores))
        self._states = {core: settle(None, math.nan, 0.0, 0.0) for core in self.cores}
        self._last = self._read({os.getpid(): ()})

    def sample(self, own: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Look again, if the last look is at least a window ago.

        Parameters
        ----------
        own : Mapping of int to tuple of int, optional
            Processes that this run started and the cores each is pinned to, empty for none; their
            children count as theirs. The calling process is always own, its other children are not.
        """
        elapsed = self._clock() - self._last.at
        if elapsed < WINDOW_SECONDS:
            return
        family = self._family(dict(own or {}))
        last, self._last = self._last, self._read(family)
        window = self._last.at - last.at
        busy = {core: _delta(last.cores, self._last.cores, core) for core in self.cores}
        uses = [self._own_use(pid, pinned, last) for pid, pinned in family.items()]
        for core, share in foreign_shares(busy, uses, window).items():
            self._states[core] = settle(self._states[core], share, window, self._last.at)
        self._usage = self._used(busy, uses, window)

    @property
    def known(self) -> bool:
        """Whether anything was read of any core so far."""
        return any(state.known_at > -math.inf for state in self._states.values())

    @property
    def busy(self) -> frozenset[int]:
        """Cores that others use."""
        return frozenset(core for core, state in self._states.items() if state.busy)

    @property
    def shares(self) -> dict[int, float]:
        """Smoothed share of each core that others use; 1 where nothing is known."""
        return {core: state.share for core, state in self._states.items()}

    @property
    def idlest(self) -> tuple[int, ...]:
        """All watched cores: those that others leave alone first, equals by number."""

        def order(core: int) -> tuple[bool, int, int]:
            state = self._states[core]
            return (state.busy, round(state.share / _EQUAL_SHARE), core)

        return tuple(sorted(self.cores, key=order))

    def usage(self) -> tuple[float, float, tuple[float, ...]]:
        """Return the use in the last window: by everyone and by this run, in cores' worth, and of
        each watched core, 0 to 1. What could not be read stays as it was.
        """
        return self._usage

    def _used(
        self, busy: Mapping[int, float], uses: Sequence[OwnUse], window: float
    ) -> tuple[float, float, tuple[float, ...]]:
        cores = tuple(
            before if math.isnan(busy[core]) else min(1.0, busy[core] / window)
            for core, before in zip(self.cores, self._usage[2], strict=True)
        )
        own = sum(use.seconds for use in uses if not math.isnan(use.seconds)) / window
        return sum(cores), min(own, sum(cores)), cores

    def _own_use(self, pid: int, pinned: tuple[int, ...], last: _Reading) -> OwnUse:
        now = self._last.processes.get(pid)
        seconds = _delta(
            {key: value[0] for key, value in last.processes.items()},
            {} if now is None else {pid: now[0]},
            pid,
        )
        if pinned or now is None:
            return OwnUse(seconds, pinned, bool(pinned))
        others = sorted(
            (core for core in self.cores if core != now[1]),
            key=lambda core: -_known(_delta(last.cores, self._last.cores, core)),
        )
        return OwnUse(seconds, (now[1], *others), False)

    def _family(self, own: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Own processes, their descendants with the cores they inherited, and this process."""
        if own and self._clock() - self._parents_at >= CHILDREN_SECONDS:
            try:
                self._parents = dict(self._readers.descendants())
            except _UNREADABLE:
                self._parents = {}  # their use counts as foreign, which is the careful side
            self._parents_at = self._clock()
        family = dict(own)
        for pid in self._parents:
            ancestor = next((name for name in self._ancestors(pid) if name in own), None)
            if ancestor is not None:
                family[pid] = own[ancestor]
        return {os.getpid(): (), **family}

    def _ancestors(self, pid: int) -> Iterator[int]:
        """The process itself, its parent, and so on, below this process."""
        for _ in range(len(self._parents)):
            yield pid
            pid = self._parents.get(pid, 0)

    def _read(self, own: Mapping[int, tuple[int, ...]]) -> _Reading:
        try:
            found = self._readers.core_seconds()
            cores = {core: float(value) for core, value in found.items() if value >= 0}
        except _UNREADABLE:
            cores = {}
        processes = {}
        for pid in own:
            try:
                seconds, core = self._readers.process(pid)
                processes[pid] = (float(seconds), int(core))
            except _UNREADABLE:
                continue  # ended or not ours to look at: unknown in this window
        return _Reading(self._clock(), cores, processes)


def _size(read: Callable[[], float]) -> int | None:
    """Read a number of bytes; None where that fails or makes no sense."""
    try:
        size = read()
        return int(size) if 0 <= size < math.inf else None
    except _UNREADABLE:
        return None


def _delta(before: Mapping[int, float], after: Mapping[int, float], key: int) -> float:
    """Growth of a counter; NaN where it is unknown or went backwards."""
    growth = after.get(key, math.nan) - before.get(key, math.nan)
    return growth if math.isfinite(growth) and growth >= 0 else math.nan


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


# GPUs


def load_nvml() -> tuple[Any, str]:
    """Return the started NVML module, or None and the reason why there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed: pip install 'asynckfold[gpu]'"
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, *_UNREADABLE) as error:
        return None, f"NVML does not start: {error}"
    return nvml, ""


@dataclass(frozen=True)
class GpuReading:
    """The GPUs that this run may use, by name, and in words what is missing."""

    gpus: tuple[Gpu, ...] = ()
    names: tuple[str, ...] = ()
    reason: str = ""


def read_gpus(
    nvml: Any, devices: str | Sequence[int], visible: str | None, own: Collection[int] = ()
) -> GpuReading:
    """Read each GPU that torch would see; creates no CUDA context.

    One GPU that fails never hides the others.

    Parameters
    ----------
    nvml : module
        ``pynvml``, started.
    devices : "auto", "cpu", "cuda", or sequence of int
        Which to use, by torch's index.
    visible : str or None
        ``CUDA_VISIBLE_DEVICES``.
    own : collection of int
        Own processes, whose memory is told as ``Gpu.own``.

    Returns
    -------
    GpuReading
        ``Gpu.index`` is torch's index: as in torch, the position in ``CUDA_VISIBLE_DEVICES``, in
        NVML's order (which is CUDA's for GPUs of one kind).
    """
    if devices == "cpu":
        return GpuReading(reason="devices is 'cpu'")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except (nvml.NVMLError, *_UNREADABLE) as error:
        return GpuReading(reason=f"NVML cannot list the GPUs: {error}")
    order = visible_order(visible, uuids)
    asked = range(len(order)) if isinstance(devices, str) else devices
    found, names, reasons = [], [], []
    for index in asked:
        if not 0 <= index < len(order):
            reasons.append(f"GPU {index} is not there: {len(order)} visible")
            continue
        try:
            found.append(_read_gpu(nvml, handles[order[index]], index, own))
            names.append(_text(nvml.nvmlDeviceGetName(handles[order[index]])))
        except (nvml.NVMLError, *_UNREADABLE) as error:
            reasons.append(f"GPU {index} cannot be read: {error}")
    if not order:
        reasons.append(_none_visible(len(uuids), visible))
    return GpuReading(tuple(found), tuple(names), "; ".join(reasons))


def _read_gpu(nvml: Any, handle: Any, index: int, own: Collection[int]) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    free, total = int(memory.free), int(memory.total)
    if not 0 <= free <= total:
        raise ValueError(f"{free} of {total} bytes are free")
    try:
        use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except (nvml.NVMLError, *_UNREADABLE):
        use = 0.0  # some GPUs do not count it; memory decides
    held = min(_held_by(nvml, handle, own), total - free) if own else 0
    return Gpu(index, free, total, use if 0 <= use <= 1 else 0.0, held)


def _held_by(nvml: Any, handle: Any, own: Collection[int]) -> int:
    """Bytes of a GPU that own processes hold; 0 where it does not know them, as in a container."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        sizes = [int(item.usedGpuMemory or 0) for item in running if item.pid in own]
    except (nvml.NVMLError, *_UNREADABLE):
        return 0
    return sum(size for size in sizes if size > 0)


def _none_visible(count: int, visible: str | None) -> str:
    if not count:
        return "NVML sees no GPU"
    return f"CUDA_VISIBLE_DEVICES={visible!r} hides all {count} GPUs"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_order(visible: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return NVML's index of each GPU that CUDA shows, in CUDA's order.

    As CUDA reads it: numbers or beginnings of UUIDs; the first wrong entry ends the list; a GPU
    named twice hides them all.

    Examples
    --------
    >>> visible_order("1,GPU-a", ["GPU-abc", "GPU-def"]), visible_order("0,-1,1", ["x", "y"])
    ((1, 0), (0,))
    """
    if visible is None:
        return tuple(range(len(uuids)))
    order: list[int] = []
    for entry in visible.split(","):
        found = _by_entry(entry.strip(), uuids)
        if found is None:
            break
        order.append(found)
    return tuple(order) if len(set(order)) == len(order) else ()


def _by_entry(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [number for number, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


# The whole


def resolve_n_jobs(n_jobs: int | str, cores: int) -> int | None:
    """Return how many jobs run at once, with joblib's meaning; None for ``"auto"``.

    Parameters
    ----------
    n_jobs : int or "auto"
        -1 is all cores, -2 all but one; ``"auto"`` is what is idle.
    cores : int
        How many cores may be used.

    Raises
    ------
    InputError
        0, or something else.

    Examples
    --------
    >>> [resolve_n_jobs(value, 4) for value in (3, -1, -2, -9, "auto")]
    [3, 4, 3, 1, None]
    """
    if n_jobs == "auto":
        return None
    if not isinstance(n_jobs, int) or isinstance(n_jobs, bool) or n_jobs == 0:
        rule = "n_jobs must be 'auto' or a whole number other than 0"
        remedy = "Pass n_jobs='auto' for what is idle, -1 for all cores, 1 for one job at a time."
        refuse([Problem(rule, repr(n_jobs), remedy)])
    count = int(n_jobs)
    return count if count > 0 else max(1, cores + 1 + count)


def total_memory(host: Host | None = None, readers: Readers | None = None) -> int:
    """Return the bytes of memory that this process may use in all; 0 where unknown."""
    total = _size((readers or Readers()).total_memory) or 0
    group = group_memory(host)
    return min(total or group.limit, group.limit) if group else total


class Machine:
    """This machine as the placement sees it: idle cores, free memory, GPUs.

    Make it early: it knows nothing before the first window (`WINDOW_SECONDS`) has passed.

    Parameters
    ----------
    devices : "auto", "cpu", "cuda", or sequence of int
        Which GPUs may be used, by torch's index.
    host, readers, clock
        Where limits, counters and time come from.
    nvml : module, optional
        A started NVML; by default it is looked for unless `devices` is ``"cpu"``.
    reserve_cores : int
        Cores that are left free whoever is there; at least one stays.
    max_memory : int or None
        Bytes that all jobs may take.
    min_free_memory : int
        Bytes; while less is free, nothing may start.
    yields : bool
        Whether running jobs make room for others: also a given number of jobs then leaves alone the
        cores that others use, and running ones hold no core to which others came.

    Attributes
    ----------
    cores : tuple of int
        The cores of the affinity mask at construction; `usage` reports these.
    max_cores : int
        How many of them may be used at once: the smallest limit, less those that are reserved.
    max_memory : int or None
        As given.
    """

    def __init__(
        self,
        devices: str | Sequence[int] = "auto",
        *,
        host: Host | None = None,
        readers: Readers | None = None,
        clock: Callable[[], float] = time.monotonic,
        nvml: Any = None,
        reserve_cores: int = 0,
        max_memory: int | None = None,
        min_free_memory: int = 0,
        yields: bool = False,
    ) -> None:
        self._yields = yields
        self._reserved = reserve_cores
        self.max_memory = max_memory
        self._min_free_memory = min_free_memory
        self._host = host or Host()
        self._readers = readers or Readers()
        self._devices = devices
        self._nvml, self._nvml_reason = nvml, ""
        if nvml is None and devices != "cpu":
            self._nvml, self._nvml_reason = load_nvml()
        self.cores = tuple(sorted(self._host.affinity()))
        self.max_cores = max(1, len(allowed_cores(self._host)) - reserve_cores)
        self._clock = clock
        self._sampler = LoadSampler(self.cores, self._readers, clock)
        self._mind: Mind | None = None

    def sample(self, own: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Look at the load; see `LoadSampler.sample`. Call it several times a second."""
        self._sampler.sample(own)

    def usage(self) -> tuple[float, float, tuple[float, ...]]:
        """Return the CPU use in the last window; see `LoadSampler.usage`."""
        return self._sampler.usage()

    def load(
        self,
        n_jobs: int | None = None,
        running: Sequence[Placement] = (),
        own: Mapping[int, tuple[int, ...]] | None = None,
        *,
        threads: int = 1,
        reserve_gpu_memory: int = 0,
    ) -> Load:
        """Return what this run may use now.

        Parameters
        ----------
        n_jobs : int or None
            Jobs at once. None is live: cores that others use are left alone. A number is the
            user's word: that many cores' worth is used whoever else is there, and only the choice
            of cores follows the load. No core is ever booked twice.
        running : sequence of Placement
            What runs now.
        own : Mapping of int to tuple of int, optional
            Own processes and the cores each is pinned to.
        threads : int
            Threads of a job, for a number of jobs.
        reserve_gpu_memory : int
            Bytes on each GPU that are not to be touched.

        Returns
        -------
        Load
            Under a quota smaller than the affinity mask, `cores` are those that own jobs hold and
            the idlest others: containers on one host do not all take the first ones.
        """
        self.sample(own)
        most = self.max_cores if n_jobs is None else len(self.cores) - self._reserved
        count = max(1, most if n_jobs is None else min(most, n_jobs * threads))
        others = self._left()
        busy = others if n_jobs is None or self._yields else frozenset[int]()
        chosen = self._choose(count, running, busy)
        idle = tuple(core for core in self._sampler.idlest if core in chosen and core not in busy)
        gpus = tuple(
            replace(gpu, free=max(0, gpu.free - reserve_gpu_memory))
            for gpu in self.gpus(own or {}).gpus
        )
        memory = self.free_memory(own or {})
        if self.max_memory is not None:
            memory = min(memory, self.max_memory)
        _, mine, use = self.usage()
        taken = tuple(sorted(others))
        return Load(tuple(sorted(chosen)), idle, memory, gpus, use, mine, self._blocked(), taken)

    def _blocked(self) -> str:
        """What is unknown cannot be watched: then it is one job at a time that spares memory."""
        free = self._available_memory()
        if free is None or free >= self._min_free_memory:
            return ""
        return (
            f"{free >> 20} MiB of memory are free, and min_free_memory leaves "
            f"{self._min_free_memory >> 20} MiB to others"
        )

    def unreserved(self) -> tuple[int, ...]:
        """Return the idlest cores, without as many as are reserved: for what needs them all."""
        return self._sampler.idlest[: max(1, len(self.cores) - self._reserved)]

    def _left(self) -> frozenset[int]:
        """The cores that are left to others."""
        busy = self._sampler.busy
        if not self._sampler.known:
            return busy
        self._mind = reconsider(self._mind, busy, self._clock())
        return self._mind.busy

    def _choose(
        self, count: int, running: Sequence[Placement], busy: frozenset[int]
    ) -> frozenset[int]:
        """The cores of running jobs, if they do not yield them, then the idlest, up to `count`."""
        lost = busy if self._yields else frozenset[int]()
        cores = (core for placement in running for core in placement.cores)
        held = [core for core in cores if core in self.cores and core not in lost]
        # How many cores are idle must not change more often than the mind does.
        order = sorted(self._sampler.idlest, key=busy.__contains__)
        others = [core for core in order if core not in held]
        return frozenset(dict.fromkeys([*held, *others[: max(0, count - len(set(held)))]]))

    def free_memory(self, own: Mapping[int, tuple[int, ...]]) -> int:
        """Return bytes that jobs may take in all: what is available, and what own workers hold."""
        available = self._available_memory() or 0  # unknown: one job at a time
        return available + sum(self._private_memory(pid) for pid in own)

    def _available_memory(self) -> int | None:
        available = _size(self._readers.available_memory)
        group = group_memory(self._host)
        if group is None or available is None:
            return available
        return min(available, group.free)

    def _private_memory(self, pid: int) -> int:
        # Unknown where it ended: then its memory is available by now.
        return _size(lambda: self._readers.private_memory(pid)) or 0

    def gpus(self, own: Collection[int] = ()) -> GpuReading:
        """Return the GPUs that may be used, and why there are none; `own` are own processes."""
        if self._nvml is None:
            return GpuReading(reason=self._nvml_reason or "devices is 'cpu'")
        visible = self._host.environ.get("CUDA_VISIBLE_DEVICES")
        return read_gpus(self._nvml, self._devices, visible, own)

    def limits(self, n_jobs: int | None = None) -> tuple[Limit, ...]:
        """Return every limit of the cores, what was asked for among them."""
        reserve = self.max_cores if self._reserved else None
        asked = (Limit("reserve_cores", reserve), Limit("n_jobs", n_jobs))
        return (*limits(self._host), *asked)

    def describe(self, n_jobs: int | None = None) -> dict[str, Any]:
        """Return what ``asynckfold doctor`` shows and a run remembers of its machine: plain data.

        Of the environment only variables that steer cores and devices are told.

        Parameters
        ----------
        n_jobs : int or None
            How many jobs were asked for, of one thread each.
        """
        found, shares = self.limits(n_jobs), self._sampler.shares
        return {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": _versions(),
            "cpu": {
                "model": _cpu_model(self._host),
                "cores": os.cpu_count(),
                "affinity": list(self.cores),
                "allowed": binding_limit(found).cores,
                "limit": binding_limit(found).name,
                "limits": {limit.name: limit.cores for limit in found},
                "foreign_load": {str(core): round(shares[core], 3) for core in self.cores},
                "busy": sorted(self._sampler.busy),
            },
            "memory": self._describe_memory(),
            "gpus": self._describe_gpus(),
            "gpu_reason": self.gpus().reason,
            "environment": {
                name: value
                for name, value in sorted(self._host.environ.items())
                if name.startswith(_TELLABLE)
            },
        }

    def _describe_memory(self) -> dict[str, int | None]:
        group = group_memory(self._host)
        return {
            "total": _size(self._readers.total_memory),
            "available": self._available_memory(),
            "cgroup_limit": None if group is None else group.limit,
            "max_memory": self.max_memory,
            "min_free_memory": self._min_free_memory,
        }

    def _describe_gpus(self) -> list[dict[str, Any]]:
        reading = self.gpus()
        return [
            {"index": gpu.index, "name": name, "free": gpu.free, "total": gpu.total, "use": gpu.use}
            for gpu, name in zip(reading.gpus, reading.names, strict=True)
        ]


def watched(machine: Machine) -> Machine:
    """Return the machine after two windows: one primes the sampler, one is smoothed with it."""
    for _ in range(2):
        time.sleep(WINDOW_SECONDS)
        machine.sample()
    return machine


# Prefixes of environment variables that may be told; everything else may be a secret.
_TELLABLE = ("OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS", "ASYNCKFOLD_")


def _versions() -> dict[str, str]:
    """Versions of what matters to the numbers, without importing any of it."""
    names = ("asynckfold", "torch", "torchvision", "numpy", "scikit-learn", "joblib", "psutil")
    return {name: version for name in names if (version := _version(name))}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model(host: Host) -> str:
    try:
        lines = (host.proc / "cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
