"""The actors of a Ray cluster's nodes: started, kept for the next call, ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asynckfold.engines.ray_handle import NodeHandle, NodeSettings
from asynckfold.engines.ray_node import RayNode
from asynckfold.jobs.placement import Load, NodeSize

RENEW_SECONDS = 10.0
"""Time for a warm actor to answer; a new one takes its place then."""

Item = Mapping[str, Any]
"""What Ray tells of a node."""


@dataclass(frozen=True, eq=False)
class Started:
    """An actor that is ready, and what it has answered."""

    actor: Any
    address: str
    cores: int
    load: Load


def handle(item: Item, name: str, started: Started) -> NodeHandle:
    """Return a node with its actor."""
    resources = item["Resources"]
    cpus = resources.get("CPU", 0.0)
    return NodeHandle(
        item["NodeID"],
        name,
        started.actor,
        started.address,
        cpus,
        resources.get("GPU", 0.0),
        int(resources.get("memory", 0)),
        started.load,
        NodeSize(min(started.cores, int(cpus)), len(started.load.gpus)),
        host=item["NodeManagerAddress"],
    )


def start(
    found: Sequence[Item], settings: NodeSettings, timeout_s: float
) -> Iterator[tuple[Item, Started]]:
    """Start an actor on each of these nodes; yield them when they are ready."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kind = ray.remote(RayNode)
    starting = []
    for item in found:
        strategy = NodeAffinitySchedulingStrategy(item["NodeID"], soft=False)
        made = kind.options(num_cpus=0, max_concurrency=8, scheduling_strategy=strategy)
        actor = made.remote(*vars(settings).values())
        starting.append((item, actor, actor.where.remote()))
    for item, actor, described in starting:
        yield item, Started(actor, *ray.get(described, timeout=timeout_s))


def renew(pairs: Sequence[tuple[Item, Any]], settings: NodeSettings) -> list[tuple[Item, Started]]:
    """Give warm actors the settings of another call; return those that can be used for it."""
    import ray

    asked = [(item, actor, actor.renew.remote(*vars(settings).values())) for item, actor in pairs]
    found = []
    for item, actor, answer in asked:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            if (told := ray.get(answer, timeout=RENEW_SECONDS)) is not None:
                found.append((item, Started(actor, *told)))
    return found


def kill(actors: Iterable[Any]) -> None:
    """End actors at once; what they have started ends with them."""
    import ray

    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)


def is_connected(job: str) -> bool:
    """Whether this process is still connected as it was when it got this job."""
    import ray

    return bool(ray.is_initialized() and ray.get_runtime_context().get_job_id() == job)


def leave(job: str) -> None:
    """Disconnect this process, unless its user did, and joined another cluster."""
    import ray

    if is_connected(job):
        ray.shutdown()
