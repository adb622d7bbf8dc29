"""The queue: pending requests, of which the longest is found at once, however many there are."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Protocol

from asynckfold.jobs.placement import Placement, Request

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

_Rank = tuple[float, str]
"""Where a request stands in its queue: -seconds, job id."""


class _Space(Protocol):
    """What is left, as far as the queue asks."""

    @property
    def cores(self) -> Sequence[int]: ...

    def fits(self, request: Request) -> bool: ...


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
    >>> from asynckfold.placement import Load, place
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

    def in_turn(self, rest: _Space) -> Iterator[Request]:
        """Return requests that fit into the `rest`, the longest first.

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

    def first(self, gpus: bool) -> Request | None:
        """Return the longest request whose device is there; one that must be alone comes last."""
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
