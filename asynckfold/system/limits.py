"""The cores and the memory that this process may use, and the limits that say so.

Each limit is a number of cores or None; the smallest wins and is reported by name: a quota of 1.5
cores on a host of 64 is the usual answer to "why so slow".
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asynckfold.errors import Problem, refuse


def _own_affinity() -> Collection[int]:
    return os.sched_getaffinity(0)


@dataclass(frozen=True)
class Host:
    """Where limits are read: mount points, environment, affinity; tests replace them."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    affinity: Callable[[], Collection[int]] = _own_affinity


@dataclass(frozen=True)
class Limit:
    """One limit by name, in cores; None if it does not apply."""

    name: str
    cores: int | None


def limits(host: Host | None = None) -> tuple[Limit, ...]:
    """Return every limit, also those that do not apply here.

    Raises
    ------
    InputError
        ``ASYNCKFOLD_CPU_COUNT`` is not a whole number of at least 1. Invalid variables of other
        programs are ignored.
    """
    host = host or Host()
    return (
        Limit("affinity", len(host.affinity())),
        # Of a quota, the smallest from the control group up to the root counts.
        Limit("cgroup v2 quota", _cores(_max_cores(at / "cpu.max") for at in _folders_v2(host))),
        Limit("cgroup v1 quota", _cores(_cfs_cores(at) for at in _folders_v1(host, "cpu"))),
        Limit("SLURM_CPUS_PER_TASK", _count(host, "SLURM_CPUS_PER_TASK")),
        Limit("SLURM_CPUS_ON_NODE", _count(host, "SLURM_CPUS_ON_NODE")),
        Limit("ASYNCKFOLD_CPU_COUNT", _own_count(host)),
        Limit("LOKY_MAX_CPU_COUNT", _count(host, "LOKY_MAX_CPU_COUNT")),
    )


def binding_limit(every: Collection[Limit]) -> Limit:
    """Return the smallest limit, the first of equal ones.

    >>> binding_limit([Limit("affinity", 8), Limit("cgroup v2 quota", 2), Limit("x", None)]).name
    'cgroup v2 quota'
    """
    known = [limit for limit in every if limit.cores is not None]
    return min(known, key=lambda limit: limit.cores or 0)


def allowed_cores(host: Host | None = None) -> tuple[int, ...]:
    """Return the cores of the affinity mask in ascending order, cut to the smallest limit."""
    host = host or Host()
    return tuple(sorted(host.affinity()))[: binding_limit(limits(host)).cores]


def _cores(quotas: Iterator[float | None]) -> int | None:
    """Round the smallest quota up, as joblib does."""
    quota = min((item for item in quotas if item is not None), default=None)
    return None if quota is None else max(1, math.ceil(quota))


def _count(host: Host, name: str) -> int | None:
    text = host.environ.get(name, "").strip()
    return int(text) if text.isdecimal() and int(text) >= 1 else None


def _own_count(host: Host) -> int | None:
    name = "ASYNCKFOLD_CPU_COUNT"
    count, text = _count(host, name), host.environ.get(name, "").strip()
    if text and count is None:
        rule = f"{name} must be a whole number of at least 1"
        refuse([Problem(rule, repr(text), f"Set {name}=1 or more, or unset it.")])
    return count


def _max_cores(path: Path) -> float | None:
    words = _read(path).split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None  # "max 100000": no quota
    return int(words[0]) / int(words[1])


def _cfs_cores(folder: Path) -> float | None:
    quota = _number(folder / "cpu.cfs_quota_us")
    period = _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


@dataclass(frozen=True)
class GroupMemory:
    """A control group's memory limit and its free part, in bytes."""

    limit: int
    free: int


# cgroup v1 writes "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT = 1 << 60


def group_memory(host: Host | None = None) -> GroupMemory | None:
    """Return the tightest memory limit of the control groups above this process, v1 and v2.

    Page cache that the kernel can drop (``inactive_file``) counts as free.
    """
    host = host or Host()
    groups = [
        *(_memory(folder, "memory.max", "memory.current", "") for folder in _folders_v2(host)),
        *(
            _memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            for folder in _folders_v1(host, "memory")
        ),
    ]
    known = [group for group in groups if group is not None]
    return min(known, key=lambda group: group.free) if known else None


def _memory(folder: Path, limit_file: str, usage_file: str, prefix: str) -> GroupMemory | None:
    limit, usage = _number(folder / limit_file), _number(folder / usage_file)
    if limit is None or usage is None or limit >= _NO_LIMIT:
        return None
    cached = _named(folder / "memory.stat", f"{prefix}inactive_file") or 0
    return GroupMemory(limit, max(0, limit - max(0, usage - cached)))


NEAR_LIMIT = 0.9
"""A process killed above this share of the memory limit counts as out of memory: killers in user
space, such as systemd-oomd or earlyoom, act before the limit and leave no counter."""


def oom_kills(host: Host | None = None) -> int | None:
    """Return how many processes the OOM killer has killed; None if unknown.

    From the nearest control group with a counter (``memory.events`` of v2, ``memory.oom_control``
    of v1), or else from the whole machine.
    """
    host = host or Host()
    files = [
        *(folder / "memory.events" for folder in _folders_v2(host)),
        *(folder / "memory.oom_control" for folder in _folders_v1(host, "memory")),
        host.proc / "vmstat",
    ]
    return next((count for file in files if (count := _named(file, "oom_kill")) is not None), None)


def was_short_of_memory(kills_before: int | None, peak: int, host: Host | None = None) -> bool:
    """Judge whether a killed process had run out of memory.

    `kills_before` is the value of `oom_kills` when its work began, `peak` its largest resident set.
    """
    host = host or Host()
    kills = oom_kills(host)
    if kills is not None and kills_before is not None and kills > kills_before:
        return True
    group = group_memory(host)
    total = (_named(host.proc / "meminfo", "MemTotal:") or 0) * 1024
    limit = min((size for size in (group.limit if group else 0, total) if size), default=0)
    return 0 < NEAR_LIMIT * limit <= peak


def _named(path: Path, name: str) -> int | None:
    """Return the number after a name at the beginning of a line."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _folders_v2(host: Host) -> Iterator[Path]:
    for controllers, path in _memberships(host):
        if not controllers:
            for mount in (host.cgroup, host.cgroup / "unified"):
                yield from _upward(mount, path)


def _folders_v1(host: Host, controller: str) -> Iterator[Path]:
    for controllers, path in _memberships(host):
        if controller in controllers.split(","):
            for mount in dict.fromkeys((controllers, controller)):
                yield from _upward(host.cgroup / mount, path)


def _memberships(host: Host) -> Iterator[tuple[str, str]]:
    """Yield (controllers, path) of each line ``number:controllers:path``."""
    for line in _read(host.proc / "self" / "cgroup").splitlines():
        words = line.split(":", 2)
        if len(words) == 3:
            yield words[1], words[2]


def _upward(mount: Path, path: str) -> Iterator[Path]:
    """Yield the folders from a group up to its mount; a container may only have the mount."""
    names = [name for name in path.split("/") if name not in ("", "..")]
    for length in range(len(names), -1, -1):
        yield mount.joinpath(*names[:length])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    """Return a whole number, or None: no file, "max", or -1 for no limit."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None
