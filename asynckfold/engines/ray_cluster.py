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
import os
import pickle
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from asynckfold.engines.engine import Answer, Tell
from asynckfold.engines.ray_local import LocalRay
from asynckfold.engines.ray_node import NodeData, RayNode, ScratchFolder, hold, settle
from asynckfold.errors import InputError, Problem, StorageError, WorkerDiedError, refuse
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.messages import Noted, Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.recipe import pack
from asynckfold.jobs.reproducibility import VARIABLES
from asynckfold.store.layout import FINAL
from asynckfold.system.files import make_folders, read_plain, write_whole
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption
from asynckfold.training.job_log import JobLog

if TYPE_CHECKING:
    from asynckfold.data.prepare import Prepared
    from asynckfold.training.bundle import Bundle

POLL_SECONDS = 0.25
"""How old the load of a node may be."""

END_SECONDS = 10.0
"""Time for nodes to end their workers; then they are left behind."""

EXCUSED_LOSSES = 3
"""How often the jobs of a lost node are not to blame for it."""

WATCH_SECONDS, HEAD_SECONDS = 1.0, 10.0
"""Interval between looks at the cluster, and how long its head may be silent."""

_LOOK_SECONDS = 0.05


def checked(address: str | None) -> list[Problem]:
    """Return why the engine "ray" cannot be used here, as far as no cluster must be asked."""
    if find_spec("ray") is None:
        return [
            Problem(
                "engine='ray' needs the package ray",
                "an environment without it",
                "Run: pip install 'asynckfold[ray]'",
            )
        ]
    named = _named(address)
    if named.startswith("ray://"):
        return [
            Problem(
                "ray_address must be that of a cluster which this machine is a node of",
                repr(named),
                "Start the call on a node of the cluster, or make this machine one by "
                "`ray start --address=HOST:PORT`, and pass ray_address='HOST:PORT'.",
            )
        ]
    return []


def _named(address: str | None) -> str:
    """Return the address that was asked for, also by Ray's own variable; empty: none."""
    return address or os.environ.get("RAY_ADDRESS", "")


@dataclass(eq=False)
class _Node:
    """A node of the cluster, as the driver sees it."""

    identity: str
    name: str
    actor: Any
    address: str
    cpus: float
    gpus: float
    memory: int
    load: Load
    begun: Any = None
    """The answer of its actor to the present bundle."""
    reserved: tuple[float, float] = (0.0, 0.0)
    """Cores that Ray has given to others, at the last two looks."""
    has: weakref.ref[Any] | None = None
    """The data that it has."""
    is_lost: bool = False


@dataclass(eq=False)
class _Work:
    """A placement, its future, and the task of Ray that holds its cores."""

    number: int
    placement: Placement
    tasks: Sequence[Task]
    node: _Node
    expected: Any = None
    lease: Any = None
    has_begun: bool = False
    cpus: float = 0.0
    future: Future[Answer] = field(default_factory=Future)

    def interrupt(self) -> None:
        """End it without a result."""
        self.future.set_result(Answer([None for _ in self.tasks], 0))


@dataclass(frozen=True, eq=False)
class NodeSettings:
    """What each node is told: the arguments of `RayNode`."""

    make_machine: Callable[[], Machine]
    n_jobs: int | str | None
    nice: int
    stall_timeout: float | str | None
    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=lambda: _variables())


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


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
    named = _named(address)
    with ExitStack() as stack:
        if ray.is_initialized():
            _check_connection(named)
        else:
            if not named:
                local = LocalRay(cores, signals)
                stack.callback(local.close)
                named = local.address
            _connect(named, runtime_env, timeout_s)
            stack.callback(ray.shutdown)
        cluster = RayCluster(settings, timeout_s)
        stack.callback(cluster.close)
        cluster.open()
        yield cluster


class RayCluster:
    """The nodes of a cluster; one engine at a time uses them."""

    def __init__(self, settings: NodeSettings, timeout_s: float) -> None:
        import ray

        self.numbers = itertools.count()
        self.nodes: dict[str, _Node] = {}
        self.engine: RayEngine | None = None
        self._settings, self._timeout_s = settings, timeout_s
        self._here = ray.get_runtime_context().get_node_id()
        self.head = ray.get_runtime_context().gcs_address
        self.failure: StorageError | None = None
        self._data: tuple[weakref.ref[Any], list[Any]] | None = None
        self._sent: tuple[int, Any] | None = None
        self._refused: set[str] = set()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"asynckfold-ray-{name}", daemon=True)
            for name, work in (("listener", self._listen), ("watcher", self._watch))
        ]

    def open(self) -> None:
        """Check the nodes, and start an actor on each."""
        found = self._alive()
        refuse(_node_problems(found, self._timeout_s))
        self._start(found)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the actors and what they started."""
        import ray

        self._closing.set()
        ends = [node.actor.quit.remote() for node in self.nodes.values() if not node.is_lost]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_SECONDS)
        for node in self.nodes.values():
            ray.kill(node.actor)
        self._data = self._sent = None

    def begin(self, engine: RayEngine, threads: int, bundle: Bundle, data: Prepared) -> None:
        """Send a bundle and its data to all nodes."""
        import numpy as np
        import ray

        self.engine = engine
        handle = bundle.data
        if self._data is None or self._data[0]() is not data:
            arrays = [
                spec.map_readable(fd) for spec, fd in zip(handle.specs, handle.fds, strict=True)
            ]
            self._data = weakref.ref(data), [ray.put(array) for array in arrays]
        there: Any = NodeData(handle)
        scratch: Any = ScratchFolder()
        with sent_by_value():
            packed = pack(replace(bundle, data=there, root=scratch, code={}))
        self._sent = threads, ray.put(np.frombuffer(packed, np.uint8))
        for node in self.nodes.values():
            self._begin_on(node)

    def _begin_on(self, node: _Node) -> None:
        """Send the present bundle to a node, with the data if it lacks them."""
        if self._sent is None or self._data is None:
            return
        reference, arrays = self._data
        known = node.has is reference
        node.begun = node.actor.begin.remote(*self._sent, *(() if known else arrays))
        node.has = reference

    def lease(self, work: _Work) -> Any:
        """Ask Ray for what a placement needs on its node; return the task that holds it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, placement = work.node, work.placement
        gpus = len(placement.gpus)
        share = 1 / placement.jobs_per_gpu if gpus == 1 else gpus
        options: dict[str, Any] = {
            "num_cpus": work.cpus,
            "num_gpus": min(share, node.gpus),
            "memory": min(placement.memory, node.memory) or None,
            "name": placement.jobs[0] if placement.jobs else placement.trainer,
            "max_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.identity, soft=False),
        }
        task = ray.remote(hold).options(**options)
        return task.remote(node.address, work.number, work.expected)

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
            actor = made.remote(
                told.make_machine,
                told.n_jobs,
                told.nice,
                told.stall_timeout,
                told.argv,
                told.variables,
            )
            starting.append((item, actor, actor.where.remote(), actor.poll.remote(0)))
        for item, actor, described, polled in starting:
            address = ray.get(described, timeout=self._timeout_s)
            load, _ = pickle.loads(ray.get(polled, timeout=self._timeout_s))
            name = self._name_of(item)
            resources = item["Resources"]
            node = _Node(
                item["NodeID"],
                name,
                actor,
                address,
                resources.get("CPU", 0.0),
                resources.get("GPU", 0.0),
                int(resources.get("memory", 0)),
                load,
            )
            self._begin_on(node)
            self.nodes[name] = node

    def _name_of(self, item: Mapping[str, Any]) -> str:
        """Return a node's name: its own or that of its host, with a number if that is taken."""
        identity, address = item["NodeID"], item["NodeManagerAddress"]
        if identity == self._here:
            return ""
        own = item.get("NodeName") or address
        name = item.get("NodeManagerHostname") or address if own == address else own
        taken = {node.name for node in self.nodes.values() if not node.is_lost}
        taken.add(socket.gethostname())
        return next(
            found
            for number in itertools.count(1)
            if (found := name if number == 1 else f"{name}-{number}") not in taken
        )

    def _listen(self) -> None:
        """Run in the listening thread: one call to each node waits for its messages."""
        import ray

        calls: dict[Any, _Node] = {}
        while not self._closing.is_set():
            for node in [*self.nodes.values()]:
                if not node.is_lost and node not in calls.values():
                    calls[node.actor.poll.remote(POLL_SECONDS)] = node
            ready, _ = ray.wait([*calls], num_returns=1, timeout=POLL_SECONDS)
            for call in ready:
                node = calls.pop(call)
                try:
                    load, messages = pickle.loads(ray.get(call))
                except ray.exceptions.RayError as error:
                    self._lose(node, " ".join(str(error).split())[:400])
                    continue
                node.load = load
                for message in messages:
                    if self.engine is not None:
                        self.engine.hear(message)

    def _lose(self, node: _Node, why: str) -> None:
        node.is_lost = True
        if self.engine is not None:
            self.engine.lose(node, why)

    def _watch(self) -> None:
        """Run in the watching thread: what others reserve, nodes that come, a head that goes."""
        answered = time.monotonic()
        while not self._closing.wait(WATCH_SECONDS):
            if _answers(self.head):
                answered = time.monotonic()
                self._look()
            elif time.monotonic() - answered > HEAD_SECONDS and self.failure is None:
                self.failure = StorageError(
                    errno.ENOTCONN,
                    f"the head of the Ray cluster at {self.head} does not answer any more. Start "
                    "the cluster again; the same call continues",
                )
                if self.engine is not None:
                    self.engine.fail(self.failure)

    def _look(self) -> None:
        import ray
        from ray._private.state import available_resources_per_node

        try:
            free = available_resources_per_node()
            known = {node.identity for node in self.nodes.values() if not node.is_lost}
            fresh = [item for item in self._alive() if item["NodeID"] not in known | self._refused]
            problems = [*_node_problems(fresh, self._timeout_s)]
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


class RayEngine:
    """Executes placements on the nodes of a cluster."""

    def __init__(
        self,
        cluster: RayCluster,
        bundle: Bundle,
        data: Prepared,
        tell: Tell,
        threads: int = 1,
        signals: Interruption | None = None,
    ) -> None:
        self._cluster, self._root, self.say = cluster, bundle.root, tell
        self._signals = signals or Interruption()
        self._works: dict[int, _Work] = {}
        self._losses: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        cluster.begin(self, threads, bundle, data)

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the latest load of each node."""
        here, *others = [self._of(node, running) for node in self._cluster.nodes.values()]
        return replace(here, peers=tuple(others))

    def _of(self, node: _Node, running: Sequence[Placement]) -> Load:
        if node.is_lost:
            return Load((), (), 0, blocked=f"node {node.name} is lost", node=node.name)
        held = [item for item in running if item.node == node.name]
        load = replace(node.load, node=node.name)
        # What Ray has given to others is not free, even if it is idle. Ray is late to tell that a
        # task has ended, so that only what it tells twice counts.
        most = node.cpus - min(node.reserved)
        return load if len(load.cores) <= most else within(load, held, int(most))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Ask Ray for the cores of a placement, which starts when it has them."""
        cluster = self._cluster
        node = cluster.nodes[placement.node]
        work = _Work(next(cluster.numbers), placement, tasks, node)
        work.future.set_running_or_notify_cancel()
        if node.is_lost or cluster.failure is not None:
            self._end_lost(work, "")
            return work.future
        with self._lock:
            self._works[work.number] = work
        files = dict(self._files(tasks))
        work.expected = node.actor.expect.remote(
            work.number, placement, list(tasks), files, node.begun
        )
        work.cpus = min(len(placement.cores) or 1, node.cpus)
        work.lease = cluster.lease(work)
        return work.future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Pin a worker to other cores of its node, or pause it."""
        work = next((work for work in self._works.values() if work.future is future), None)
        if work is not None and not work.node.is_lost:
            work.node.actor.shift.remote(work.number, tuple(cores), work.expected)

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, end what is left; the nodes stay."""
        import ray

        if self._closed:
            return
        self._closed = True
        for work in self._take(lambda work: not work.has_begun):
            # Its task finds that nobody waits for it, and ends.
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(work.lease)
            work.interrupt()
        nodes = [node for node in self._cluster.nodes.values() if not node.is_lost]
        if grace_s > 0:
            for node in nodes:
                node.actor.stop.remote(grace_s)
            end = time.monotonic() + grace_s
            while self._works and time.monotonic() < end and not self._signals.urgent():
                time.sleep(_LOOK_SECONDS)
        for node in nodes:
            node.actor.hurry.remote()
        ends = [node.actor.end.remote() for node in nodes if not node.is_lost]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        end = time.monotonic() + END_SECONDS
        while self._works and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        for work in self._take(lambda work: True):
            work.future.set_exception(WorkerDiedError(0, "its node did not answer"))
        if self._cluster.engine is self:
            self._cluster.engine = None

    def hear(self, message: tuple[Any, ...]) -> None:
        """Take a message of a node, in the listening thread."""
        kind, *content = message
        if kind == "begun":
            if (work := self._works.get(content[0])) is not None:
                work.has_begun = True
        elif kind == "answer":
            number, outcome = content
            for work in self._take(lambda work: work.number == number):
                settle(work.future, outcome)
        elif kind == "log":
            job, lines = content
            with self._disk(job.id), JobLog(self._root, job) as log:
                log.append(lines)
        else:
            event, files = content
            with self._disk(getattr(event, "job_id", None) or ""):
                for name, data in files:
                    path = self._root / name
                    make_folders(self._root, path.parent)
                    write_whole(path, data, self._root)
                self.say(event)

    def lose(self, node: _Node, why: str) -> None:
        """End the placements of a node that is gone."""
        for work in self._take(lambda work: work.node is node):
            self._end_lost(work, why)

    def reserved_on(self, node: _Node) -> float:
        """Return the cores that Ray holds for this engine on a node."""
        return sum(work.cpus for work in [*self._works.values()] if work.node is node)

    def fail(self, failure: StorageError) -> None:
        """End one placement by a failure, which ends the sweep; the others may save themselves."""
        for work in self._take(lambda work: work.number == min(self._works)):
            work.future.set_exception(failure)

    def _end_lost(self, work: _Work, why: str) -> None:
        """Let its jobs be placed again; they are to blame only if that happens again and again."""
        if self._cluster.failure is not None:
            work.future.set_exception(self._cluster.failure)
            return
        names = [task.job.id for task in work.tasks]
        for name in names:
            self._losses[name] = self._losses.get(name, 0) + 1
        if names and max(self._losses[name] for name in names) <= EXCUSED_LOSSES:
            work.interrupt()
        else:
            text = f"node {work.node.name or 'of this process'} is lost: {why}"
            work.future.set_exception(WorkerDiedError(0, text))

    def _take(self, which: Callable[[_Work], bool]) -> list[_Work]:
        """Remove the placements for which `which` holds; whoever has one completes its future."""
        with self._lock:
            found = [work for work in self._works.values() if which(work)]
            for work in found:
                del self._works[work.number]
        return found

    @contextmanager
    def _disk(self, job_id: str) -> Iterator[None]:
        """End the placement of a job if this machine's disk refuses."""
        try:
            yield
        except StorageError as error:
            for work in self._take(lambda work: any(t.job.id == job_id for t in work.tasks)):
                work.future.set_exception(error)

    def _files(self, tasks: Sequence[Task]) -> Iterator[tuple[str, bytes]]:
        """Yield the files that earlier attempts have left, by their names in the run's folder."""
        for task in tasks:
            for ref in task.checkpoints:
                path = self._root / ref.file
                for item in (path, path.with_name(FINAL)):
                    # A worker that misses a file says so, and takes an older one.
                    with contextlib.suppress(OSError):
                        yield item.relative_to(self._root).as_posix(), read_plain(item, self._root)


def within(load: Load, held: Sequence[Placement], most: int) -> Load:
    """Return a load with at most so many cores: those of running placements, then idle ones."""
    own = [core for placement in held for core in placement.cores if core in load.cores]
    kept = list(dict.fromkeys([*own, *load.idle, *load.cores]))[:most]
    idle = tuple(core for core in load.idle if core in kept)
    return replace(load, cores=tuple(sorted(kept)), idle=idle)


# Connecting


def _connect(address: str, runtime_env: Mapping[str, Any] | None, timeout_s: float) -> None:
    """Join a cluster.

    Raises
    ------
    InputError
        It does not answer, or does not fit.
    """
    import ray

    if address not in ("auto", "local"):
        _knock(address, timeout_s)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
    }
    try:
        ray.init(
            address=address,
            runtime_env=dict(runtime_env or {}),
            log_to_driver=False,
            configure_logging=False,
        )
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise InputError([_connection_problem(address, error)]) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _knock(address: str, timeout_s: float) -> None:
    host, _, port = address.rpartition(":")
    end, reason = time.monotonic() + timeout_s, ""
    while time.monotonic() < end:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
                return
        except (OSError, ValueError) as error:
            reason = str(error)
            time.sleep(_LOOK_SECONDS)
    raise InputError.one(
        f"ray_address must answer within connect_timeout_s={timeout_s:g}",
        f"{address!r}: {reason}",
        "Start the cluster's head (`ray start --head`), pass the HOST:PORT that it prints, or wait "
        "longer by connect_timeout_s.",
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), WATCH_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def host_of(item: Mapping[str, Any]) -> str:
    """Return host and address of a node, for people."""
    return f"{item['NodeManagerHostname']} ({item['NodeManagerAddress']})"


def _connection_problem(address: str, error: Exception) -> Problem:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        return Problem(
            "the nodes of a Ray cluster and this process need the same versions of Ray and Python",
            text[:400],
            "Install the cluster's versions here, in an environment of their own.",
        )
    return Problem(
        "ray_address must be that of a cluster which this machine is a node of",
        f"{address!r}: {text[:400]}",
        "Run `ray start --address=HOST:PORT` on this machine first, or start the call on a node.",
    )


def _check_connection(named: str) -> None:
    """Refuse a second cluster: a process is connected to one at most."""
    import ray

    here = ray.get_runtime_context().gcs_address
    if named not in ("", "auto", here):
        raise InputError.one(
            "a process can use one Ray cluster at a time",
            f"ray_address={named!r}, and it is connected to {here!r}",
            "Call ray.shutdown() first.",
        )


def _node_problems(found: Sequence[Mapping[str, Any]], timeout_s: float) -> Iterator[Problem]:
    """Yield why nodes cannot train."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def version() -> str:
        # By value: the node may have no asynckfold.
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("asynckfold")
        except PackageNotFoundError:
            return ""

    here = version()
    asked = []
    for item in found:
        strategy = NodeAffinitySchedulingStrategy(item["NodeID"], soft=False)
        task = ray.remote(version).options(num_cpus=0, scheduling_strategy=strategy, max_retries=1)
        asked.append((item, task.remote()))
    for item, answer in asked:
        place = host_of(item)
        try:
            there = ray.get(answer, timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            yield Problem(
                "each node of the cluster must start a process",
                f"{place}: {' '.join(str(error).split())[:400]}",
                "See the logs of Ray there, wait longer by connect_timeout_s, or remove the node.",
            )
            continue
        if there != here:
            yield Problem(
                "each node of the cluster needs asynckfold, of the version here",
                f"{place}: {there or 'none'}; here {here}",
                f"Run there: pip install 'asynckfold[ray]=={here}', or pass "
                "ray_runtime_env={'pip': [...]}.",
            )
