"""The queue of pending jobs: finds the longest one quickly among 100,000."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from asynckfold.jobs.placement import Placement, Request

if TYPE_CHECKING:
    from asynckfold.scheduling.reservations import Cluster

JOB_BATCH_SECONDS = 0.5
"""Longest batch of short jobs, in expected seconds. A placement costs about 5 ms (two commits, a
reading of the load, a round trip to the worker): larger values cost less overhead; smaller ones
shorten the wait for the last core."""

NODE_BATCH_SECONDS = 1.0
"""The same on the nodes of a cluster: there Ray must also grant the cores of each placement."""

JOB_BATCHES_PER_CORE = 4
"""Batches of short jobs that are left for each core at least, so that all cores end together."""

Shape = tuple[int, int, bool, bool, int, float]

shape_of: Callable[[Request], Shape] = attrgetter(
    "threads", "memory", "gpu", "alone", "gpu_memory", "gpu_share"
)
"""The resources of a request: two requests of one shape fit in the same places."""

_Rank = tuple[bool, int, float, str]
"""(not on a GPU, stage, -seconds, job id): a GPU must not idle because jobs on cores took all of
them."""


class _Queue:
    """A heap of the requests of one shape, that of `like`.

    Removal is lazy below the top: a removed rank stays in the heap until it reaches the top.
    """

    def __init__(self, like: Request) -> None:
        self.like = like
        self._heap: list[_Rank] = []
        self._alive: dict[str, _Rank] = {}

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def head(self) -> _Rank:
        """The first rank; the queue must not be empty."""
        return self._heap[0]

    def add(self, rank: _Rank) -> None:
        self._alive[rank[-1]] = rank
        heapq.heappush(self._heap, rank)

    def remove(self, job_id: str) -> None:
        del self._alive[job_id]
        while self._heap and not self._is_alive(self._heap[0]):
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._alive):
            self._heap = sorted(self._alive.values())

    def followers(self) -> Iterator[_Rank]:
        """Yield the ranks after the head in order, lazily; the k-th costs O(log k)."""
        front = [(self._heap[0], 0)]
        while front:
            rank, at = heapq.heappop(front)
            if at and self._is_alive(rank):
                yield rank
            for child in range(2 * at + 1, min(2 * at + 3, len(self._heap))):
                heapq.heappush(front, (self._heap[child], child))

    def _is_alive(self, rank: _Rank) -> bool:
        # By identity: a job that was removed and added again has two equal ranks in the heap.
        return self._alive.get(rank[-1]) is rank


class Backlog:
    """Pending requests, kept in order from one call of `place` to the next.

    There is one queue, longest job first, for each combination of requested resources. `place`
    reads only their heads, so that its cost does not grow with the number of pending jobs.

    Parameters
    ----------
    requests : iterable of Request
        With distinct job ids.
    batch_seconds : float, optional
        Longest batch of short jobs; `JOB_BATCH_SECONDS` by default.

    Examples
    --------
    >>> backlog = Backlog([Request("a", 2.0), Request("b", 3.0)])
    >>> backlog.first(lambda like: not like.gpu).job_id
    'b'
    >>> backlog.remove("b").seconds, len(backlog), "b" in backlog
    (3.0, 1, False)
    """

    def __init__(
        self, requests: Iterable[Request] = (), batch_seconds: float | None = None
    ) -> None:
        self._batch_seconds = JOB_BATCH_SECONDS if batch_seconds is None else batch_seconds
        self._requests: dict[str, Request] = {}
        self._queues: dict[Shape, _Queue] = {}
        self._jobs: Counter[Shape] = Counter()
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of addition."""
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
        shape = shape_of(request)
        queue = self._queues.get(shape)
        if queue is None:
            queue = self._queues[shape] = _Queue(request)
        queue.add((not request.gpu, request.stage, -request.seconds, request.job_id))
        self._jobs[shape] += request.width

    def remove(self, job_id: str) -> Request:
        """Remove and return the request of a job; O(log n), amortized.

        Raises
        ------
        KeyError
            The job is not pending.
        """
        request = self._requests.pop(job_id)
        shape = shape_of(request)
        queue = self._queues[shape]
        queue.remove(job_id)
        self._jobs[shape] -= request.width
        if not queue:
            del self._queues[shape], self._jobs[shape]
        return request

    def extend(self, first: Request, placement: Placement, cores: int) -> Placement:
        """Extend the placement of a short job to a batch of short jobs, removed from the backlog.

        Parameters
        ----------
        first : Request
            The job that was placed, already removed. If it is not short, nothing follows it.
        placement : Placement
            Its placement.
        cores : int
            Number of cores that share the remaining jobs.

        Examples
        --------
        >>> backlog = Backlog(Request(name, 0.01) for name in "abcdefghi")
        >>> backlog.extend(backlog.remove("a"), Placement(("a",), (0,)), cores=1).jobs
        ('a', 'b', 'c')
        >>> len(backlog)
        6
        """
        names, left = [first.job_id], self._batch_seconds - first.seconds
        count = 1 + len(self) // (JOB_BATCHES_PER_CORE * cores)
        if not _is_single(first) or left < 0:
            return placement
        for queue in self._queues.values():
            if not _can_follow(queue.like, first):
                continue
            for *_, name in chain([queue.head], queue.followers()):
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
        """Return a request of each shape, and how many jobs have that shape."""
        return ((queue.like, self._jobs[shape]) for shape, queue in self._queues.items())

    def in_turn(self, capacity: Cluster) -> Iterator[Request]:
        """Yield requests that fit, those on a GPU and then the longest first.

        The caller reduces the capacity; a shape that no longer fits is skipped from then on.
        """
        turn = [
            (queue.head, queue.like, queue.followers())
            for queue in self._queues.values()
            if capacity.fits(queue.like)
        ]
        heapq.heapify(turn)
        while turn and capacity.cores:
            (*_, job_id), like, followers = turn[0]
            following = None
            if capacity.fits(like):
                yield self._requests[job_id]
                following = next(followers, None)
            if following is None:
                heapq.heappop(turn)
            else:
                heapq.heapreplace(turn, (following, like, followers))

    def first(self, can_start: Callable[[Request], bool]) -> Request | None:
        """Return the first request that can start; those that must run alone come last.

        `can_start` is asked of one request of each kind, and must not look at its job or seconds.
        """
        heads = [
            (queue.like.alone, queue.head)
            for queue in self._queues.values()
            if can_start(queue.like)
        ]
        return self._requests[min(heads)[1][-1]] if heads else None


def _is_single(request: Request) -> bool:
    """Whether it is one job in one process, of known duration."""
    return request.trainer == "plain" and not request.alone and request.seconds > 0


def _can_follow(later: Request, first: Request) -> bool:
    """Whether the placement of the first is enough for the later request."""
    return (
        (later.threads, later.gpu, later.alone, later.gpu_share)
        == (first.threads, first.gpu, first.alone, first.gpu_share)
        and later.memory <= first.memory
        and later.gpu_memory <= first.gpu_memory
    )
