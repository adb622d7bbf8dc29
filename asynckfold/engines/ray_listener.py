"""Listens to the nodes of a Ray cluster: one call to each waits for its messages."""

from __future__ import annotations

import pickle
import threading
from typing import Any, Protocol

from asynckfold.engines import ray_room
from asynckfold.engines.ray_drain import draining
from asynckfold.engines.ray_engine import Cluster, PlacedWork, RayEngine
from asynckfold.engines.ray_handle import NodeHandle
from asynckfold.errors import WorkerDiedError

POLL_SECONDS = 0.25
"""How old the load of a node may be."""


class Heard(Cluster, Protocol):
    """A cluster that is listened to."""

    closing: threading.Event

    def lose(self, node: NodeHandle, why: str) -> None:
        """Take note that the actor of a node is gone."""
        ...

    def look_at_begin(self, node: NodeHandle) -> None:
        """Take note of whether a node could begin."""
        ...


def listen(cluster: Heard) -> None:
    """Run in the listening thread."""
    import ray

    calls: dict[Any, NodeHandle] = {}
    while not cluster.closing.is_set():
        for node in [*cluster.nodes.values()]:
            if not node.is_lost and node not in calls.values():
                calls[node.actor.poll.remote(POLL_SECONDS)] = node
        engine = cluster.engine
        leases = {} if engine is None else engine.leases()
        begins = {node.unread: node for node in [*cluster.nodes.values()] if node.unread}
        waited = [*begins, *calls, *leases]
        if not waited:
            cluster.closing.wait(POLL_SECONDS)
            continue
        ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        if not ready:
            ready, _ = ray.wait(waited, num_returns=1, timeout=POLL_SECONDS)
        for call in ready:
            if call in begins:
                cluster.look_at_begin(begins[call])
                continue
            if call in leases and engine is not None:
                _take_end(engine, leases[call])
                continue
            node = calls.pop(call)
            try:
                load, messages = pickle.loads(ray_room.received(node.actor, call))
            except ray.exceptions.RayError as error:
                cluster.lose(node, " ".join(str(error).split())[:400])
                continue
            node.load = load
            for message in messages:
                if cluster.engine is not None:
                    cluster.engine.hear(message)


def _take_end(engine: RayEngine, work: PlacedWork) -> None:
    """Tell the engine how the task of a placement has ended."""
    import ray

    known = ray.exceptions
    error, is_lost = None, False
    try:
        ray.get(work.lease)
    except known.RayError as failure:
        outcome = "oom" if isinstance(failure, known.OutOfMemoryError) else "died"
        text = " ".join(str(failure).split())[:400]
        error = WorkerDiedError(0, f"Ray gave up its cores: {text}", outcome)
        is_lost = isinstance(failure, (known.NodeDiedError, known.TaskUnschedulableError))
        if ray_room.is_without_room(failure):
            engine.leave_out(work.node, ray_room.WHY)
        if isinstance(failure, known.TaskUnschedulableError):
            why = draining().get(work.node.identity)
            if why is not None:
                engine.leave_out(work.node, why)
    engine.give_up(work, error, is_lost=is_lost)
