"""A node of a Ray cluster as the driver sees it, and what each is told. No import of ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asynckfold.jobs.placement import Load, NodeSize
from asynckfold.jobs.reproducibility import VARIABLES
from asynckfold.system.machine import Machine


@dataclass(frozen=True, eq=False)
class NodeSettings:
    """What each node is told: the arguments of `RayNode`."""

    make_machine: Callable[[], Machine]
    n_jobs: int | str | None
    nice: int
    stall_timeout: float | str | None
    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in VARIABLES if name in os.environ}
    )


@dataclass(eq=False)
class NodeHandle:
    """A node of the cluster, as the driver sees it.

    Parameters
    ----------
    identity, name, host : str
        Ray's own, the one in placements (empty: this machine), and the address.
    actor : object
        Ray's handle of the `RayNode` there.
    address : str
        Where tasks of Ray reach it, on the node.
    cpus, gpus, memory : number
        What Ray may give away there.
    load : Load
        The latest.
    size : NodeSize
        What a run may use there.
    begun : object
        The answer of its actor to the present bundle.
    reserved : tuple of two floats
        Cores that Ray has given to others, at the last two looks.
    has : object
        The data that it has.
    is_lost : bool
        Whether its actor is gone.
    left_out : str
        Why it gets no more jobs, though it is there.
    unread : object
        `begun`, until somebody has looked whether that went well.
    """

    identity: str
    name: str
    actor: Any
    address: str
    cpus: float
    gpus: float
    memory: int
    load: Load
    size: NodeSize
    begun: Any = None
    reserved: tuple[float, float] = (0.0, 0.0)
    has: Any = None
    is_lost: bool = False
    host: str = ""
    left_out: str = ""
    unread: Any = None

    @property
    def is_used(self) -> bool:
        """Whether it may get jobs."""
        return not (self.is_lost or self.left_out)

    @property
    def place(self) -> str:
        """Its name, for people."""
        return f"node {self.name or 'of this machine'}"


def sizes(nodes: Iterable[NodeHandle]) -> dict[str, NodeSize]:
    """Return what a run may use of each node that is there and may train, by its name."""
    return {node.name: node.size for node in nodes if node.is_used and node.size.cores}
