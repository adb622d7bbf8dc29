"""The placement over virtual machines and virtual time: what jobs would take, without running them.

::

    backlog ── place(pending, running, load) ──► running ──► time jumps to the next event:
       ▲           the very same function                    an end, the end of a pause,
       └──── a pause ◄── decide(history) ◄── failed ◄─────── a neighbour who comes or goes

Nothing is slowed down: a job takes its seconds wherever it runs, beside a neighbour, too.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.placement import Gpu, Load, Placement, Request
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import Reservations, place
from asynckfold.scheduling.retries import CLASS_OF, decide

DONE = "done"


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

    def load(self, others: Collection[int] = ()) -> Load:
        """Return what the placement sees while others use some cores."""
        cores = tuple(range(self.cores))
        # Jobs hold memory of a virtual GPU only as far as they were promised it, so none is gone.
        gpus = (Gpu(index, self.gpu_memory, self.gpu_memory) for index in range(self.gpus))
        idle = tuple(core for core in cores if core not in others)
        return Load(cores, idle, self.memory, tuple(gpus))


@dataclass(frozen=True)
class Neighbour:
    """Someone else, who uses a core from `start` to `end`, in seconds."""

    core: int
    start: float
    end: float


@dataclass(frozen=True)
class Failure:
    """An attempt that ends without a result after so many `seconds`.

    What becomes of the job then, `asynckfold.scheduling.retries` decides by the `outcome`.
    """

    seconds: float
    outcome: str = "died"


@dataclass(frozen=True)
class Span:
    """An attempt of a job: from when to when, in seconds, on which cores and GPU, and its end."""

    job: str
    start: float
    end: float
    cores: tuple[int, ...]
    gpu: int | None = None
    outcome: str = DONE


@dataclass(frozen=True)
class Bounds:
    """Seconds that no schedule can go below, each for a reason of its own.

    Parameters
    ----------
    cores : float
        Core-seconds / cores. A job that must be alone counts with all cores.
    gpus : float
        GPU-seconds / GPUs. One of n jobs that may share a GPU counts with 1 / n of it.
    longest : float
        The longest job, with its failed attempts and the pauses after them.
    """

    cores: float = 0.0
    gpus: float = 0.0
    longest: float = 0.0

    @property
    def largest(self) -> float:
        """The one that binds."""
        return max(self.cores, self.gpus, self.longest)


@dataclass(frozen=True)
class Simulation:
    """What a simulated run did.

    Parameters
    ----------
    machine : VirtualMachine
        Where.
    spans : tuple of Span
        All attempts, in the order in which they were started.
    bounds : Bounds
        What no schedule of these attempts can go below.
    place_seconds : float
        Real seconds that the decisions took.
    """

    machine: VirtualMachine
    spans: tuple[Span, ...]
    bounds: Bounds
    place_seconds: float = field(default=0.0, compare=False)

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first job to the end of the last."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lower_bound(self) -> float:
        """Seconds that no schedule can go below: the largest of `bounds`."""
        return self.bounds.largest

    @property
    def ratio(self) -> float:
        """Makespan / lower bound; 1 is perfect."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0

    @property
    def use(self) -> float:
        """Mean share of the cores that jobs held, 0 to 1."""
        return self.use_over(1)[0]

    def use_over(self, parts: int) -> list[float]:
        """Return the share of the cores that jobs held, 0 to 1, in equal parts of the makespan."""
        length = self.makespan / parts
        held: list[list[float]] = [[] for _ in range(parts)]
        for span in self.spans if length else ():
            first = min(parts - 1, int(span.start / length))
            for part in range(first, min(parts - 1, int(span.end / length)) + 1):
                start, end = max(span.start, part * length), min(span.end, (part + 1) * length)
                held[part].append((end - start) * len(span.cores))
        return [math.fsum(part) / (length * self.machine.cores) if part else 0.0 for part in held]


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
        The attempts that fail before one that does not, by job id.

    Returns
    -------
    Simulation

    Raises
    ------
    InputError
        No core, times that are none, a job twice, a GPU job without a GPU, an unknown outcome.

    Examples
    --------
    >>> jobs = [Request("a", 3.0), Request("b", 2.0), Request("c", 2.0)]
    >>> found = simulate(jobs, VirtualMachine(cores=2))
    >>> found.makespan, found.lower_bound
    (4.0, 3.5)
    >>> found.spans[-1]
    Span(job='c', start=2.0, end=4.0, cores=(1,), gpu=None, outcome='done')
    """
    taken, others, failing = dict(seconds or {}), tuple(neighbours), dict(failures or {})
    refuse(_problems(requests, machine, taken, others, failing))
    run = _Run(requests, machine, taken, failing)
    run.drive(others)
    return Simulation(machine, tuple(run.spans), run.bounds(), run.place_seconds)


class _Run:
    """The state of one simulation: the time, the jobs, and what happens when."""

    def __init__(
        self,
        requests: Sequence[Request],
        machine: VirtualMachine,
        seconds: Mapping[str, float],
        failures: Mapping[str, Sequence[Failure]],
    ) -> None:
        self.spans: list[Span] = []
        self.place_seconds = 0.0
        self._machine = machine
        # Jobs that are trained as one are one job here.
        requests = [replace(item, jobs=()) if item.jobs else item for item in requests]
        self._seconds = {item.job_id: item.seconds for item in requests} | dict(seconds)
        self._failures = failures
        self._requests = {request.job_id: request for request in requests}
        self._backlog = Backlog(requests)
        self._reservations = Reservations()
        self._unfinished = len(requests)
        self._history: defaultdict[str, list[str]] = defaultdict(list)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._others: Counter[int] = Counter()
        self._load: Load | None = None
        self._core_seconds: list[float] = []
        self._gpu_seconds: list[float] = []
        self._job_seconds: defaultdict[str, float] = defaultdict(float)

    def drive(self, neighbours: Iterable[Neighbour]) -> None:
        """Go from event to event until every job has ended."""
        for item in neighbours:
            self._at(item.start, partial(self._come, item.core, 1))
            self._at(item.end, partial(self._come, item.core, -1))
        self._happen()
        while self._unfinished:
            self._start()
            self._now = self._events[0][0]
            self._happen()

    def bounds(self) -> Bounds:
        return Bounds(
            math.fsum(self._core_seconds) / self._machine.cores,
            math.fsum(self._gpu_seconds) / max(1, self._machine.gpus),
            max(self._job_seconds.values(), default=0.0),
        )

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _happen(self) -> None:
        """All that is due by now, before anything is decided."""
        while self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()

    def _come(self, core: int, change: int) -> None:
        self._others[core] += change
        self._load = None

    def _start(self) -> None:
        if self._load is None:
            self._load = self._machine.load(+self._others)
        began = time.perf_counter()
        placed = place(self._backlog, self._reservations, self._load)
        self.place_seconds += time.perf_counter() - began
        for placement in placed:
            self._begin(placement)

    def _begin(self, placement: Placement) -> None:
        (job,) = placement.jobs
        self._backlog.remove(job)
        failures, history = self._failures.get(job, ()), self._history[job]
        planned = Failure(self._seconds[job], DONE)
        if len(history) < len(failures):
            planned = failures[len(history)]
        end = self._now + planned.seconds
        span = Span(job, self._now, end, placement.cores, placement.gpu, planned.outcome)
        number = len(self.spans)
        self.spans.append(span)
        self._reservations.add(placement)
        self._at(end, partial(self._end, number, placement))
        held = self._machine.cores if placement.alone else len(placement.cores)
        self._core_seconds.append(planned.seconds * held)
        if placement.gpu is not None:
            self._gpu_seconds.append(planned.seconds / placement.jobs_per_gpu)
        self._job_seconds[job] += planned.seconds

    def _end(self, number: int, placement: Placement) -> None:
        self._reservations.remove(placement)
        job, outcome = self.spans[number].job, self.spans[number].outcome
        retry = None if outcome == DONE else decide(self._history[job], outcome)
        self._history[job].append(outcome)
        if retry is None:
            self._unfinished -= 1
            return
        request = self._requests[job] = replace(self._requests[job], alone=retry.alone)
        self._at(self._now + retry.after_s, partial(self._backlog.add, request))
        self._job_seconds[job] += retry.after_s


def _problems(
    requests: Sequence[Request],
    machine: VirtualMachine,
    seconds: Mapping[str, float],
    neighbours: Sequence[Neighbour],
    failures: Mapping[str, Sequence[Failure]],
) -> Iterator[Problem]:
    if machine.cores < 1:
        yield Problem("cores must be at least 1", str(machine.cores), "Pass one core or more.")
    for name in ("gpus", "memory", "gpu_memory"):
        if getattr(machine, name) < 0:
            received = str(getattr(machine, name))
            yield Problem(f"{name} must be at least 0", received, "Pass 0 or more.")
    times = Counter(request.job_id for request in requests)
    twice = [job for job, number in times.items() if number > 1]
    if twice:
        yield Problem("a job must be there once", f"{twice[0]!r} twice", "Give each its own id.")
    planned = [(item.job_id, item.seconds) for item in requests] + list(seconds.items())
    planned += [(job, item.seconds) for job, items in failures.items() for item in items]
    endless = [pair for pair in planned if not 0 <= pair[1] < math.inf]
    if endless:
        rule = "seconds of a job must be at least 0 and finite"
        yield Problem(rule, f"{endless[0][1]} for {endless[0][0]!r}", "Pass an estimate.")
    odd = [item for item in requests if min(item.threads, item.jobs_per_gpu) < 1]
    if odd:
        rule = "threads and jobs_per_gpu of a request must be at least 1"
        yield Problem(rule, str(odd[0]), "Pass 1 or more.")
    lost = [request.job_id for request in requests if request.gpu]
    if lost and machine.gpus < 1:
        yield Problem(
            "a GPU job needs a machine with a GPU",
            f"{lost[0]!r} and {machine.gpus} GPUs",
            "Pass gpus=1 or more, or requests with gpu=False.",
        )
    wrong = [item for item in neighbours if not item.start <= item.end]
    if wrong:
        yield Problem("a neighbour must come before it goes", str(wrong[0]), "Swap the times.")
    outcomes = {item.outcome for items in failures.values() for item in items}
    for outcome in sorted(outcomes - set(CLASS_OF)):
        remedy = f"Pass one of {', '.join(CLASS_OF)}."
        yield Problem("a failure must have a known outcome", repr(outcome), remedy)
