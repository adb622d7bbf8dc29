"""Cores or a GPU for each candidate: the division with which the simulated sweep ends first; pure.

::

    candidates ── most gained by a GPU first ──► 0, 1, 2 … of them on GPUs: the best few, simulated
                                                                                          │
    the best found ◄── one candidate moved, or two exchanged, for as long as that helps ◄─┘

All jobs of a candidate run on one kind of device, since it changes bits. For the same reason the
division depends on the GPUs that may be used, and not on who uses them at the moment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from asynckfold.jobs.placement import Request
from asynckfold.scheduling.simulate import VirtualMachine, simulate

MOST_SIMULATED = 20_000
"""Jobs simulated in all trials together: about two seconds."""

NEAR = 4
"""Candidates on each side of a division that are moved or exchanged."""


@dataclass(frozen=True)
class OnEither:
    """A job whose kind of device is open: its requests on cores, by threads, and on a GPU."""

    candidate: str
    on_cores: Mapping[int, Request]
    on_gpu: Request

    def core_seconds(self) -> float:
        """Return the fewest core-seconds that it takes."""
        return min(count * item.seconds for count, item in self.on_cores.items())

    def gpu_seconds(self) -> float:
        """Return its share of a GPU's time."""
        return self.on_gpu.seconds / self.on_gpu.jobs_per_gpu


def split(
    jobs: Sequence[OnEither], machine: VirtualMachine, fixed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return "cpu" or "cuda" for each candidate.

    Parameters
    ----------
    jobs : sequence of OnEither
        Their order does not matter.
    machine : VirtualMachine
        Its cores and GPUs, used by others or not.
    fixed : Mapping of str to str, optional
        The kind of device of candidates for which it is not open.

    Examples
    --------
    >>> def job(name, cores, gpu):
    ...     on_cores = {1: Request(name, cores)}
    ...     return OnEither(name, on_cores, Request(name, gpu, gpu=True))
    >>> split([job("small", 2.0, 1.0), job("large", 90.0, 2.0)], VirtualMachine(2, gpus=1))
    {'large': 'cuda', 'small': 'cpu'}
    """
    return _Divisions(jobs, machine, fixed or {}).best()


def requests_on(
    jobs: Sequence[OnEither], kinds: Mapping[str, str], machine: VirtualMachine
) -> list[Request]:
    """Return the request of each job on its kind of device.

    Where there are fewer jobs than cores, they have the most threads with which all fit.
    """
    on_gpu = sum(kinds[item.candidate] == "cuda" for item in jobs)
    cores = machine.all_cores - min(sum(node.gpus for node in machine.each), on_gpu)
    each = max(1, cores // max(1, len(jobs) - on_gpu))
    return [
        item.on_gpu if kinds[item.candidate] == "cuda" else _with_threads(item.on_cores, each)
        for item in jobs
    ]


def _with_threads(on_cores: Mapping[int, Request], most: int) -> Request:
    fitting = [count for count in on_cores if count <= most]
    return on_cores[max(fitting) if fitting else min(on_cores)]


class _Divisions:
    """The divisions of the candidates, and the simulated sweep with each."""

    def __init__(
        self, jobs: Sequence[OnEither], machine: VirtualMachine, fixed: Mapping[str, str]
    ) -> None:
        self._jobs, self._machine, self._fixed = jobs, machine, fixed
        self._left = MOST_SIMULATED
        self._known: dict[frozenset[str], float] = {}
        cores: defaultdict[str, list[float]] = defaultdict(list)
        gpus: defaultdict[str, list[float]] = defaultdict(list)
        for item in jobs:
            cores[item.candidate].append(item.core_seconds())
            gpus[item.candidate].append(item.gpu_seconds())
        self._cores = {name: math.fsum(found) for name, found in cores.items()}
        self._gpus = {name: math.fsum(found) for name, found in gpus.items()}
        self._open = sorted(
            (name for name in self._cores if name not in fixed),
            key=lambda name: (-self._cores[name] / max(self._gpus[name], 1e-12), name),
        )

    def best(self) -> dict[str, str]:
        on_gpus = frozenset(name for name in self._cores if self._fixed.get(name) == "cuda")
        prefixes = [on_gpus.union(self._open[:count]) for count in range(len(self._open) + 1)]
        prefixes.sort(key=lambda way: (self._bound(way), len(way)))
        found = self._fastest([prefixes[0], *prefixes[1 : 1 + 2 * NEAR]])
        while True:
            better = self._fastest([found, *self._neighbours(found)])
            if better == found:
                return {name: "cuda" if name in found else "cpu" for name in sorted(self._cores)}
            found = better

    def _neighbours(self, way: frozenset[str]) -> Iterator[frozenset[str]]:
        """Yield divisions with one candidate moved, or two exchanged, the least clear ones."""
        here = [name for name in self._open if name in way][-NEAR:]
        there = [name for name in self._open if name not in way][:NEAR]
        yield from (way - {name} for name in here)
        yield from (way | {name} for name in there)
        yield from (way - {name} | {other} for name in here for other in there)

    def _fastest(self, ways: Iterable[frozenset[str]]) -> frozenset[str]:
        """Return the first of the fastest divisions, as far as they may be simulated."""
        tried = [way for way in ways if self._may_try(way)]
        return min(tried, key=lambda way: (self._known[way], len(way)))

    def _may_try(self, way: frozenset[str]) -> bool:
        if way not in self._known and (self._left > 0 or not self._known):
            self._left -= len(self._jobs)
            kinds = {name: "cuda" if name in way else "cpu" for name in self._cores}
            asked = requests_on(self._jobs, kinds, self._machine)
            self._known[way] = simulate(asked, self._machine).makespan
        return way in self._known

    def _bound(self, way: frozenset[str]) -> float:
        cores = math.fsum(self._cores[name] for name in self._cores if name not in way)
        gpus = math.fsum(self._gpus[name] for name in way)
        on_all = sum(node.gpus for node in self._machine.each)
        return max(cores / self._machine.all_cores, gpus / max(1, on_all))
