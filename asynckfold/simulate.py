"""The placement over virtual machines and virtual time: what a plan would take, before it runs.

::

    requests ── place(pending, running, load) ──► running ──► the first end, the next neighbour
       ▲            the very same function            │               time jumps there
       └──────────────── failed: once more ◄──────────┘

Nothing is slowed: a job takes its seconds wherever it runs, beside a neighbour, too.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asynckfold.errors import Problem, refuse
from asynckfold.placement import Gpu, Load, Placement, Request, place


@dataclass(frozen=True)
class VirtualMachine:
    """What a simulated run may use.

    Parameters
    ----------
    cores : int
        Number of cores.
    gpus : int
        Number of GPUs.
    memory : int
        Bytes of memory; by default no limit.
    gpu_memory : int
        Bytes of memory on each GPU; by default no limit.
    """

    cores: int
    gpus: int = 0
    memory: int = sys.maxsize
    gpu_memory: int = sys.maxsize


@dataclass(frozen=True)
class Neighbour:
    """Someone else, who uses a core from `start` to `end`, in seconds."""

    core: int
    start: float
    end: float


@dataclass(frozen=True)
class Failure:
    """An attempt that ends after so many `seconds` without a result; the job is tried once more."""

    seconds: float


@dataclass(frozen=True)
class Span:
    """An attempt of a job: from when to when, in seconds, on which cores and GPU."""

    job: str
    start: float
    end: float
    cores: tuple[int, ...]
    gpu: int | None = None
    failed: bool = False


@dataclass(frozen=True)
class Simulation:
    """What a simulated run did.

    Parameters
    ----------
    machine : VirtualMachine
        Where.
    spans : tuple of Span
        All attempts, in the order in which they were started.
    lower_bound : float
        Seconds below which no schedule can stay: the largest of core-seconds / cores,
        GPU-seconds / GPUs, and the seconds of the longest job, failed attempts included.
    place_seconds : float
        Real seconds spent in `place`.
    """

    machine: VirtualMachine
    spans: tuple[Span, ...]
    lower_bound: float
    place_seconds: float = field(default=0.0, compare=False)

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first job to the end of the last."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def ratio(self) -> float:
        """Makespan / lower bound: 1 is perfect."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0

    @property
    def use(self) -> float:
        """Mean share of the cores that jobs held, from 0 to 1."""
        held = math.fsum((span.end - span.start) * len(span.cores) for span in self.spans)
        return held / (self.makespan * self.machine.cores) if self.makespan else 0.0


def simulate(
    requests: Sequence[Request],
    machine: VirtualMachine,
    seconds: Mapping[str, float] | None = None,
    *,
    neighbours: Iterable[Neighbour] = (),
    failures: Mapping[str, Sequence[Failure]] | None = None,
) -> Simulation:
    """Run jobs on a virtual machine, placed by `place`.

    Parameters
    ----------
    requests : sequence of Request
        The jobs, with the seconds that the placement expects.
    machine : VirtualMachine
        Where they run.
    seconds : Mapping of str to float, optional
        The seconds that a job takes, by job id; as expected where it is missing.
    neighbours : iterable of Neighbour
        Others who come and go on the cores. No job starts beside them; one that runs goes on.
    failures : Mapping of str to sequence of Failure, optional
        The attempts that fail before the one that does not, by job id.

    Returns
    -------
    Simulation

    Raises
    ------
    InputError
        No core, seconds that are no duration, a job twice, a GPU job without a GPU.

    Examples
    --------
    >>> jobs = [Request("a", 3.0), Request("b", 2.0), Request("c", 2.0)]
    >>> found = simulate(jobs, VirtualMachine(cores=2))
    >>> found.makespan, found.lower_bound
    (4.0, 3.5)
    >>> found.spans[-1]
    Span(job='c', start=2.0, end=4.0, cores=(1,), gpu=None, failed=False)
    """
    taken = {request.job_id: request.seconds for request in requests} | dict(seconds or {})
    others = tuple(neighbours)
    refuse(_problems(requests, machine, taken, others))
    run = _Run(machine, taken, failures or {})
    run.drive(requests, _changes(others))
    return Simulation(machine, tuple(run.spans), run.lower_bound(), run.place_seconds)


class _Run:
    """The state of one simulation: the time, what is pending, and what ends when."""

    def __init__(
        self,
        machine: VirtualMachine,
        seconds: Mapping[str, float],
        failures: Mapping[str, Sequence[Failure]],
    ) -> None:
        self.spans: list[Span] = []
        self.place_seconds = 0.0
        self._machine = machine
        self._seconds = seconds
        self._failures = {job: iter(planned) for job, planned in failures.items()}
        self._pending: dict[str, Request] = {}
        self._running: dict[int, Placement] = {}
        self._requests: dict[str, Request] = {}
        self._ends: list[tuple[float, int]] = []
        self._core_seconds: list[float] = []
        self._gpu_seconds: list[float] = []
        self._job_seconds: defaultdict[str, float] = defaultdict(float)

    def drive(self, requests: Sequence[Request], changes: Iterator[tuple[float, int, int]]) -> None:
        """Go from event to event until every job has ended."""
        self._requests = {request.job_id: request for request in requests}
        self._pending = dict(self._requests)
        now, load, beside = 0.0, _load(self._machine, {}), Counter[int]()
        change = next(changes, None)
        while self._pending or self._running:
            if change is not None and change[0] <= now:
                while change is not None and change[0] <= now:
                    beside[change[1]] += change[2]
                    change = next(changes, None)
                load = _load(self._machine, beside)
            self._start(now, load)
            now = min(self._ends[0][0], math.inf if change is None else change[0])
            self._end(now)

    def _start(self, now: float, load: Load) -> None:
        began = time.perf_counter()
        placed = place(list(self._pending.values()), list(self._running.values()), load)
        self.place_seconds += time.perf_counter() - began
        for placement in placed:
            (job,) = placement.jobs
            del self._pending[job]
            failure = next(self._failures.get(job, iter(())), None)
            seconds = self._seconds[job] if failure is None else failure.seconds
            self._count(placement, seconds)
            number = len(self.spans)
            self._running[number] = placement
            self.spans.append(
                Span(
                    job,
                    now,
                    now + seconds,
                    placement.cores,
                    placement.gpu,
                    failure is not None,
                )
            )
            heapq.heappush(self._ends, (now + seconds, number))

    def _end(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, number = heapq.heappop(self._ends)
            del self._running[number]
            span = self.spans[number]
            if span.failed:
                self._pending[span.job] = self._requests[span.job]

    def _count(self, placement: Placement, seconds: float) -> None:
        self._core_seconds.append(seconds * len(placement.cores))
        if placement.gpu is not None:
            self._gpu_seconds.append(seconds)
        self._job_seconds[placement.jobs[0]] += seconds

    def lower_bound(self) -> float:
        return max(
            math.fsum(self._core_seconds) / self._machine.cores,
            math.fsum(self._gpu_seconds) / max(1, self._machine.gpus),
            max(self._job_seconds.values(), default=0.0),
        )


def _load(machine: VirtualMachine, beside: Mapping[int, int]) -> Load:
    cores = tuple(range(machine.cores))
    return Load(
        cores,
        tuple(core for core in cores if not beside.get(core)),
        machine.memory,
        tuple(Gpu(index, machine.gpu_memory, machine.gpu_memory) for index in range(machine.gpus)),
    )


def _changes(neighbours: Sequence[Neighbour]) -> Iterator[tuple[float, int, int]]:
    """When, on which core, one more or one less."""
    come = [(item.start, item.core, 1) for item in neighbours]
    go = [(item.end, item.core, -1) for item in neighbours]
    return iter(sorted(come + go))


def _problems(
    requests: Sequence[Request],
    machine: VirtualMachine,
    seconds: Mapping[str, float],
    neighbours: Sequence[Neighbour],
) -> Iterator[Problem]:
    if machine.cores < 1:
        yield Problem("cores must be at least 1", str(machine.cores), "Pass one core or more.")
    twice = [job for job, count in Counter(item.job_id for item in requests).items() if count > 1]
    if twice:
        yield Problem(
            "each job must be named once", f"{twice[0]!r} twice", "Name jobs differently."
        )
    wrong = [job for job, value in seconds.items() if not 0 <= value < math.inf]
    if wrong:
        yield Problem(
            "seconds must be a duration of at least 0",
            f"{seconds[wrong[0]]} for {wrong[0]!r}",
            "Pass an estimate.",
        )
    lost = [request.job_id for request in requests if request.gpu and machine.gpus < 1]
    if lost:
        yield Problem(
            "a GPU job needs a machine with a GPU",
            f"{lost[0]!r} and {machine.gpus} GPUs",
            "Pass gpus=1 or more, or Request(..., gpu=False).",
        )
    endless = [item for item in neighbours if not item.start <= item.end]
    if endless:
        yield Problem("a neighbour must come before it goes", str(endless[0]), "Swap the times.")
