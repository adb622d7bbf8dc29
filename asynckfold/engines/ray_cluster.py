"""The Ray engine: placements run on the nodes of a Ray cluster. The only file that imports ray.

::

    submit ──► expect ──► the node's actor (`ray_node`)          checkpoints, log lines, events,
       └─────► hold ────► a task that reserves cores on the node    results and the load come back
                            └─ connects: the placement starts       by `poll`, one call per node

The run's folder is written by this process alone: files arrive as bytes, before the event that
tells of them. Data are put into Ray's shared memory once and mapped by all workers of a node. The
user's own code travels by value, also that of modules.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asynckfold.engines import ray_room
from asynckfold.engines.ray_address import (
    answers,
    checked,
    free_name,
    host_of,
    listens,
    named,
    version_problem,
    version_reader,
)
from asynckfold.engines.ray_drain import draining, staying
from asynckfold.engines.ray_engine import END_SECONDS, PlacedWork, RayEngine
from asynckfold.engines.ray_handle import NodeHandle, NodeSettings
from asynckfold.engines.ray_join import check_connection, connect, silenced
from asynckfold.engines.ray_local import LocalRay
from asynckfold.engines.ray_node import NodeData, RayNode, ScratchFolder, hold
from asynckfold.errors import Problem, StorageError, WorkerDiedError, refuse
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.messages import Noted
from asynckfold.jobs.placement import NodeSize
from asynckfold.jobs.recipe import pack
from asynckfold.jobs.reproducibility import NODES
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.prepare import Prepared
    from asynckfold.training.bundle import Bundle

POLL_SECONDS = 0.25
"""How old the load of a node may be."""

WATCH_SECONDS, HEAD_SECONDS = 1.0, 10.0
"""Interval between looks at the cluster, and how long its head may be silent."""


@contextmanager
def ray_cluster(
    address: str | None,
    runtime_env: Mapping[str, Any] | None,
    timeout_s: float,
    settings: NodeSettings,
    cores: int,
    signals: Interruption,
) -> Iterator[RayCluster]:
    """Yield the named cluster, or a Ray of this machine with so many cores, which then ends.

    Raises
    ------
    InputError
        The cluster cannot be used; nothing was started in it.
    """
    import ray

    refuse(checked(address))
    place = named(address)
    with ExitStack() as stack:
        if ray.is_initialized():
            check_connection(place)
        else:
            if not place:
                local = LocalRay(cores, signals)
                stack.callback(local.close)
                place = local.address
            stack.enter_context(silenced())
            connect(place, runtime_env, timeout_s)
            stack.callback(ray.shutdown)
        cluster = RayCluster(settings, timeout_s)
        stack.callback(cluster.close)
        cluster.open()
        yield cluster


class RayCluster:
    """The nodes of a cluster; one engine at a time uses them."""

    def __init__(self, settings: NodeSettings, timeout_s: float) -> None:
        import ray

        self.numbers: Iterator[int] = itertools.count()
        self.nodes: dict[str, NodeHandle] = {}
        self.engine: RayEngine | None = None
        self._settings, self._timeout_s = settings, timeout_s
        # Once: each new remote function is sent to the head, for which this process would wait.
        self._hold = ray.remote(hold)
        self._here = ray.get_runtime_context().get_node_id()
        self.head = ray.get_runtime_context().gcs_address
        self._socket = ""
        self.failure: StorageError | None = None
        self._data: tuple[weakref.ref[Any], list[Any]] | None = None
        self._sent: tuple[int, Any] | None = None
        self._refused: set[str] = set()
        self._kinds: set[str] = set()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._guarded, args=(work,), name=f"asynckfold-ray-{name}", daemon=True
            )
            for name, work in (("listener", self._listen), ("watcher", self._watch))
        ]

    def open(self) -> None:
        """Check the nodes, and start an actor on each."""
        found = staying(self._alive(), self._here)
        refuse(self._problems(found))
        self._socket = next(i["RayletSocketName"] for i in found if i["NodeID"] == self._here)
        self._start(found)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the actors and what they started."""
        import ray

        self._closing.set()
        ends = [node.actor.quit.remote() for node in self.nodes.values() if not node.is_lost]
        self.wait(ends, END_SECONDS)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_SECONDS)
        for node in self.nodes.values():
            ray.kill(node.actor)
        self._data = self._sent = None

    def begin(self, engine: RayEngine, threads: int, bundle: Bundle, data: Prepared) -> None:
        """Send a bundle and its data to all nodes."""
        import numpy as np

        self.engine = engine
        handle, is_new = bundle.data, False
        needed = sum(spec.nbytes for spec in handle.specs)
        if self._data is None or self._data[0]() is not data:
            arrays = [
                spec.map_readable(fd) for spec, fd in zip(handle.specs, handle.fds, strict=True)
            ]
            is_new = True
            self._data = weakref.ref(data), ray_room.put(arrays, needed)
        there: Any = NodeData(handle)
        scratch: Any = ScratchFolder()
        with sent_by_value():
            packed = pack(replace(bundle, data=there, root=scratch, code={}))
        self._sent = threads, *ray_room.put([np.frombuffer(packed, np.uint8)], needed)
        for node in self.nodes.values():
            self._begin_on(node)
        if is_new:
            ray_room.check(self.nodes, needed)

    def _begin_on(self, node: NodeHandle) -> None:
        """Send the present bundle to a node, with the data if it lacks them."""
        if self._sent is None or self._data is None or not node.is_used:
            return
        reference, arrays = self._data
        known = node.has is reference
        node.begun = node.actor.begin.remote(*self._sent, *(() if known else arrays))
        node.unread = node.begun
        node.has = reference

    def lease(self, work: PlacedWork) -> Any:
        """Ask Ray for what a placement needs on its node; return the task that holds it."""
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        strategy: Any = NodeAffinitySchedulingStrategy(work.node.identity, soft=False)
        if work.reserved is not None:
            at = work.group.index(work)
            strategy = PlacementGroupSchedulingStrategy(work.reserved, at)
        task = self._hold.options(**work.wanted, max_retries=0, scheduling_strategy=strategy)
        return task.remote(work.node.address, work.number, work.expected)

    def reserve(self, works: Sequence[PlacedWork]) -> None:
        """Ask Ray for what the parts of a placement need on their nodes, all at once."""
        from ray.util import placement_group

        group = placement_group(
            [work.bundle for work in works],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": work.node.identity} for work in works],
        )
        for work in works:
            work.reserved = group

    def release(self, works: Sequence[PlacedWork]) -> None:
        """Give that back."""
        import ray

        if works[0].reserved is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(works[0].reserved)

    def cancel(self, work: PlacedWork) -> None:
        """Withdraw the request of a placement."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(work.lease)

    def wait(self, answers: Sequence[Any], seconds: float) -> None:
        """Wait for answers of nodes, at most so long."""
        import ray

        if answers:
            ray.wait(list(answers), num_returns=len(answers), timeout=seconds)

    @property
    def software(self) -> dict[str, str]:
        """What a session records of the nodes: their kinds of processor, if they differ."""
        return {NODES: "; ".join(sorted(self._kinds))} if len(self._kinds) > 1 else {}

    def _problems(self, found: Sequence[Mapping[str, Any]]) -> list[Problem]:
        """Return why nodes cannot train; remember the kinds of their processors."""
        problems, kinds = looked_at(found, self._timeout_s, bool(self.nodes) or len(found) > 1)
        self._kinds |= kinds
        return problems

    def _alive(self) -> list[dict[str, Any]]:
        import ray

        found = [item for item in ray.nodes() if item["Alive"]]
        return sorted(found, key=lambda item: (item["NodeID"] != self._here, item["NodeID"]))

    def _start(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Start an actor on each of these nodes, and read their loads."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind, told = ray.remote(RayNode), self._settings
        starting = []
        for item in found:
            strategy = NodeAffinitySchedulingStrategy(item["NodeID"], soft=False)
            made = kind.options(num_cpus=0, max_concurrency=8, scheduling_strategy=strategy)
            actor = made.remote(*vars(told).values())
            starting.append((item, actor, actor.where.remote(), actor.poll.remote(0)))
        for item, actor, described, polled in starting:
            address, cores = ray.get(described, timeout=self._timeout_s)
            load, _ = pickle.loads(ray.get(polled, timeout=self._timeout_s))
            name = self._name_of(item)
            resources = item["Resources"]
            node = NodeHandle(
                item["NodeID"],
                name,
                actor,
                address,
                resources.get("CPU", 0.0),
                resources.get("GPU", 0.0),
                int(resources.get("memory", 0)),
                load,
                NodeSize(min(cores, int(resources.get("CPU", 0.0))), len(load.gpus)),
                host=item["NodeManagerAddress"],
            )
            self._begin_on(node)
            self.nodes[name] = node

    def _name_of(self, item: Mapping[str, Any]) -> str:
        """Return a node's name; empty: this machine."""
        taken = {node.name for node in self.nodes.values() if not node.is_lost}
        return "" if item["NodeID"] == self._here else free_name(item, taken)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run in a thread: whatever Ray raises there ends the sweep, which would wait for ever."""
        try:
            work()
        except Exception as error:  # noqa: BLE001
            if not self._closing.is_set():
                self._fail(f"the connection to Ray broke: {type(error).__name__}: {error}")

    def _fail(self, what: str) -> None:
        if self.failure is not None:
            return
        self.failure = StorageError(
            errno.ENOTCONN, f"{what}. See that the cluster runs; the same call continues"
        )
        if self.engine is not None:
            self.engine.fail(self.failure)

    def _listen(self) -> None:
        """Run in the listening thread: one call to each node waits for its messages."""
        import ray

        calls: dict[Any, NodeHandle] = {}
        while not self._closing.is_set():
            for node in [*self.nodes.values()]:
                if not node.is_lost and node not in calls.values():
                    calls[node.actor.poll.remote(POLL_SECONDS)] = node
            engine = self.engine
            leases = {} if engine is None else engine.leases()
            begins = {node.unread: node for node in [*self.nodes.values()] if node.unread}
            waited = [*begins, *calls, *leases]
            if not waited:
                self._closing.wait(POLL_SECONDS)
                continue
            ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
            if not ready:
                ready, _ = ray.wait(waited, num_returns=1, timeout=POLL_SECONDS)
            for call in ready:
                if call in begins:
                    self._look_at_begin(begins[call])
                    continue
                if call in leases and engine is not None:
                    _take_end(engine, leases[call])
                    continue
                node = calls.pop(call)
                try:
                    load, messages = pickle.loads(ray_room.received(node.actor, call))
                except ray.exceptions.RayError as error:
                    self._lose(node, " ".join(str(error).split())[:400])
                    continue
                node.load = load
                for message in messages:
                    if self.engine is not None:
                        self.engine.hear(message)

    def look_here(self) -> None:
        """Fail if the node of this machine is gone: Ray's next write to it ends the process."""
        if not listens(self._socket):
            self._fail("the Ray node of this machine is gone")

    def _lose(self, node: NodeHandle, why: str) -> None:
        node.is_lost = True
        if node.identity == self._here:
            self.look_here()
        if self.engine is not None:
            self.engine.lose(node, why)

    def _look_at_begin(self, node: NodeHandle) -> None:
        node.unread = None
        if node.is_used and ray_room.lacks_room(node):
            self._leave_out(node, ray_room.WHY)

    def _leave_out(self, node: NodeHandle, why: str) -> None:
        if self.engine is not None:
            self.engine.leave_out(node, why)
        else:
            node.left_out = node.left_out or why

    def _watch(self) -> None:
        """Run in the watching thread: what others reserve, nodes that come, a head that goes."""
        answered = time.monotonic()
        while not self._closing.wait(WATCH_SECONDS):
            if answers(self.head):
                answered = time.monotonic()
                self._look()
            elif time.monotonic() - answered > HEAD_SECONDS:
                self._fail(f"the head of the Ray cluster at {self.head} does not answer any more")

    def _look(self) -> None:
        import ray
        from ray._private.state import available_resources_per_node

        try:
            free = available_resources_per_node()
            known = {node.identity for node in self.nodes.values() if not node.is_lost}
            alive = self._alive()
            if self._here not in {item["NodeID"] for item in alive}:
                self._fail("the Ray node of this machine is gone")
                return
            leaving = draining()
            for node in [*self.nodes.values()]:
                if node.identity in leaving:
                    self._leave_out(node, leaving[node.identity])
            passed = known | self._refused | {*leaving}
            fresh = [item for item in alive if item["NodeID"] not in passed]
            problems = self._problems(fresh)
            still = {item["NodeID"] for item in self._alive()}
            if not still.issuperset(item["NodeID"] for item in fresh):
                return  # a node that has just died is known as alive for a moment
            if problems:
                self._refused |= {item["NodeID"] for item in fresh}
                self._say("; ".join(map(str, problems)))
            elif fresh:
                self._start(fresh)
                self._say(f"more nodes: {', '.join(map(host_of, fresh))}")
        except (ray.exceptions.RayError, RuntimeError, TimeoutError):
            return  # the next look, or the poll of the node, tells
        for node in [*self.nodes.values()]:
            own = self.engine.reserved_on(node) if self.engine is not None else 0.0
            there = free.get(node.identity, {}).get("CPU", 0.0)
            node.reserved = (node.reserved[1], max(0.0, node.cpus - there - own))

    def _say(self, text: str) -> None:
        if self.engine is not None:
            self.engine.say(Noted(None, "cluster", text))


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


def looked_at(
    found: Sequence[Mapping[str, Any]], timeout_s: float, several: bool
) -> tuple[list[Problem], set[str]]:
    """Return why nodes cannot train, and, of several, the kinds of their processors."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    versions = version_reader()
    here = versions(False)[:2]
    problems: list[Problem] = []
    kinds: set[str] = set()
    asked = []
    for item in found:
        strategy = NodeAffinitySchedulingStrategy(item["NodeID"], soft=False)
        task = ray.remote(versions).options(num_cpus=0, scheduling_strategy=strategy)
        asked.append((item, task.remote(several)))
    for item, answer in asked:
        place = host_of(item)
        try:
            there, its_torch, kind = ray.get(answer, timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            rule = "each node of the cluster must start a process"
            told = f"{place}: {' '.join(str(error).split())[:400]}"
            remedy = "See Ray's logs there, remove the node, or wait longer by connect_timeout_s."
            problems.append(Problem(rule, told, remedy))
            continue
        kinds.add(kind)
        if (there, its_torch) != here:
            problems.append(version_problem(place, (there, its_torch), here))
    return problems, kinds - {""}
