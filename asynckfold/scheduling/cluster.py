"""The capacities of several nodes as one: which node gets the next job."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from asynckfold.jobs.placement import Placement, Request
from asynckfold.scheduling.backlog import Shape, shape_of
from asynckfold.scheduling.reservations import Capacity

_Ranked = tuple[tuple[float, ...], int, int]
"""How crowded a node would be, its position, and the number of its jobs when that was so."""


class Cluster:
    """The capacities of several nodes; each request is taken by one of them as a whole.

    A job goes where the most cores are left, a GPU job to the least crowded GPU, ties to the first
    node. There is a heap of the nodes for each combination of requested resources. Capacities only
    shrink, so the rank of a node in a heap may be too good, never too bad: it is corrected when it
    comes first and the node has got a job since, and a node where a request no longer fits leaves
    the heap for good.

    Parameters
    ----------
    nodes : sequence of Capacity
        In the order in which ties are decided.

    Examples
    --------
    >>> cluster = Cluster([Capacity(name, [0, 1], 1, [], {}, 0) for name in "xy"])
    >>> [cluster.take(Request(job, 1.0)).node for job in "abc"], cluster.cores
    (['x', 'y', 'x'], 1)
    """

    def __init__(self, nodes: Sequence[Capacity]) -> None:
        self._nodes = nodes
        self._heaps: dict[Shape, list[_Ranked]] = {}
        self.cores = sum(len(node.cores) for node in nodes)

    def fits(self, request: Request) -> bool:
        """Whether a request can start on any node."""
        return self._best(request) is not None

    def take(self, request: Request) -> Placement:
        """Place a request that fits."""
        node = self._best(request)
        assert node is not None
        before = len(node.cores)
        placement = node.take(request)
        self.cores += len(node.cores) - before
        return placement

    def _best(self, request: Request) -> Capacity | None:
        shape = shape_of(request)
        heap = self._heaps.get(shape)
        if heap is None:
            fitting = ((at, node) for at, node in enumerate(self._nodes) if node.fits(request))
            heap = self._heaps[shape] = [
                (node.crowd(request), at, node.jobs) for at, node in fitting
            ]
            heapq.heapify(heap)
        while heap:
            _, at, jobs = heap[0]
            node = self._nodes[at]
            if node.jobs == jobs:
                return node
            if node.fits(request):
                heapq.heapreplace(heap, (node.crowd(request), at, node.jobs))
            else:
                heapq.heappop(heap)
        return None
