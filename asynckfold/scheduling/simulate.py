"""Simulates a sweep in virtual time with the scheduler's own functions.

::

    backlog ── place(pending, running, load) ──► running ──► time jumps to the next event:
       ▲                                                     end of a job or of a pause, another
       └──── a pause ◄── decide(history) ◄── failed ◄─────── process starts or stops

A job takes the same seconds wherever it runs, also beside other processes; on a node that the data
have not reached yet it holds its cores and waits for them.
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
from asynckfold.jobs.placement import Gpu, Load, NodeSize, Placement, Request
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.reservations import Reservations
from asynckfold.scheduling.retries import CLASS_OF, decide

DONE = "done"


@dataclass(frozen=True)
class VirtualMachine:
    """What a simulated run may use: cores, GPUs, and bytes of memory (by default unlimited).

    Of each node, where there are several. The data are on the first node; each further node gets
    them in `data_seconds`, one after the other. A job may be placed there before, and then waits.
    Nodes of different sizes have their own in `sizes`; `cores` are then those of the smallest.
    """

    cores: int
    gpus: int = 0
    memory: int = sys.maxsize
    gpu_memory: int = sys.maxsize
    nodes: int = 1
    data_seconds: float = 0.0
    sizes: tuple[NodeSize, ...] = ()

    @classmethod
    def of(cls, nodes: Sequence[NodeSize]) -> VirtualMachine:
        """Return nodes of these sizes, with unlimited memory.

        >>> VirtualMachine.of([NodeSize(4), NodeSize(4)]).all_cores
        8
        """
        cores, gpus = min(node.cores for node in nodes), max(node.gpus for node in nodes)
        differ = len({*nodes}) > 1
        return cls(cores, gpus, nodes=len(nodes), sizes=tuple(nodes) if differ else ())

    @property
    def each(self) -> tuple[NodeSize, ...]:
        """The size of each node."""
        return self.sizes or (NodeSize(self.cores, self.gpus),) * self.nodes

    @property
    def all_cores(self) -> int:
        """The cores of all nodes."""
        return sum(node.cores for node in self.each)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its nodes."""
        if self.nodes == 1:
            return ("",)
        digits = len(str(self.nodes - 1))
        return tuple(f"node-{number:0{digits}}" for number in range(self.nodes))

    @property
    def ready(self) -> tuple[float, ...]:
        """When the data are on each node, in seconds."""
        return tuple(number * self.data_seconds for number in range(self.nodes))

    def load(self) -> Load:
        """Return the load while nobody else uses it."""
        first, *peers = map(self.load_of, self.names, self.each)
        return replace(first, peers=tuple(peers))

    def load_of(
        self,
        name: str,
        size: NodeSize,
        others: Collection[int] = (),
        on_gpus: Collection[int] = (),
    ) -> Load:
        """Return the load of a node while others use some of its cores and GPUs."""
        cores = tuple(range(size.cores))
        # Jobs use no more GPU memory than they reserved, so the free memory never changes.
        gpus = (
            Gpu(index, self.gpu_memory, self.gpu_memory, busy=index in on_gpus)
            for index in range(size.gpus)
        )
        idle = tuple(core for core in cores if core not in others)
        return Load(cores, idle, self.memory, tuple(gpus), node=name)


@dataclass(frozen=True)
class OtherProcess:
    """A foreign process that uses a core, or a GPU, from `start` to `end`, in seconds."""

    core: int | None
    start: float
    end: float
    gpu: int | None = None
    node: int = 0


@dataclass(frozen=True)
class Failure:
    """An attempt that fails after `seconds`; see `asynckfold.scheduling.retries` for `outcome`."""

    seconds: float
    outcome: str = "died"


@dataclass(frozen=True)
class Span:
    """One attempt of a job: start and end in seconds, its cores and GPU, and its outcome."""

    job: str
    start: float
    end: float
    cores: tuple[int, ...]
    gpu: int | None = None
    outcome: str = DONE
    node: str = field(default="", repr=False)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the makespan of any schedule, in seconds.

    Parameters
    ----------
    cores : float
        Core-seconds / cores. A job that must run alone counts with all cores of a node. The cores
        of a node count from when the data are there.
    gpus : float
        The end of the GPU-seconds on all GPUs, less what others take of them. A job that may share
        a GPU with n - 1 others counts with 1 / n.
    longest : float
        The longest job, including failed attempts and pauses.
    """

    cores: float = 0.0
    gpus: float = 0.0
    longest: float = 0.0

    @property
    def largest(self) -> float:
        """The binding bound."""
        return max(self.cores, self.gpus, self.longest)


@dataclass(frozen=True)
class Simulation:
    """The outcome of a simulation.

    `spans` are the attempts in the order of their starts, `place_seconds` real time.
    """

    machine: VirtualMachine
    spans: tuple[Span, ...]
    bounds: Bounds
    place_seconds: float = field(default=0.0, compare=False)

    @property
    def makespan(self) -> float:
        """Seconds until the last job ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lower_bound(self) -> float:
        """The largest of `bounds`, in seconds."""
        return self.bounds.largest

    @property
    def ratio(self) -> float:
        """Makespan / lower bound; 1 is optimal."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0

    @property
    def use(self) -> float:
        """Mean share of the cores held by jobs, 0 to 1."""
        return self.use_over(1)[0]

    def use_over(self, parts: int) -> list[float]:
        """Return the share of the cores held by jobs, 0 to 1, in equal parts of the makespan."""
        length = self.makespan / parts
        held: list[list[float]] = [[] for _ in range(parts)]
        for span in self.spans if length else ():
            first = min(parts - 1, int(span.start / length))
            for part in range(first, min(parts - 1, int(span.end / length)) + 1):
                start, end = max(span.start, part * length), min(span.end, (part + 1) * length)
                held[part].append((end - start) * len(span.cores))
        cores = self.machine.all_cores
        return [math.fsum(part) / (length * cores) if part else 0.0 for part in held]


def simulate(
    requests: Sequence[Request],
    machine: VirtualMachine,
    seconds: Mapping[str, float] | None = None,
    *,
    others: Iterable[OtherProcess] = (),
    failures: Mapping[str, Sequence[Failure]] | None = None,
) -> Simulation:
    """Run jobs on a virtual machine, placed by `place`.

    Parameters
    ----------
    requests : sequence of Request
        The jobs, with their expected seconds.
    machine : VirtualMachine
        The machine.
    seconds : Mapping of str to float, optional
        Actual seconds by job id; as expected where missing.
    others : iterable of OtherProcess
        Foreign processes. No job starts on their cores and GPUs; a running job goes on.
    failures : Mapping of str to sequence of Failure, optional
        By job id: the attempts that fail before one succeeds.

    Returns
    -------
    Simulation

    Raises
    ------
    InputError
        No core, invalid times, a duplicate job, a GPU job without a GPU, an unknown outcome.

    Examples
    --------
    >>> jobs = [Request("a", 3.0), Request("b", 2.0), Request("c", 2.0)]
    >>> found = simulate(jobs, VirtualMachine(cores=2))
    >>> found.makespan, found.lower_bound
    (4.0, 3.5)
    >>> found.spans[-1]
    Span(job='c', start=2.0, end=4.0, cores=(1,), gpu=None, outcome='done')
    """
    taken, present, failing = dict(seconds or {}), tuple(others), dict(failures or {})
    refuse(_problems(requests, machine, taken, present, failing))
    run = _Run(requests, machine, taken, failing)
    run.drive(present)
    return Simulation(machine, tuple(run.spans), run.bounds(), run.place_seconds)


class _Run:
    """The state of one simulation: time, jobs, and future events."""

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
        # A fusion group counts as one job here.
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
        self._names = machine.names
        self._ready = dict(zip(self._names, machine.ready, strict=True))
        self._sizes = dict(zip(self._names, machine.each, strict=True))
        self._others = [Counter[int]() for _ in machine.names]
        self._on_gpus = [Counter[int]() for _ in machine.names]
        self._loads: dict[str, Load] = {}
        self._present: list[OtherProcess] = []
        self._load: Load | None = None
        self._core_seconds: list[float] = []
        self._gpu_seconds: list[float] = []
        self._job_seconds: defaultdict[str, float] = defaultdict(float)

    def drive(self, others: Iterable[OtherProcess]) -> None:
        """Process events until every job has ended."""
        self._present = [*others]
        for item in self._present:
            for when, change in ((item.start, 1), (item.end, -1)):
                self._at(when, partial(self._change, item, change))
        self._happen()
        while self._unfinished:
            self._start()
            self._now = self._events[0][0]
            self._happen()

    def bounds(self) -> Bounds:
        least = self._machine.cores
        shares = [size.cores / least for size in self._machine.each]
        return Bounds(
            _earliest(math.fsum(self._core_seconds) / least, self._machine.ready, shares),
            self._end_on_gpus(math.fsum(self._gpu_seconds)),
            max(self._job_seconds.values(), default=0.0),
        )

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _happen(self) -> None:
        """Process all events that are due."""
        while self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()

    def _change(self, item: OtherProcess, change: int) -> None:
        if item.core is not None:
            self._others[item.node][item.core] += change
        if item.gpu is not None:
            self._on_gpus[item.node][item.gpu] += change
        self._loads.pop(self._names[item.node], None)
        self._load = None

    def _end_on_gpus(self, work: float) -> float:
        """Return when all GPUs could have done some GPU-seconds, if others leave none unused."""
        machine = self._machine
        nodes = zip(machine.ready, machine.each, strict=True)
        now, gpus = 0.0, sum(size.gpus for size in machine.each)
        taken = [(0.0, ready) for ready, size in nodes if ready for _ in range(size.gpus)]
        for item in self._present:
            if item.gpu is not None:
                taken += self._unused_beside(item)
        for until in sorted({edge for part in taken for edge in part}):
            free = gpus - sum(start <= now and now < end for start, end in taken)
            if work <= free * (until - now):
                return now + work / free if work else now
            work, now = work - free * (until - now), until
        return now + work / max(1, gpus) if work else now

    def _unused_beside(self, item: OtherProcess) -> Iterator[tuple[float, float]]:
        """Yield when no own job runs on the GPU of a foreign process, once the data are there."""
        name = self._names[item.node]
        ready = self._ready[name]
        own = [span for span in self.spans if span.node == name and item.gpu == span.gpu]
        if ready < item.end:
            yield from _left_of(replace(item, start=max(item.start, ready)), own)

    def _seen(self) -> Load:
        for name, others, on_gpus in zip(self._names, self._others, self._on_gpus, strict=True):
            if name not in self._loads:
                size = self._sizes[name]
                self._loads[name] = self._machine.load_of(name, size, +others, +on_gpus)
        first, *peers = (self._loads[name] for name in self._names)
        return replace(first, peers=tuple(peers)) if peers else first

    def _start(self) -> None:
        if self._load is None:
            self._load = self._seen()
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
        node = placement.node
        end = max(self._now, self._ready[node]) + planned.seconds
        where = placement.cores, placement.gpu, planned.outcome, node
        span = Span(job, self._now, end, *where)
        number = len(self.spans)
        self.spans.append(span)
        self._reservations.add(placement)
        self._at(end, partial(self._end, number, placement))
        held = self._sizes[node].cores if placement.alone else len(placement.cores)
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


def _earliest(work: float, ready: Sequence[float], shares: Sequence[float]) -> float:
    """Return when nodes that are ready one after the other can have done some work.

    The work is in seconds of a node with the share 1; another does its share in a second.

    >>> ones = [1.0, 1.0]
    >>> [_earliest(4.0, ready, ones) for ready in ([0.0, 0.0], [0.0, 2.0], [0.0, 5.0])]
    [2.0, 3.0, 4.0]
    >>> _earliest(4.0, [0.0, 1.0], [1.0, 3.0])
    1.75
    """
    held = [share * since for share, since in zip(shares, ready, strict=True)]
    for nodes in range(1, len(ready)):
        end = (work + math.fsum(held[:nodes])) / math.fsum(shares[:nodes])
        if end <= ready[nodes]:
            return end
    return (work + math.fsum(held)) / math.fsum(shares)


def _left_of(item: OtherProcess, own: Sequence[Span]) -> Iterator[tuple[float, float]]:
    """Yield the parts of a foreign process's time in which no own job runs on its GPU."""
    now = item.start
    for span in sorted(own, key=lambda span: span.start):
        if span.start >= item.end:
            break
        if now < span.start:
            yield now, span.start
        now = max(now, span.end)
    if now < item.end:
        yield now, item.end


def _problems(
    requests: Sequence[Request],
    machine: VirtualMachine,
    seconds: Mapping[str, float],
    others: Sequence[OtherProcess],
    failures: Mapping[str, Sequence[Failure]],
) -> Iterator[Problem]:
    if machine.cores < 1:
        yield Problem("cores must be at least 1", str(machine.cores), "Pass one core or more.")
    if machine.nodes < 1:
        yield Problem("nodes must be at least 1", str(machine.nodes), "Pass one node or more.")
    if not 0 <= machine.data_seconds < math.inf:
        rule = "data_seconds must be at least 0 and finite"
        yield Problem(rule, str(machine.data_seconds), "Pass the seconds that the data travel.")
    for name in ("gpus", "memory", "gpu_memory"):
        if getattr(machine, name) < 0:
            received = str(getattr(machine, name))
            yield Problem(f"{name} must be at least 0", received, "Pass 0 or more.")
    times = Counter(request.job_id for request in requests)
    twice = [job for job, number in times.items() if number > 1]
    if twice:
        yield Problem("job ids must be unique", f"{twice[0]!r} twice", "Give each job its own id.")
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
    lost = [request for request in requests if request.gpu and not machine.gpus]
    if lost:
        yield Problem(
            "a GPU job needs a machine with GPUs",
            f"{lost[0].job_id!r} and {machine.gpus} GPUs",
            "Pass gpus=1 or more, or requests with gpu=False.",
        )
    if away := [item for item in others if not 0 <= item.node < machine.nodes]:
        remedy = f"Pass node=0 to {machine.nodes - 1}."
        yield Problem("a process must be on a node of the machine", str(away[0]), remedy)
    wrong = [item for item in others if not item.start <= item.end]
    if wrong:
        yield Problem("a process must start before it ends", str(wrong[0]), "Swap the times.")
    outcomes = {item.outcome for items in failures.values() for item in items}
    for outcome in sorted(outcomes - set(CLASS_OF)):
        remedy = f"Pass one of {', '.join(CLASS_OF)}."
        yield Problem("a failure must have a known outcome", repr(outcome), remedy)
