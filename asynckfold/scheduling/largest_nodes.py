"""Where a job starts that is too large for every node of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.scheduling.reservations import EMPTY_SHARE, Capacity


class LargestNodes:
    """Nodes where nothing runs, for jobs that need more cores or memory than any node has.

    Such a job starts on a node with the most cores, of these on one with about the most memory. It
    waits for one of them rather than start on a smaller node, and for cores that others use.

    Parameters
    ----------
    nodes : sequence of Load
        All nodes.
    empty : sequence of Capacity
        Those on which nothing runs.

    Examples
    --------
    >>> nodes = [Load((0, 1), (0, 1), 9, node="x"), Load((0,), (0,), 9, node="y")]
    >>> free = [Capacity(node.node, [*node.idle], 9, [], {}, 0) for node in nodes]
    >>> large = LargestNodes(nodes, free)
    >>> large.fits(Request("fits on x", 1.0, threads=2))
    False
    >>> large.take(Request("fits nowhere", 1.0, threads=4)).node, large.cores
    ('x', 1)
    """

    def __init__(self, nodes: Sequence[Load], empty: Sequence[Capacity]) -> None:
        self._nodes = [node for node in nodes if not node.blocked]
        self._empty = {node.node: node for node in empty}

    @property
    def cores(self) -> int:
        """The idle cores of these nodes."""
        return sum(len(node.cores) for node in self._empty.values())

    def fits(self, request: Request) -> bool:
        """Whether a request is too large for every node, and one of the largest is free."""
        return self._best(request) is not None

    def take(self, request: Request) -> Placement:
        """Place a request for which `fits` holds."""
        node = self._best(request)
        assert node is not None
        return self._empty.pop(node.node).take(request)

    def _best(self, request: Request) -> Capacity | None:
        if request.nodes > 1 or not self._empty:
            return None
        if any(_holds(node, request) for node in self._nodes):
            return None
        able = [node for node in self._nodes if _has_gpus(node, request)]
        cores = max((len(node.cores) for node in able), default=0)
        able = [node for node in able if len(node.cores) >= min(cores, request.threads)]
        memory = max((node.free_memory for node in able), default=0)
        least = min(request.memory, EMPTY_SHARE * memory)
        for node in able:
            free = self._empty.get(node.node)
            if free is None or node.free_memory < least:
                continue
            wanted = min(request.threads, len(node.cores))
            if free.fits(replace(request, threads=wanted, memory=0, alone=free.alone)):
                return free
        return None


def _holds(node: Load, request: Request) -> bool:
    """Whether a request would fit on a node that nobody else uses."""
    return (
        request.threads <= len(node.cores)
        and request.memory <= node.free_memory
        and _has_gpus(node, request)
    )


def _has_gpus(node: Load, request: Request) -> bool:
    return not request.gpu or len(node.gpus) >= request.gpus
