"""A machine that is used as told: its counters grow, and nothing else happens."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from asynckfold.system.cpu_load import LoadSampler
from asynckfold.system.limits import Host
from asynckfold.system.readers import CounterReaders

ME = os.getpid()


class FakeMachine(CounterReaders):
    """Counters that grow as told: the share of each core, by others and by own processes."""

    def __init__(self, cores: int = 2) -> None:
        self.now = 100.0
        self.cores = dict.fromkeys(range(cores), 50.0)
        self.processes: dict[int, tuple[float, int]] = {ME: (1.0, 0)}
        self.born: dict[int, float] = {}
        self.parents: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.broken: Exception | None = None

    def clock(self) -> float:
        return self.now

    def core_seconds(self) -> Mapping[int, float]:
        if self.broken:
            raise self.broken
        return dict(self.cores)

    def process(self, pid: int) -> tuple[float, int]:
        if pid not in self.processes:
            raise psutil.NoSuchProcess(pid)
        return self.processes[pid]

    def run(
        self,
        seconds: float,
        foreign: Mapping[int, float] | None = None,
        own: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """Let time pass; `foreign` is core → share, `own` is pid → (share, core)."""
        self.now += seconds
        for core, share in (foreign or {}).items():
            self.cores[core] += share * seconds
        for pid, (share, core) in (own or {}).items():
            self.cores[core] += share * seconds
            self.processes[pid] = (self.processes[pid][0] + share * seconds, core)

    def descendants(self) -> Mapping[int, int]:
        return dict(self.parents)

    def private_memory(self, pid: int) -> int:
        return self.memory[pid]

    def available_memory(self) -> int:
        return 1000

    def total_memory(self) -> int:
        return 4000

    def age(self, pid: int) -> float:
        return self.now - self.born.get(pid, -math.inf)

    def sampler(self) -> LoadSampler:
        return LoadSampler(range(len(self.cores)), self, self.clock)


def fake_host(tmp_path: Path, cores: Iterable[int] = (0, 1, 2, 3), **environ: str) -> Host:
    found = frozenset(cores)
    return Host(tmp_path / "proc", tmp_path / "cgroup", environ, lambda: found)
