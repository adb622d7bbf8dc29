"""The nodes of a Ray cluster, joined from this process; the only file that imports Ray.

Without an address, a Ray of this machine starts for the run. Data are put into Ray's object store
once for all nodes. The user's code travels by value, also that of modules. Between two calls
the actors stay warm: each keeps a fork server that has imported torch, and nothing of the user's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import socket
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from asynckfold.engines.ray_node import (
    Description,
    NodeSettings,
    RayNode,
    ScratchFolder,
    hold,
    lock_path,
    versions,
)
from asynckfold.engines.warm_pool import Warm
from asynckfold.errors import InputError, Problem, StorageError, refuse
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.placement import Load, NodeSize
from asynckfold.jobs.recipe import pack
from asynckfold.jobs.reproducibility import NODES

if TYPE_CHECKING:
    from asynckfold.data.prepare import PreparedData
    from asynckfold.training.bundle import Bundle

END_SECONDS = 10.0
"""Time for nodes to end their workers; then they are left behind."""

IDLE_SECONDS = 300.0
"""How long actors stay warm after a call, as the workers of the engine "process"."""

_ANSWER_SECONDS = 1.0

_ADDRESS_RULE = "ray_address must be that of a cluster which this machine is a node of"


def environment_problems(address: str | None) -> list[Problem]:
    """Return why the engine "ray" cannot be used here, as far as no cluster is needed to tell."""
    if find_spec("ray") is None:
        remedy = "Run: pip install 'asynckfold[ray]'"
        rule = "engine='ray' needs the package ray"
        return [Problem(rule, "an environment without it", remedy)]
    if (place := _named(address)).startswith("ray://"):
        remedy = (
            "Start the call on a node of the cluster, or make this machine one by `ray start "
            "--address=HOST:PORT`, and pass ray_address='HOST:PORT'."
        )
        return [Problem(_ADDRESS_RULE, repr(place), remedy)]
    return []


def _named(address: str | None) -> str:
    """Return the address, also that of Ray's variable; empty: none."""
    return address or os.environ.get("RAY_ADDRESS", "")


def one_line(error: BaseException) -> str:
    """Return the message of an error of Ray on one line."""
    return " ".join(str(error).split())[:400]


@dataclass(eq=False)
class Node:
    """A node of the cluster, as the driver sees it."""

    identity: str  # Ray's
    name: str  # the one in placements; empty: this machine
    actor: Any  # Ray's handle of the `RayNode` there
    folder: str  # of the actor
    cpus: float  # that Ray may give away, as the next two
    gpus: float
    memory: int
    load: Load  # the latest
    size: NodeSize  # what a run may use there
    processor: str = ""  # kind of it, where nodes are compared
    begun: Any = None  # Ray's reference to the actor's answer to the present bundle
    is_ready: bool = True  # whether it has answered
    data: Any = None  # reference to the data that it has
    is_lost: bool = False  # whether its actor is gone

    @property
    def place(self) -> str:
        """Its name, for people."""
        return f"node {self.name or 'of this machine'}"


@contextmanager
def ray_cluster(
    address: str | None,
    runtime_env: Mapping[str, Any] | None,
    timeout_s: float,
    settings: NodeSettings,
    cores: int,
) -> Iterator[RayCluster]:
    """Yield the named cluster, or a Ray of this machine with so many cores, which then ends.

    Raises
    ------
    InputError
        The cluster cannot be used; nothing was started in it.
    """
    refuse(environment_problems(address))
    place, env = _named(address), dict(runtime_env or {})
    # What two calls must share to use the same actors.
    key = place, env, settings.nice, settings.variables
    cluster = _warm.take()
    if cluster is not None and not (cluster.key == key and cluster.is_connected):
        cluster.close()
        cluster = None
    cluster = cluster or RayCluster(key, timeout_s, cores)
    try:
        cluster.open(settings, timeout_s)
        yield cluster
    except BaseException:
        cluster.close()
        raise
    # Files of a runtime environment may have changed by the next call.
    if place and {"env_vars"}.issuperset(env) and cluster.failure is None:
        cluster.rest()
        _warm.give_back(cluster, IDLE_SECONDS)
    else:
        cluster.close()


class RayCluster:
    """The nodes of a cluster; `failure` says why it cannot be used any more."""

    def __init__(
        self, key: tuple[str, Mapping[str, Any], int, Any], timeout_s: float, cores: int
    ) -> None:
        import ray

        self.key, (address, runtime_env, *_) = key, key
        self.exceptions: Any = ray.exceptions
        self.numbers: Iterator[int] = itertools.count()
        self.nodes: dict[str, Node] = {}
        self.failure: StorageError | None = None
        self._refused: set[str] = set()
        self._has_joined = not ray.is_initialized()
        if self._has_joined:
            _join(address, runtime_env, timeout_s, cores)
        context = ray.get_runtime_context()
        self._here, self._job = context.get_node_id(), context.get_job_id()
        self._head = str(context.gcs_address)
        if address not in ("", "auto", self._head) and not self._has_joined:
            raise InputError.one(
                "a process can use one Ray cluster at a time",
                f"ray_address={address!r}, and it is connected to {self._head!r}",
                "Call ray.shutdown() first.",
            )
        # Once: each new remote function is sent to the head, for which this process would wait.
        self._hold, self._kind = ray.remote(hold), ray.remote(RayNode)
        self._arrays: tuple[weakref.ref[Any], list[Any]] | None = None
        self._bundle: tuple[int, Any] | None = None

    # Nodes

    def open(self, settings: NodeSettings, timeout_s: float) -> None:
        """Start an actor on each node, or let the warm one prepare for these settings.

        Raises
        ------
        InputError
            A node lacks asynckfold or torch, or has another version.
        """
        self._settings, self._timeout_s = settings, timeout_s
        warm = {node.identity: node.actor for node in self._present}
        self.nodes, self._refused = {}, set()
        problems = self._start(self._alive(), warm)
        # A node that has just died counts as alive for a moment.
        alive = {item["NodeID"] for item in self._alive()}
        refuse([problem for identity, problem in problems.items() if identity in alive])

    def _start(
        self, nodes: Sequence[Mapping[str, Any]], warm: Mapping[str, Any]
    ) -> dict[str, Problem]:
        """Take in nodes with their warm actors or new ones; return why some cannot be used."""
        several = len(nodes) > 1 or bool(self.nodes)
        problems: dict[str, Problem] = {}
        starting = []
        for item in nodes:
            actor = warm.get(item["NodeID"]) or self._new_actor(item)
            starting.append((item, actor, actor.open.remote(self._settings, several)))
        for item, actor, answer in starting:
            identity = item["NodeID"]
            try:
                described = self.get(answer, self._timeout_s)
            except (self.exceptions.RayError, TimeoutError) as error:
                described = error
            if identity in warm and not isinstance(described, Description):
                self._kill(actor)
                problems |= self._start([item], {})
            elif isinstance(described, Description) and described.versions == versions():
                self._add(item, actor, described)
            else:
                self._kill(actor)
                problems[identity] = _node_problem(_host_of(item), described)
        return problems

    def _new_actor(self, item: Mapping[str, Any]) -> Any:
        options = {"num_cpus": 0, "max_concurrency": 8, "scheduling_strategy": _on(item["NodeID"])}
        settings = self._settings
        return self._kind.options(**options).remote(settings.nice, settings.variables)

    def _add(self, item: Mapping[str, Any], actor: Any, described: Description) -> None:
        resources, load = item["Resources"], described.load
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        taken = {node.name for node in self._present}
        name = "" if item["NodeID"] == self._here else free_name(item, taken)
        size = NodeSize(min(described.cores, int(cpus)), len(load.gpus))
        memory, folder = int(resources.get("memory", 0)), described.folder
        self.nodes[name] = Node(
            *(item["NodeID"], name, actor, folder, cpus, gpus, memory, load, size),
            processor=described.processor,
        )
        self._begin_on(self.nodes[name])

    def look(self) -> list[str]:
        """Take in new nodes; return what there is to note."""
        try:
            known = {node.identity for node in self._present} | self._refused
            fresh = [item for item in self._alive() if item["NodeID"] not in known]
            problems = self._start(fresh, {})
        except (self.exceptions.RayError, RuntimeError, TimeoutError):
            return []  # the next look, or the poll of the node, tells
        self._refused |= problems.keys()
        new = [_host_of(item) for item in fresh if item["NodeID"] not in problems]
        return [*map(str, problems.values()), *([f"more nodes: {', '.join(new)}"] if new else [])]

    def lose(self, node: Node, *, for_good: bool) -> None:
        """End the actor of a node; another may start there, unless it is lost for good."""
        node.is_lost = True
        self._refused |= {node.identity} if for_good else set()
        self._kill(node.actor)

    def _alive(self) -> list[dict[str, Any]]:
        """Return the nodes that are there, this one first."""
        import ray

        alive = [item for item in ray.nodes() if item["Alive"]]
        return sorted(alive, key=lambda item: (item["NodeID"] != self._here, item["NodeID"]))

    @property
    def _present(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.is_lost]

    @property
    def sizes(self) -> dict[str, NodeSize]:
        """What a run may use of each node that is there, by its name."""
        return {node.name: node.size for node in self._present if node.size.cores}

    @property
    def software(self) -> dict[str, str]:
        """What a session records of the nodes: their kinds of processor, if they differ."""
        kinds = {node.processor for node in self.nodes.values()} - {""}
        return {NODES: "; ".join(sorted(kinds))} if len(kinds) > 1 else {}

    # The end of a call

    def rest(self) -> None:
        """Leave the nodes without work, data and the user's code; their actors stay."""
        self.wait([node.actor.rest.remote() for node in self._present], END_SECONDS)
        self._arrays = self._bundle = None

    def close(self) -> None:
        """End the actors and what they started, and leave the cluster if this call joined it."""
        import ray

        try:
            if self.is_connected:
                self.wait([node.actor.quit.remote() for node in self._present], END_SECONDS)
                for node in self._present:
                    self._kill(node.actor)
        finally:
            if self._has_joined and self._is_same_job:
                ray.shutdown()

    @property
    def _is_same_job(self) -> bool:
        """Whether the user has not left the cluster, or joined another one."""
        import ray

        context = ray.get_runtime_context() if ray.is_initialized() else None
        return context is not None and bool(context.get_job_id() == self._job)

    @property
    def is_connected(self) -> bool:
        """Whether this process is still connected, and the head answers."""
        return self._is_same_job and self.head_answers()

    def head_answers(self) -> bool:
        """Whether something listens at the address of the head."""
        with contextlib.suppress(OSError, ValueError), _connected(self._head, _ANSWER_SECONDS):
            return True
        return False

    # Calls of Ray

    def begin(self, bundle: Bundle, threads: int, data: PreparedData) -> None:
        """Send a bundle and its data to all nodes.

        Raises
        ------
        StorageError
            Ray's object store and the disk behind it are full.
        """
        import ray

        # On a node, each array has its file.
        specs = tuple(replace(spec, offset=0) for spec in bundle.data.specs)
        handle, scratch = replace(bundle.data, specs=specs), ScratchFolder()
        with sent_by_value():
            packed = pack(replace(bundle, data=handle, root=scratch, code={}))  # type: ignore[arg-type]
        try:
            if self._arrays is None or self._arrays[0]() is not data:
                arrays = [ray.put(array) for array in bundle.data.mapped()]
                self._arrays = weakref.ref(data), arrays
            self._bundle = threads, ray.put(packed)
        except ray.exceptions.RayError as error:
            text = f"Ray's object store cannot take the data: {one_line(error)}"
            raise StorageError(errno.ENOSPC, f"{text}. Free the disk of Ray's folder") from error
        for node in self._present:
            self._begin_on(node)

    def _begin_on(self, node: Node) -> None:
        """Send the present bundle to a node, with the data if it lacks them."""
        if self._bundle is not None and self._arrays is not None:
            data, arrays = self._arrays
            sent = () if node.data is data else arrays
            node.begun, node.is_ready = node.actor.begin.remote(*self._bundle, *sent), False
            node.data = data

    def lease(self, node: Node, number: int, expected: Any, options: Mapping[str, Any]) -> Any:
        """Ask Ray for resources of a node; return the task that holds them."""
        strategy = _on(node.identity)
        task = self._hold.options(**options, max_retries=0, scheduling_strategy=strategy)
        return task.remote(node.actor, lock_path(node.folder, number), number, expected)

    def cancel(self, lease: Any) -> None:
        """Withdraw a request for resources."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(lease)

    def _kill(self, actor: Any) -> None:
        """End an actor at once; what it has started ends with it."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)

    def get(self, answer: Any, timeout_s: float | None = None) -> Any:
        """Return an answer; raise what Ray raises."""
        import ray

        return ray.get(answer, timeout=timeout_s)

    def wait(self, answers: Sequence[Any], seconds: float) -> None:
        """Wait for all answers, at most so long."""
        import ray

        if answers:
            ray.wait(list(answers), num_returns=len(answers), timeout=seconds)

    def ready(self, answers: Sequence[Any], seconds: float) -> list[Any]:
        """Return the answers that are there; wait for the first."""
        import ray

        ray.wait(answers, num_returns=1, timeout=seconds)
        return list(ray.wait(answers, num_returns=len(answers), timeout=0)[0])


def _on(identity: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(identity, soft=False)


_warm: Warm[RayCluster] = Warm()
"""The cluster of this process whose actors stay warm between two calls."""


def close_warm() -> None:
    """End the warm actors, if there are any, and leave their cluster."""
    _warm.close()


# Joining


def _join(address: str, runtime_env: Mapping[str, Any], timeout_s: float, cores: int) -> None:
    """Join a cluster, or start a Ray of this machine; raise `InputError` if that fails."""
    import ray

    if address not in ("", "auto", "local"):
        try:
            _connected(address, timeout_s).close()
        except (OSError, ValueError) as error:
            raise InputError.one(
                f"ray_address must answer within connect_timeout_s={timeout_s:g}",
                f"{address!r}: {error}",
                "Start the cluster's head (`ray start --head`), pass the HOST:PORT that it prints, "
                "or wait longer by connect_timeout_s.",
            ) from error
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
    }
    # No report of errors that this process hears anyway. By default Ray's workers have niceness
    # 15; here `nice` says which they have.
    for name, value in (("RAY_IGNORE_UNHANDLED_ERRORS", "1"), ("RAY_worker_niceness", "0")):
        os.environ.setdefault(name, value)
    quiet = {"log_to_driver": False, "configure_logging": False, "runtime_env": dict(runtime_env)}
    try:
        if not address:
            # From Ray 2.60 on, a token in the home folder would lock this process out.
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
            return
        ray.init(address, **quiet)
        # Without a route to the internet, Ray takes this machine for the head: no node reaches it.
        with _connected(ray.get_runtime_context().gcs_address, _ANSWER_SECONDS) as channel:
            here = channel.getsockname()[0]
        there = {item["NodeManagerAddress"] for item in ray.nodes() if item["Alive"]}
        if here != ray.util.get_node_ip_address() and here in there:
            ray.shutdown()
            ray.init(address, _node_ip_address=here, **quiet)
    except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
        raise InputError([connection_problem(address, error)]) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _connected(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to a host and port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout_s)


def connection_problem(address: str, error: Exception) -> Problem:
    """Return the problem of a cluster that cannot be joined."""
    text = one_line(error)
    if "ersion mismatch" in text:
        return Problem(
            "the nodes of a Ray cluster and this process need the same versions of Ray and Python",
            text,
            "Install the cluster's versions here, in an environment of their own.",
        )
    if not address:
        rule = "engine='ray' starts a Ray on this machine"
        remedy = "See whether `ray start --head` works here, or name a cluster by ray_address."
        return Problem(rule, text, remedy)
    remedy = "Run `ray start --address=HOST:PORT` on this machine, or start the call on a node."
    return Problem(_ADDRESS_RULE, f"{address!r}: {text}", remedy)


def _node_problem(host: str, described: Any) -> Problem:
    """Return the problem of a node on which no actor starts, or one of other versions."""
    if isinstance(described, Exception) and "No module named" not in str(described):
        return Problem(
            "each node of the cluster must start a process",
            f"{host}: {one_line(described)}",
            "See Ray's logs there, remove the node, or wait longer by connect_timeout_s.",
        )
    asynckfold, torch = versions()
    there = " and ".join(described.versions) if isinstance(described, Description) else "none"
    return Problem(
        "each node of the cluster needs asynckfold and torch, in the versions here",
        f"{host}: {there}; here {asynckfold} and {torch}",
        f"Run there: pip install 'asynckfold[ray]=={asynckfold}' 'torch=={torch}', or pass "
        "ray_runtime_env={'pip': [...]}.",
    )


def _host_of(item: Mapping[str, Any]) -> str:
    """Return host and address of a node, for people."""
    return f"{item['NodeManagerHostname']} ({item['NodeManagerAddress']})"


def free_name(item: Mapping[str, Any], taken: Collection[str]) -> str:
    """Return a node's name or that of its host, with a number if that is taken."""
    address = item["NodeManagerAddress"]
    label = item.get("NodeName") or address
    name = item.get("NodeManagerHostname") or address if label == address else label
    taken = {*taken, socket.gethostname()}
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return name if name not in taken else next(item for item in numbered if item not in taken)
