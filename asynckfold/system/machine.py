"""What is idle on this machine right now: cores, memory, GPUs.

::

    readers: busy seconds by core ────┐
    readers: seconds of its processes ┴─ cpu_load, with hysteresis ┐
    readers, limits: available memory, control group ─────────────┼── Machine.load() → Load
    gpus: free memory and use of each visible GPU ────────────────┘

A core is busy when *others* use it. Own use is subtracted, core by core; the rest is smoothed, with
different thresholds for busy and idle; the set of busy cores changes at most twice a minute. A
value that cannot be read keeps its last state, then counts as busy: the sweep goes on, one job at a
time.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from typing import Any

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.placement import Load, Placement
from asynckfold.system.cpu_load import WINDOW_SECONDS, BusyCores, LoadSampler, with_hysteresis
from asynckfold.system.gpus import GpuLoad, GpuReading, load_nvml, read_gpus
from asynckfold.system.limits import Host, Limit, allowed_cores, binding_limit, group_memory, limits
from asynckfold.system.process import has_gpu
from asynckfold.system.readers import UNREADABLE, CounterReaders
from asynckfold.system.units import gibibytes


def resolve_n_jobs(n_jobs: int | str | None, cores: int) -> int | None:
    """Return the number of concurrent jobs, with joblib's meaning; None for ``"auto"``.

    None asks ``joblib.parallel_config``, as `joblib.effective_n_jobs` does.

    Raises
    ------
    InputError
        Neither ``"auto"`` nor None nor a whole number other than 0.

    Examples
    --------
    >>> [resolve_n_jobs(value, 4) for value in (3, -1, -2, -9, "auto")]
    [3, 4, 3, 1, None]
    """
    source = ""
    if n_jobs is None:
        n_jobs, source = _n_jobs_of_context(), " in joblib.parallel_config"
    if n_jobs is None or n_jobs == "auto":
        return None
    if not isinstance(n_jobs, int) or isinstance(n_jobs, bool) or n_jobs == 0:
        rule = f"n_jobs{source} must be 'auto' or a whole number other than 0"
        remedy = "Pass n_jobs='auto' for what is idle, -1 for all cores, 1 for one job at a time."
        refuse([Problem(rule, repr(n_jobs), remedy)])
    count = int(n_jobs)
    return count if count > 0 else max(1, cores + 1 + count)


def _n_jobs_of_context() -> Any:
    # Whoever entered a context has imported joblib; nobody else waits for its import.
    parallel = sys.modules.get("joblib.parallel")
    return None if parallel is None else parallel.get_active_backend()[1]


def total_memory() -> int:
    """Return the bytes of memory that this process may use in all; 0 if unknown."""
    total = _size(CounterReaders().total_memory) or 0
    group = group_memory()
    return min(total or group.limit, group.limit) if group else total


class Machine:
    """This machine as the placement sees it: idle cores, free memory, GPUs.

    Create it early: it knows nothing before the first window (`WINDOW_SECONDS`) has passed, or half
    of it on an idle machine.

    Parameters
    ----------
    devices : "auto", "cpu", "cuda", or sequence of int and "cpu"
        GPUs that may be used, by their index among the visible ones.
    host, readers, clock
        Sources of limits, counters and time.
    nvml : module, optional
        An initialised NVML; by default loaded unless `devices` is ``"cpu"``.
    reserve_cores : int
        Cores that are never used; at least one core remains.
    max_memory : int or None
        Limit on the memory of all jobs, in bytes.
    min_free_memory : int
        Nothing may start while less memory is free, in bytes.
    yields : bool
        Whether running jobs leave cores that others start to use, also with a given number of jobs.

    Attributes
    ----------
    cores : tuple of int
        The cores of the affinity mask at construction.
    max_cores : int
        How many of them may be used at once: the smallest limit, less the reserved ones.
    """

    def __init__(
        self,
        devices: str | Sequence[int | str] = "auto",
        *,
        host: Host | None = None,
        readers: CounterReaders | None = None,
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
        self._readers = readers or CounterReaders()
        self._devices = devices
        self._nvml, self._nvml_reason = nvml, ""
        if nvml is None and devices != "cpu":
            self._nvml, self._nvml_reason = load_nvml()
        self.cores = tuple(sorted(self._host.affinity()))
        self.max_cores = max(1, len(allowed_cores(self._host)) - reserve_cores)
        self._clock = clock
        self._sampler = LoadSampler(self.cores, self._readers, clock)
        self._gpu_load = GpuLoad(clock)
        self._busy: BusyCores | None = None

    def sample(self, workers: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Read the load; see `LoadSampler.sample`. Call it several times a second."""
        self._sampler.sample(workers)

    @property
    def known(self) -> bool:
        """Whether anything is known about other processes."""
        return self._sampler.known

    def usage(self) -> tuple[float, float, tuple[float, ...]]:
        """Return the CPU use in the last window; see `LoadSampler.usage`."""
        return self._sampler.usage()

    def load(
        self,
        n_jobs: int | None = None,
        running: Sequence[Placement] = (),
        workers: Mapping[int, tuple[int, ...]] | None = None,
        *,
        threads: int = 1,
    ) -> Load:
        """Return what this run may use now.

        Parameters
        ----------
        n_jobs : int or None
            Concurrent jobs. With None, cores that others use are left alone. A number is binding:
            that many cores are used in any case, and the load only decides which ones.
        running : sequence of Placement
            What runs now.
        workers : Mapping of int to tuple of int, optional
            Processes of this run and their pinned cores.
        threads : int
            Threads of a job, for a number of jobs.

        Returns
        -------
        Load
            Under a quota smaller than the affinity mask, `cores` are those of running jobs and the
            idlest others, so that containers on one host do not all use the first cores.
        """
        self.sample(workers)
        most = self.max_cores if n_jobs is None else len(self.cores) - self._reserved
        count = max(1, most if n_jobs is None else min(most, n_jobs * threads))
        others = self._left()
        busy = others if n_jobs is None or self._yields else frozenset[int]()
        chosen = self._choose(count, running, busy)
        idle = tuple(core for core in self._sampler.idlest if core in chosen and core not in busy)
        held = {placement.gpu for placement in running if placement.gpu is not None}
        gpus = self._gpu_load.marked(self.gpus(workers or {}), held)
        available = self._available_memory()
        memory = self._free_memory(available, workers or {})
        if self.max_memory is not None:
            memory = min(memory, self.max_memory)
        _, mine, use = self.usage()
        taken = tuple(sorted(others))
        blocked = self._blocked(available)
        return Load(tuple(sorted(chosen)), idle, memory, gpus, use, mine, blocked, taken)

    def _blocked(self, free: int | None) -> str:
        """Return why nothing may start. Unknown free memory does not block: one job runs then."""
        if free is None or free >= self._min_free_memory:
            return ""
        return (
            f"{gibibytes(free, 2)} of memory are free, and min_free_memory leaves "
            f"{gibibytes(self._min_free_memory, 2)} to others"
        )

    def unreserved(self) -> tuple[int, ...]:
        """Return all cores but the number of reserved ones, the idlest first."""
        return self._sampler.idlest[: max(1, len(self.cores) - self._reserved)]

    def _left(self) -> frozenset[int]:
        """Return the cores that are left to others."""
        busy = self._sampler.busy
        if not self._sampler.known:
            return busy
        self._busy = with_hysteresis(self._busy, busy, self._clock())
        return self._busy.busy

    def _choose(
        self, count: int, running: Sequence[Placement], busy: frozenset[int]
    ) -> frozenset[int]:
        """Return the cores that running jobs keep, then the idlest, up to `count`."""
        lost = busy if self._yields else frozenset[int]()
        cores = (core for placement in running for core in placement.cores)
        held = [core for core in cores if core in self.cores and core not in lost]
        # The number of idle cores must not change more often than the hysteresis allows.
        order = sorted(self._sampler.idlest, key=busy.__contains__)
        others = [core for core in order if core not in held]
        return frozenset(dict.fromkeys([*held, *others[: max(0, count - len(set(held)))]]))

    def free_memory(self, workers: Mapping[int, tuple[int, ...]]) -> int:
        """Return the bytes that all jobs may use: what is available, and what workers hold."""
        return self._free_memory(self._available_memory(), workers)

    def _free_memory(self, available: int | None, workers: Mapping[int, tuple[int, ...]]) -> int:
        # If unknown, one job runs at a time. The memory of a process that ended is available.
        sizes = (_size(partial(self._readers.private_memory, pid)) for pid in workers)
        return (available or 0) + sum(size or 0 for size in sizes)

    def _available_memory(self) -> int | None:
        available = _size(self._readers.available_memory)
        group = group_memory(self._host)
        if group is None or available is None:
            return available
        return min(available, group.free)

    def gpus(self, pids: Collection[int] = ()) -> GpuReading:
        """Return the GPUs that may be used, or why there are none.

        `pids` are the processes of this run.
        """
        if self._nvml is None:
            return GpuReading(reason=self._nvml_reason or "devices is 'cpu'")
        visible = self._host.environ.get("CUDA_VISIBLE_DEVICES")
        return read_gpus(self._nvml, self._devices, visible, {os.getpid(), *pids})

    @property
    def gpu_note(self) -> str:
        """Why GPUs that are there are not used; empty if all are."""
        if self._nvml is not None:
            reading = self.gpus()
            return reading.reason if reading.failures else ""
        is_wanted = self._devices != "cpu" and has_gpu()
        return f"no GPU is used: {self._nvml_reason}" if is_wanted else ""

    def limits(self, n_jobs: int | None = None) -> tuple[Limit, ...]:
        """Return every limit on the cores, including the user's."""
        reserve = self.max_cores if self._reserved else None
        return (*limits(self._host), Limit("reserve_cores", reserve), Limit("n_jobs", n_jobs))

    def describe(self, n_jobs: int | None = None) -> dict[str, Any]:
        """Return the machine as plain data, for ``asynckfold doctor`` and the store.

        Of the environment it contains only variables that control cores and devices.
        """
        every, shares, reading = self.limits(n_jobs), self._sampler.shares, self.gpus()
        group = group_memory(self._host)
        return {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": _versions(),
            "cpu": {
                "model": _cpu_model(self._host),
                "cores": os.cpu_count(),
                "affinity": list(self.cores),
                "allowed": binding_limit(every).cores,
                "limit": binding_limit(every).name,
                "limits": {limit.name: limit.cores for limit in every},
                "foreign_load": {str(core): round(shares[core], 3) for core in self.cores},
                "busy": sorted(self._sampler.busy),
            },
            "memory": {
                "total": _size(self._readers.total_memory),
                "available": self._available_memory(),
                "cgroup_limit": None if group is None else group.limit,
                "max_memory": self.max_memory,
                "min_free_memory": self._min_free_memory,
            },
            "gpus": [
                {"name": name, **{key: getattr(gpu, key) for key in _GPU_KEYS}}
                for gpu, name in zip(reading.gpus, reading.names, strict=True)
            ],
            "gpu_reason": reading.reason,
            "environment": {
                name: value
                for name, value in sorted(self._host.environ.items())
                if name.startswith(_SHOWN)
            },
        }


def watched(machine: Machine) -> Machine:
    """Return the machine after two windows of measuring its load."""
    for _ in range(2):
        time.sleep(WINDOW_SECONDS)
        machine.sample()
    return machine


_GPU_KEYS = ("index", "uuid", "free", "total", "use")

# Prefixes of environment variables to show; others may hold secrets.
_SHOWN = ("OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS", "ASYNCKFOLD_")


def _versions() -> dict[str, str]:
    """Return the versions of packages that affect the numbers, without importing them."""
    names = ("asynckfold", "torch", "torchvision", "numpy", "scikit-learn", "joblib", "psutil")
    return {name: version for name in names if (version := _version(name))}


@cache
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


def _size(read: Callable[[], float]) -> int | None:
    """Read a number of bytes; None if that fails."""
    try:
        return int(read())
    except UNREADABLE:
        return None
