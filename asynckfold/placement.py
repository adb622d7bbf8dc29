"""Which pending jobs start now, and where: a pure function of what is pending, running and idle.

No clock, no randomness, no input or output: the engines bring the load, the sweep carries out the
placements, and a simulator can drive the very same function.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, TypeVar

from asynckfold.plan import SEVERAL


@dataclass(frozen=True)
class Gpu:
    """One visible GPU.

    Parameters
    ----------
    index : int
        Its number.
    free, total : int
        Bytes of its memory: what nobody holds right now, and all.
    use : float
        Share of time that it is busy, 0 to 1.
    own : int
        Bytes that jobs of this run hold, and that `free` therefore lacks. 0 where that cannot be
        read: then what they hold is subtracted twice, and fewer of them share the GPU than could.
    """

    index: int
    free: int
    total: int
    use: float = 0.0
    own: int = 0


@dataclass(frozen=True)
class Load:
    """One snapshot of the machine, own workers subtracted.

    Parameters
    ----------
    cores : tuple of int
        Cores this run may use: affinity, cgroup quota and ``n_jobs`` applied.
    idle : tuple of int
        Those of them that nobody else uses right now, the idlest first; cores on which only own
        jobs run are among them.
    free_memory : int
        Bytes of memory that jobs of this run may take in all, running ones included.
    gpus : tuple of Gpu
        GPUs this run may use.
    use : tuple of float
        Use of each core of the affinity mask by everyone, 0 to 1; empty when unknown.
    own : float
        Cores' worth of use by this run.
    blocked : str
        Why nothing may start now, not even the one job that always runs; empty where it may.
    others : tuple of int
        Cores that others use, also where the run takes its number of cores whoever is there.
    """

    cores: tuple[int, ...]
    idle: tuple[int, ...]
    free_memory: int
    gpus: tuple[Gpu, ...] = ()
    use: tuple[float, ...] = ()
    own: float = 0.0
    blocked: str = ""
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A pending job as the placement sees it.

    Parameters
    ----------
    job_id : str
        Whose request it is.
    seconds : float
        Expected duration; only orders the queue.
    threads : int
        Threads, and so cores, that the job is planned with.
    memory : int
        Expected bytes of memory.
    gpu : bool
        Whether it must run on a GPU.
    alone : bool
        Whether nothing else may run meanwhile: it was short of memory beside others.
    gpu_memory : int
        Expected bytes of memory on the GPU.
    jobs_per_gpu : int
        How many jobs may be on its GPU at once, itself included. One by default: several processes
        on one GPU were measured slower than one after another.
    jobs : tuple of str
        All jobs that it asks a place for, where that is not just one; `job_id` then only names it.
    trainer : str
        Which trainer runs them.
    """

    job_id: str
    seconds: float
    threads: int = 1
    memory: int = 0
    gpu: bool = False
    alone: bool = False
    gpu_memory: int = 0
    jobs_per_gpu: int = 1
    jobs: tuple[str, ...] = ()
    trainer: str = "plain"

    @property
    def width(self) -> int:
        """For how many jobs it asks."""
        return len(self.jobs) or 1


@dataclass(frozen=True)
class Placement:
    """Jobs, the cores and GPU chosen for them, and the trainer that runs them.

    Parameters
    ----------
    jobs : tuple of str
        Job ids; more than one where jobs are trained as one, or are a row: short ones that the same
        worker does one after another.
    cores : tuple of int
        Cores to pin the worker to; empty for no pinning.
    threads : int
        Threads inside the worker.
    gpu : int or None
        Index of the GPU.
    memory : int
        Bytes of memory reserved.
    trainer : str
        Which trainer runs the jobs.
    alone : bool
        Whether nothing else may run meanwhile.
    gpu_memory : int
        Bytes of memory reserved on the GPU.
    jobs_per_gpu : int
        How many placements may be on the GPU at once, this one included.
    """

    jobs: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int = 1
    gpu: int | None = None
    memory: int = 0
    trainer: str = "plain"
    alone: bool = False
    gpu_memory: int = 0
    jobs_per_gpu: int = 1

    @property
    def is_row(self) -> bool:
        """Whether its jobs are done one after another."""
        return self.trainer == "plain" and len(self.jobs) > 1

    def wants_new_worker(self, has_gpu: bool) -> bool:
        """Return whether its worker is to be a new one, which ends afterwards.

        It forks processes, from which it keeps the GPUs that torch would find on this machine: see
        `asynckfold.training.spared`.
        """
        return self.trainer in SEVERAL and (has_gpu or self.gpu is not None)


ROW_SECONDS = 0.25
"""Most expected seconds of a row of short jobs. A placement costs some 5 ms (two commits, a look at
the load, a way to the worker and back), which then is little; no core waits longer for the last."""

ROW_SHARE = 4
"""Rows that each core gets at least of the jobs that are left, so that all end together."""

_Shape = tuple[int, int, bool, bool, int, int]

_shape: Callable[[Request], _Shape] = attrgetter(
    "threads", "memory", "gpu", "alone", "gpu_memory", "jobs_per_gpu"
)
"""What a request asks for: two of one shape fit in the same places."""

_Key = TypeVar("_Key")

_Rank = tuple[float, str]
"""Where a request stands in its queue: -seconds, job id."""


def fused(requests: Sequence[Request], left: Sequence[str]) -> Request:
    """Return the request of jobs that are trained as one: the seconds and the memory of all.

    It is named by the first job. Those that have a result go along, so that they count, too.

    Parameters
    ----------
    requests : sequence of Request
        Of all jobs of the group.
    left : sequence of str
        The jobs that have no result yet.

    Examples
    --------
    >>> found = fused([Request("a", 2.0, memory=3), Request("b", 1.0, memory=4)], ["b"])
    >>> found.job_id, found.jobs, found.seconds, found.memory, found.trainer
    ('a', ('b',), 3.0, 7, 'fused')
    """
    return replace(
        requests[0],
        seconds=math.fsum(request.seconds for request in requests),
        memory=sum(request.memory for request in requests),
        alone=any(request.alone for request in requests if request.job_id in left),
        jobs=tuple(left),
        trainer="fused",
    )


def units(requests: Mapping[str, Request], groups: Iterable[tuple[str, ...]]) -> dict[str, Request]:
    """Return what is placed as one, by name: each group, and each job that is in none.

    Examples
    --------
    >>> asked = {name: Request(name, 1.0) for name in "abc"}
    >>> [(name, unit.seconds) for name, unit in units(asked, [("a", "c")]).items()]
    [('a', 2.0), ('b', 1.0)]
    """
    found = dict(requests)
    for group in groups:
        found[group[0]] = fused([requests[name] for name in group], group)
        for name in group[1:]:
            del found[name]
    return found


class _Queue:
    """Ranks of the requests that ask for what `like` asks for, as a heap.

    What is removed below the top stays in the heap until it comes up; the top is always alive.
    """

    def __init__(self, like: Request) -> None:
        self.like = like
        self._heap: list[_Rank] = []
        self._alive: dict[str, _Rank] = {}

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def head(self) -> _Rank:
        """The first rank of a queue that is not empty."""
        return self._heap[0]

    def add(self, rank: _Rank) -> None:
        self._alive[rank[1]] = rank
        heapq.heappush(self._heap, rank)

    def remove(self, job_id: str) -> None:
        del self._alive[job_id]
        while self._heap and not self._is_alive(self._heap[0]):
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._alive):
            self._heap = sorted(self._alive.values())

    def followers(self) -> Iterator[_Rank]:
        """Ranks after the head in order, only as far as they are read: the k-th costs O(log k)."""
        front = [(self._heap[0], 0)]
        while front:
            rank, at = heapq.heappop(front)
            if at and self._is_alive(rank):
                yield rank
            for child in range(2 * at + 1, min(2 * at + 3, len(self._heap))):
                heapq.heappush(front, (self._heap[child], child))

    def _is_alive(self, rank: _Rank) -> bool:
        # By identity: a job that left and came back has two equal ranks in the heap.
        return self._alive.get(rank[1]) is rank


class Backlog:
    """Pending requests, kept in order from one call of `place` to the next.

    Requests that ask for the same are interchangeable but for their rank, so that there is one
    queue, the longest first, for each of the few things that are asked for, and a placement looks
    at their heads only: at 100,000 pending jobs, too.

    Parameters
    ----------
    requests : iterable of Request
        With job ids that differ.

    Examples
    --------
    >>> backlog = Backlog([Request("a", 2.0), Request("b", 3.0)])
    >>> load = Load(cores=(0,), idle=(0,), free_memory=1)
    >>> place(backlog, [], load)[0].jobs
    ('b',)
    >>> backlog.remove("b").seconds, len(backlog), "b" in backlog
    (3.0, 1, False)
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._requests: dict[str, Request] = {}
        self._queues: dict[_Shape, _Queue] = {}
        self._jobs: Counter[_Shape] = Counter()
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Return the requests as they were added."""
        return iter(self._requests.values())

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._requests

    def add(self, request: Request) -> None:
        """Add a request; O(log n).

        Raises
        ------
        ValueError
            The job is pending already.
        """
        if request.job_id in self._requests:
            raise ValueError(f"a job must be pending once, received {request.job_id!r} twice")
        self._requests[request.job_id] = request
        shape = _shape(request)
        queue = self._queues.get(shape)
        if queue is None:
            queue = self._queues[shape] = _Queue(request)
        queue.add((-request.seconds, request.job_id))
        self._jobs[shape] += request.width

    def remove(self, job_id: str) -> Request:
        """Take the request of a job away and return it; O(log n), amortized.

        Raises
        ------
        KeyError
            The job is not pending.
        """
        request = self._requests.pop(job_id)
        shape = _shape(request)
        queue = self._queues[shape]
        queue.remove(job_id)
        self._jobs[shape] -= request.width
        if not queue:
            del self._queues[shape], self._jobs[shape]
        return request

    def row(self, first: Request, placement: Placement, cores: int) -> Placement:
        """Take away short jobs that can follow the one that was placed, and return the whole row.

        Parameters
        ----------
        first : Request
            What was placed, and is pending no more. A job that is not short is a row of its own.
        placement : Placement
            Where.
        cores : int
            For how many cores the jobs that are left are meant, too.

        Examples
        --------
        >>> backlog = Backlog(Request(name, 0.01) for name in "abcdefghi")
        >>> backlog.row(backlog.remove("a"), Placement(("a",), (0,)), cores=1).jobs
        ('a', 'b', 'c')
        >>> len(backlog)
        6
        """
        names, left = [first.job_id], ROW_SECONDS - first.seconds
        count = 1 + len(self) // (ROW_SHARE * cores)
        if not _is_single(first) or left < 0:
            return placement
        for queue in self._queues.values():
            if not _can_follow(queue.like, first):
                continue
            for _, name in chain([queue.head], queue.followers()):
                request = self._requests[name]
                if len(names) == count or request.seconds > left:
                    break
                if _is_single(request):
                    names.append(name)
                    left -= request.seconds
        for name in names[1:]:
            self.remove(name)
        return replace(placement, jobs=tuple(names))

    def kinds(self) -> Iterator[tuple[Request, int]]:
        """Return a request of each kind, and how many jobs ask for it: all the same but seconds."""
        return ((queue.like, self._jobs[shape]) for shape, queue in self._queues.items())

    def _in_turn(self, rest: _Rest) -> Iterator[Request]:
        """Requests that fit into the `rest`, the longest first.

        The reader reduces the rest; a shape that does not fit any more is not looked at again.
        """
        turn = [
            (queue.head, queue.like, queue.followers())
            for queue in self._queues.values()
            if rest.fits(queue.like)
        ]
        heapq.heapify(turn)
        while turn and rest.cores:
            (_, job_id), like, followers = turn[0]
            following = None
            if rest.fits(like):
                yield self._requests[job_id]
                following = next(followers, None)
            if following is None:
                heapq.heappop(turn)
            else:
                heapq.heapreplace(turn, (following, like, followers))

    def _first(self, gpus: bool) -> Request | None:
        """The longest request whose device is there; one that must be alone after all others."""
        heads = [
            (queue.like.alone, queue.head)
            for queue in self._queues.values()
            if gpus or not queue.like.gpu
        ]
        return self._requests[min(heads)[1][1]] if heads else None


def _is_single(request: Request) -> bool:
    """Whether it is one job of one process whose seconds are known."""
    return request.trainer == "plain" and not request.alone and request.seconds > 0


def _can_follow(later: Request, first: Request) -> bool:
    """Whether what was found for one request is enough for another."""
    return (
        (later.threads, later.gpu, later.alone, later.jobs_per_gpu)
        == (first.threads, first.gpu, first.alone, first.jobs_per_gpu)
        and later.memory <= first.memory
        and later.gpu_memory <= first.gpu_memory
    )


class _OnGpu(NamedTuple):
    """What jobs hold of a GPU: bytes, and how many jobs each of them allows there."""

    memory: int = 0
    allowed: tuple[int, ...] = ()

    def with_(self, item: Request | Placement) -> _OnGpu:
        return _OnGpu(self.memory + item.gpu_memory, (*self.allowed, item.jobs_per_gpu))

    def without(self, item: Placement) -> _OnGpu:
        at = self.allowed.index(item.jobs_per_gpu)
        return _OnGpu(self.memory - item.gpu_memory, (*self.allowed[:at], *self.allowed[at + 1 :]))

    @property
    def is_full(self) -> bool:
        return len(self.allowed) >= min(self.allowed, default=1)


_NOBODY = _OnGpu()


class Bookings:
    """What running placements hold, added up from one call of `place` to the next.

    Parameters
    ----------
    placements : iterable of Placement
        What runs.

    Attributes
    ----------
    threads, memory, alone : int
        Cores that are held, bytes that are reserved, and how many placements must be alone.

    Examples
    --------
    >>> running = Bookings([Placement(("a",), (0,))])
    >>> load = Load(cores=(0, 1), idle=(0, 1), free_memory=1)
    >>> place([Request("b", 1.0)], running, load)[0].cores
    (1,)
    >>> running.remove(Placement(("a",), (0,)))
    >>> place([Request("b", 1.0)], running, load)[0].cores
    (0,)
    """

    def __init__(self, placements: Iterable[Placement] = ()) -> None:
        self._placements: Counter[Placement] = Counter()
        self._cores: Counter[int] = Counter()
        self._gpus: dict[int, _OnGpu] = {}
        self._full: set[int] = set()
        self.threads = self.memory = self.alone = 0
        for placement in placements:
            self.add(placement)

    def __len__(self) -> int:
        return sum(self._placements.values())

    def __bool__(self) -> bool:
        return bool(self._placements)

    def __iter__(self) -> Iterator[Placement]:
        """Return the placements."""
        return self._placements.elements()

    def add(self, placement: Placement) -> None:
        """Book what a placement holds."""
        self._placements[placement] += 1
        self._cores.update(placement.cores)
        self._count(placement, 1)
        if placement.gpu is not None:
            on_gpu = self._gpus.get(placement.gpu, _NOBODY).with_(placement)
            self._gpus[placement.gpu] = on_gpu
            if on_gpu.is_full:
                self._full.add(placement.gpu)

    def remove(self, placement: Placement) -> None:
        """Free what a placement held.

        Raises
        ------
        KeyError
            It does not run.
        """
        if placement not in self._placements:
            raise KeyError(placement)
        _discount(self._placements, [placement])
        _discount(self._cores, placement.cores)
        self._count(placement, -1)
        if placement.gpu is not None:
            on_gpu = self._gpus[placement.gpu].without(placement)
            self._gpus[placement.gpu] = on_gpu
            if not on_gpu.is_full:
                self._full.discard(placement.gpu)

    def _count(self, placement: Placement, sign: int) -> None:
        # Without cores of its own a job holds as many as it has threads, wherever they are.
        self.threads += sign * (len(placement.cores) or placement.threads)
        self.memory += sign * placement.memory
        self.alone += sign * placement.alone

    def free_cores(self, load: Load) -> list[int]:
        """Return the cores on which something can start, the idlest first.

        Never more at once than others leave alone.
        """
        room = len(load.idle) - self.threads
        return [core for core in load.idle if core not in self._cores][: max(0, room)]

    def _rest(self, load: Load) -> _Rest:
        """What is left."""
        if self.alone or len(load.idle) <= self.threads:
            return _Rest([], 0, [], {})
        return _Rest(
            self.free_cores(load),
            load.free_memory - self.memory,
            [gpu for gpu in load.gpus if gpu.index not in self._full],
            dict(self._gpus),
        )


def _discount(counts: Counter[_Key], keys: Iterable[_Key]) -> None:
    """Subtract one for each key; a key without any is no key any more."""
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


def place(
    pending: Sequence[Request] | Backlog, running: Sequence[Placement] | Bookings, load: Load
) -> list[Placement]:
    """Choose what starts now.

    Longest expected job first (Graham 1969), ties by job id, so that the order of `pending` does
    not matter. Cores of running jobs are reserved; of the others only idle ones are taken, and
    never more at once than the machine has cores that others leave alone. A request that does not
    fit lets shorter ones pass. One job always runs: with nothing running and nothing that fits, the
    first request whose device is there starts all the same, unless the load says that nothing may.

    A request that must be alone starts when nothing runs and no other can start, and nothing starts
    beside it: it goes last, so that no core waits for it.

    A GPU job takes its cores and a GPU: that with the fewest jobs, then with the most memory left.
    As many jobs share one as the most modest of them allows.

    Parameters
    ----------
    pending : sequence of Request, or Backlog
        Jobs without a result that are not running.
    running : sequence of Placement, or Bookings
        What runs now. The two keepers make a call cheap where jobs or calls are many.
    load : Load
        The machine now.

    Returns
    -------
    list of Placement
        To be started, in this order.

    Examples
    --------
    >>> load = Load(cores=(0, 1), idle=(0, 1), free_memory=1)
    >>> [placement.cores for placement in place([Request("a", 2), Request("b", 3)], [], load)]
    [(0,), (1,)]
    >>> place([Request("a", 2), Request("b", 3)], [], load)[0].jobs
    ('b',)
    """
    if load.blocked:
        return []
    bookings = running if isinstance(running, Bookings) else Bookings(running)
    rest = bookings._rest(load)
    placed: list[Placement] = []
    # Nothing idle is the usual answer while jobs run: it costs no look at the queue.
    if rest.cores:
        placed = [rest.take(request) for request in _kept(pending)._in_turn(rest)]
    return placed if placed or running else _force(_kept(pending), load)


def _kept(pending: Sequence[Request] | Backlog) -> Backlog:
    return pending if isinstance(pending, Backlog) else Backlog(pending)


@dataclass
class _Rest:
    """What nobody uses and nothing was promised to: cores, bytes of memory, GPUs with their jobs.

    One working copy, which every placement reduces.
    """

    cores: list[int]
    memory: int
    gpus: list[Gpu]
    on_gpu: dict[int, _OnGpu]
    _known: dict[tuple[int, int], bool] = field(default_factory=dict)

    def fits(self, request: Request) -> bool:
        return (
            request.threads <= len(self.cores)
            and request.memory <= self.memory
            and not request.alone
            and (not request.gpu or self._has_gpu(request))
        )

    def take(self, request: Request) -> Placement:
        """Put a request that fits on the first cores and the emptiest GPU; that is left no more."""
        gpu = None
        if request.gpu:
            fitting = (gpu for gpu in self.gpus if self._fits_on(gpu, request))
            gpu = min(fitting, key=self._crowd)
            on_gpu = self.on_gpu.get(gpu.index, _NOBODY).with_(request)
            self.on_gpu[gpu.index] = on_gpu
            self._known.clear()
            if on_gpu.is_full:
                self.gpus.remove(gpu)
        placement = _placed(request, self.cores, gpu)
        del self.cores[: request.threads]
        self.memory -= request.memory
        return placement

    def _has_gpu(self, request: Request) -> bool:
        kind = request.gpu_memory, request.jobs_per_gpu
        if kind not in self._known:
            self._known[kind] = any(self._fits_on(gpu, request) for gpu in self.gpus)
        return self._known[kind]

    def _fits_on(self, gpu: Gpu, request: Request) -> bool:
        on_gpu = self.on_gpu.get(gpu.index, _NOBODY)
        most = min((request.jobs_per_gpu, *on_gpu.allowed))
        return len(on_gpu.allowed) < most and request.gpu_memory <= _room(gpu) - on_gpu.memory

    def _crowd(self, gpu: Gpu) -> tuple[int, int, int]:
        """How full a GPU is: jobs, then bytes that are not left."""
        on_gpu = self.on_gpu.get(gpu.index, _NOBODY)
        return len(on_gpu.allowed), on_gpu.memory - _room(gpu), gpu.index


def _room(gpu: Gpu) -> int:
    """Bytes that jobs of this run may take of it in all."""
    return gpu.free + gpu.own


def _force(backlog: Backlog, load: Load) -> list[Placement]:
    """At least one job runs, however busy the machine is."""
    request = backlog._first(gpus=bool(load.gpus))
    if request is None:
        return []
    order = (*load.idle, *(core for core in load.cores if core not in load.idle))
    gpu = min(load.gpus, key=lambda gpu: (-_room(gpu), gpu.index)) if request.gpu else None
    return [_placed(request, order, gpu)]


def _placed(request: Request, cores: Sequence[int], gpu: Gpu | None) -> Placement:
    return Placement(
        request.jobs or (request.job_id,),
        tuple(cores[: request.threads]),
        request.threads,
        None if gpu is None else gpu.index,
        request.memory,
        request.trainer,
        alone=request.alone,
        gpu_memory=request.gpu_memory,
        jobs_per_gpu=request.jobs_per_gpu,
    )
