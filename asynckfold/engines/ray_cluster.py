"""The Ray engine: placements run on the nodes of a Ray cluster.

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
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from asynckfold.engines import ray_actors, ray_room, ray_warm
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
from asynckfold.engines.ray_listener import listen
from asynckfold.engines.ray_local import LocalRay
from asynckfold.engines.ray_node import NodeData, ScratchFolder, hold
from asynckfold.errors import Problem, StorageError, refuse
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.messages import Note
from asynckfold.jobs.recipe import pack
from asynckfold.jobs.reproducibility import NODES
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.prepare import Prepared
    from asynckfold.training.bundle import Bundle

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
    refuse(checked(address))
    key = ray_warm.Key(named(address), runtime_env or {}, settings.nice, settings.variables)
    cluster = ray_warm.take(key)
    if cluster is None:
        cluster = _joined(key, timeout_s, settings, cores, signals)
    try:
        cluster.open(settings, timeout_s)
        yield cluster
    except BaseException:
        cluster.end()
        raise
    if cluster.rest():
        ray_warm.give_back(cluster)


def _joined(
    key: ray_warm.Key, timeout_s: float, settings: NodeSettings, cores: int, signals: Interruption
) -> RayCluster:
    """Join the named cluster, or the Ray of this machine that is started for the call."""
    import ray

    with ExitStack() as stack:
        is_lasting, place = key.lasts, key.address
        if ray.is_initialized():
            check_connection(place)
        else:
            if not place:
                local = LocalRay(cores, signals)
                stack.callback(local.close)
                is_lasting, place = False, local.address
            stack.enter_context(silenced())
            connect(place, key.runtime_env, timeout_s)
            stack.callback(ray_actors.leave, ray.get_runtime_context().get_job_id())
        cluster = RayCluster(settings, timeout_s, key if is_lasting else None)
        cluster.left = stack.pop_all()
    return cluster


class RayCluster:
    """The nodes of a cluster; one engine at a time uses them."""

    def __init__(
        self, settings: NodeSettings, timeout_s: float, key: ray_warm.Key | None = None
    ) -> None:
        import ray

        self.numbers: Iterator[int] = itertools.count()
        self.nodes: dict[str, NodeHandle] = {}
        self.engine: RayEngine | None = None
        self._settings, self._timeout_s, self._key = settings, timeout_s, key
        self.left = ExitStack()
        # Once: each new remote function is sent to the head, for which this process would wait.
        self._hold = ray.remote(hold)
        self._here = ray.get_runtime_context().get_node_id()
        self.head = ray.get_runtime_context().gcs_address
        self._job = ray.get_runtime_context().get_job_id()
        self._socket = ""
        self.failure: StorageError | None = None
        self._data: tuple[weakref.ref[Any], list[Any]] | None = None
        self._sent: tuple[int, Any] | None = None
        self._refused: set[str] = set()
        self._kinds: set[str] = set()
        self.closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self, settings: NodeSettings, timeout_s: float) -> None:
        """Check the nodes, and see that each has an actor for these settings."""
        self._settings, self._timeout_s = settings, timeout_s
        found, fresh = self._found()
        self._socket = next(i["RayletSocketName"] for i in found if i["NodeID"] == self._here)
        self._start(fresh)
        self._refused, self.closing = set(), threading.Event()
        for name, work in (("listener", partial(listen, self)), ("watcher", self._watch)):
            guarded = partial(self._guarded, work)
            thread = threading.Thread(target=guarded, name=f"asynckfold-ray-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _found(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the nodes that are there, and those of them that need a new actor."""
        while True:
            found = staying(self._alive(), self._here)
            fresh = self._renew(found)
            if not fresh:
                return found, []
            # Of all nodes, whose processors are compared.
            self._kinds = set()
            problems = self._problems(found)
            still = {item["NodeID"] for item in self._alive()}
            # A node that has just died is known as alive for a moment.
            if not problems or still.issuperset(item["NodeID"] for item in found):
                refuse(problems)
                return found, fresh

    def _renew(self, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give warm actors new settings; return the nodes that have none that can be used."""
        warm = {node.identity: node for node in self.nodes.values() if not node.is_lost}
        pairs = [(item, warm[item["NodeID"]].actor) for item in found if item["NodeID"] in warm]
        renewed = ray_actors.renew(pairs, self._settings)
        self.nodes = {}
        for item, started in renewed:
            self._add(item, started)
        known = {node.identity for node in self.nodes.values()}
        ray_actors.kill([node.actor for key, node in warm.items() if key not in known])
        return [item for item in found if item["NodeID"] not in known]

    def rest(self) -> bool:
        """Leave the nodes without work; return whether their actors stay warm, or end all."""
        if self._key is None or self.failure is not None:
            self.end()
            return False
        self._stop("rest")
        return True

    def end(self) -> None:
        """End the actors and what they started, and leave the cluster."""
        try:
            self._stop("quit")
            ray_actors.kill([node.actor for node in self.nodes.values()])
        finally:
            self.disconnect()

    def _stop(self, how: str) -> None:
        """End all work; the actors are asked to rest, or to quit."""
        self.closing.set()
        present = [node.actor for node in self.nodes.values() if not node.is_lost]
        self.wait([getattr(actor, how).remote() for actor in present], END_SECONDS)
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._threads = []
        self._data = self._sent = None

    def disconnect(self) -> None:
        """Leave the cluster, if this package has joined it; end a Ray of its own."""
        self.left.close()

    def is_reachable(self) -> bool:
        """Whether this process is still connected, and its node and the head answer."""
        return ray_actors.is_connected(self._job) and listens(self._socket) and answers(self.head)

    def suits(self, key: object) -> bool:
        """Whether a call with this key may use the warm actors."""
        return key == self._key

    def begin(self, engine: RayEngine, threads: int, bundle: Bundle, data: Prepared) -> None:
        """Send a bundle and its data to all nodes."""
        import numpy as np

        self.engine = engine
        handle, is_new = bundle.data, False
        needed = sum(spec.nbytes for spec in handle.specs)
        if self._data is None or self._data[0]() is not data:
            is_new = True
            self._data = weakref.ref(data), ray_room.put(handle.mapped(), needed)
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
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(work.node.identity, soft=False)
        task = self._hold.options(**work.wanted, max_retries=0, scheduling_strategy=strategy)
        return task.remote(work.node.address, work.number, work.expected)

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
        """Return the nodes that are there, this one first."""
        import ray

        found = [item for item in ray.nodes() if item["Alive"]]
        return sorted(found, key=lambda item: (item["NodeID"] != self._here, item["NodeID"]))

    def _start(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Start an actor on each of these nodes, and read their loads."""
        for item, started in ray_actors.start(found, self._settings, self._timeout_s):
            self._add(item, started)

    def _add(self, item: Mapping[str, Any], started: ray_actors.Started) -> None:
        """Take a node in whose actor is ready."""
        node = ray_actors.handle(item, self._name_of(item), started)
        self._begin_on(node)
        self.nodes[node.name] = node

    def _name_of(self, item: Mapping[str, Any]) -> str:
        """Return a node's name; empty: this machine."""
        taken = {node.name for node in self.nodes.values() if not node.is_lost}
        return "" if item["NodeID"] == self._here else free_name(item, taken)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run in a thread: whatever Ray raises there ends the sweep, which would wait for ever."""
        try:
            work()
        except Exception as error:  # noqa: BLE001
            if not self.closing.is_set():
                self._fail(f"the connection to Ray broke: {type(error).__name__}: {error}")

    def _fail(self, what: str) -> None:
        if self.failure is not None:
            return
        self.failure = StorageError(
            errno.ENOTCONN, f"{what}. See that the cluster runs; the same call continues"
        )
        if self.engine is not None:
            self.engine.fail(self.failure)

    def look_here(self) -> None:
        """Fail if the node of this machine is gone: Ray's next write to it ends the process."""
        if not listens(self._socket):
            self._fail("the Ray node of this machine is gone")

    def lose(self, node: NodeHandle, why: str) -> None:
        """Take note that the actor of a node is gone."""
        node.is_lost = True
        if node.identity == self._here:
            self.look_here()
        if self.engine is not None:
            self.engine.lose(node, why)

    def look_at_begin(self, node: NodeHandle) -> None:
        """Take note of whether a node could begin."""
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
        while not self.closing.wait(WATCH_SECONDS):
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
            self.engine.say(Note(None, "cluster", text))


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
