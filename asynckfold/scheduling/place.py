"""The decision: what is reserved, what is left of the machine, and what starts there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from asynckfold.jobs.placement import Gpu, Load, Placement, Request
from asynckfold.scheduling.backlog import Backlog

_Key = TypeVar("_Key")


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


class Reservations:
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
    >>> running = Reservations([Placement(("a",), (0,))])
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
        """Reserve what a placement holds."""
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
    pending: Sequence[Request] | Backlog, running: Sequence[Placement] | Reservations, load: Load
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
    running : sequence of Placement, or Reservations
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
    reservations = running if isinstance(running, Reservations) else Reservations(running)
    rest = reservations._rest(load)
    placed: list[Placement] = []
    # Nothing idle is the usual answer while jobs run: it costs no look at the queue.
    if rest.cores:
        placed = [rest.take(request) for request in _kept(pending).in_turn(rest)]
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
    request = backlog.first(gpus=bool(load.gpus))
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
