"""The nodes of a Ray cluster, joined from this process; the only file that imports Ray.

Without an address, a Ray of this machine starts for the run. Data are put into Ray's object store
once for all nodes. The user's code travels by value, also that of modules.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from asynckfold.engines.ray_node import (
    Description,
    NodeSettings,
    RayNode,
    ScratchFolder,
    hold,
    versions,
)
from asynckfold.errors import InputError, Problem, StorageError, refuse
from asynckfold.jobs.digests.ownership import sent_by_value
from asynckfold.jobs.placement import FULL_SHARE, Load, NodeSize, Placement
from asynckfold.jobs.recipe import pack
from asynckfold.jobs.reproducibility import NODES
from asynckfold.planning.gpu_rule import MOST_SHARING

if TYPE_CHECKING:
    from asynckfold.data.prepare import PreparedData
    from asynckfold.training.bundle import Bundle

END_SECONDS = 10.0
"""Time for nodes to end their workers; then they are left behind."""

_ANSWER_SECONDS = 1.0


def environment_problems(address: str | None) -> list[Problem]:
    """Return why the engine "ray" cannot be used here, as far as no cluster is needed to tell."""
    if find_spec("ray") is None:
        rule, remedy = "engine='ray' needs the package ray", "Run: pip install 'asynckfold[ray]'"
        return [Problem(rule, "an environment without it", remedy)]
    place = _named(address)
    return [_cluster_problem(place, "a client")] if place.startswith("ray://") else []


def _named(address: str | None) -> str:
    """Return the address, also that of Ray's variable; empty: none."""
    return address or os.environ.get("RAY_ADDRESS", "")


def _cluster_problem(address: str, error: object) -> Problem:
    """Return the problem of a cluster that cannot be used, or of a Ray that does not start."""
    return Problem(
        "engine='ray' needs a Ray that starts here, or the ray_address of a cluster which this "
        "machine is a node of, with the same versions of Ray and Python",
        f"{address!r}: {one_line(error)}" if address else one_line(error),
        "Start the call on a node of the cluster, or run `ray start --address=HOST:PORT` on this "
        "machine, and pass ray_address='HOST:PORT'; connect_timeout_s says how long to wait.",
    )


def one_line(error: object) -> str:
    """Return the message of an error of Ray on one line."""
    return " ".join(str(error).split())[:400]


@dataclass(eq=False)
class Node:
    """A node of the cluster, as the driver sees it."""

    name: str  # the one in placements; empty: this machine
    identity: str  # Ray's
    actor: Any  # Ray's handle of the `RayNode` there
    resources: Mapping[str, float]  # that Ray may give away
    described: Description
    load: Load  # the latest
    begun: Any = None  # Ray's reference to the actor's answer to the present bundle
    answer: Any = None  # that to the actor's next answer
    data: Any = None  # reference to the data that it has


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
    import ray

    has_joined = not ray.is_initialized()
    if has_joined:
        _join(_named(address), runtime_env or {}, timeout_s, cores)
    try:
        with closing(RayCluster(settings, timeout_s)) as cluster:
            refuse(cluster.start())
            yield cluster
    finally:
        if has_joined and ray.is_initialized():
            ray.shutdown()


class RayCluster:
    """The nodes of a cluster; `failure` says why it cannot be used any more, `ray` is Ray."""

    def __init__(self, settings: NodeSettings, timeout_s: float) -> None:
        import ray

        self.ray: Any = ray
        self._settings, self._timeout_s = settings, timeout_s
        self.numbers: Iterator[int] = itertools.count()
        self.nodes: dict[str, Node] = {}
        self.failure: StorageError | None = None
        self._known: set[str] = set()
        context = ray.get_runtime_context()
        self._here, self._head = context.get_node_id(), str(context.gcs_address)
        # Once: each new remote function is sent to the head, for which this process would wait.
        self._hold, self._kind = ray.remote(hold), ray.remote(RayNode)
        self._arrays: tuple[weakref.ref[Any], list[Any]] | None = None
        self._bundle: tuple[int, Any] | None = None

    # Nodes

    def start(self) -> list[Problem]:
        """Start an actor on each node that has none yet; return why some cannot be used.

        A node may lack asynckfold or torch, or have another version.
        """
        alive = [item for item in self.ray.nodes() if item["Alive"]]
        fresh = [item for item in alive if item["NodeID"] not in self._known]
        # This one first.
        fresh.sort(key=lambda item: (item["NodeID"] != self._here, item["NodeID"]))
        problems, starting, several = [], [], len(self._known) + len(fresh) > 1
        for item in fresh:
            self._known.add(item["NodeID"])
            options = {"num_cpus": 0, "max_concurrency": 8}
            kind = self._kind.options(**options, scheduling_strategy=_on(item["NodeID"]))
            actor = kind.remote(self._settings, several)
            starting.append((item, actor, actor.describe.remote()))
        for item, actor, answer in starting:
            try:
                described = self.ray.get(answer, timeout=self._timeout_s)
            except (self.ray.exceptions.RayError, TimeoutError) as error:
                described = error
            if isinstance(described, Description) and described.versions == versions():
                self._add(item, actor, described)
            else:
                self._end([actor] if isinstance(described, Description) else [])
                self.kill(actor)
                host = f"{item['NodeManagerHostname']} ({item['NodeManagerAddress']})"
                problems.append(_node_problem(host, described))
        return problems

    def _add(self, item: Mapping[str, Any], actor: Any, described: Description) -> None:
        identity, resources = item["NodeID"], item["Resources"]
        name = "" if identity == self._here else free_name(item, self.nodes)
        node = Node(name, identity, actor, resources, described, described.load)
        self.nodes[name] = node
        self._begin_on(node)

    def look(self) -> list[str]:
        """Take in new nodes; return what there is to note."""
        before = {*self.nodes.values()}
        try:
            problems = self.start()
        except (self.ray.exceptions.RayError, RuntimeError, TimeoutError):
            return []  # the next look, or the poll of the node, tells
        new = [node.name for node in self.nodes.values() if node not in before]
        return [*map(str, problems), *([f"more nodes: {', '.join(new)}"] if new else [])]

    @property
    def sizes(self) -> dict[str, NodeSize]:
        """What a run may use of each node that is there, by its name."""
        sizes = {}
        for name, node in [*self.nodes.items()]:
            if cores := min(node.described.cores, int(node.resources.get("CPU", 0.0))):
                sizes[name] = NodeSize(cores, len(node.described.load.gpus))
        return sizes

    @property
    def software(self) -> dict[str, str]:
        """What a session records of the nodes: their kinds of processor, if they differ."""
        kinds = {node.described.processor for node in self.nodes.values()} - {""}
        return {NODES: "; ".join(sorted(kinds))} if len(kinds) > 1 else {}

    def close(self) -> None:
        """End the actors and what they started."""
        if self.ray.is_initialized() and self.head_answers():
            actors = [node.actor for node in self.nodes.values()]
            self._end(actors)
            for actor in actors:
                self.kill(actor)

    def _end(self, actors: Sequence[Any]) -> None:
        """Let actors end what they started."""
        if ends := [actor.quit.remote() for actor in actors]:
            self.ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)

    def head_answers(self) -> bool:
        """Whether something listens at the address of the head."""
        with contextlib.suppress(OSError, ValueError), _connected(self._head, _ANSWER_SECONDS):
            return True
        return False

    # Work

    def begin(self, bundle: Bundle, threads: int, data: PreparedData) -> None:
        """Send a bundle and its data to all nodes."""
        # On a node, each array has its file.
        specs = tuple(replace(spec, offset=0) for spec in bundle.data.specs)
        handle, scratch = replace(bundle.data, specs=specs), ScratchFolder()
        with sent_by_value():
            packed = pack(replace(bundle, data=handle, root=scratch, code={}))  # type: ignore[arg-type]
        if self._arrays is None or self._arrays[0]() is not data:
            arrays = [self.ray.put(array) for array in bundle.data.mapped()]
            self._arrays = weakref.ref(data), arrays
        self._bundle = threads, self.ray.put(packed)
        for node in self.nodes.values():
            self._begin_on(node)

    def _begin_on(self, node: Node) -> None:
        """Send the present bundle to a node, with the data if it lacks them."""
        if self._bundle is not None and self._arrays is not None:
            data, arrays = self._arrays
            sent = () if node.data is data else arrays
            node.begun = node.answer = node.actor.begin.remote(*self._bundle, *sent)
            node.data = data

    def lease(self, node: Node, number: int, placement: Placement, expected: Any) -> Any:
        """Ask Ray for the resources of a placement on its node; return the task that holds them."""
        is_shared = placement.gpu_share < FULL_SHARE
        share = min(placement.gpu_share, 1 / MOST_SHARING) if is_shared else 1.0
        most = node.resources
        task = self._hold.options(
            num_cpus=min(len(placement.cores) or 1, most.get("CPU", 0.0)),
            num_gpus=0 if placement.gpu is None else min(share, most.get("GPU", 0.0)),
            memory=int(min(placement.memory, most.get("memory", 0))) or None,
            # In Ray's dashboard.
            name=placement.jobs[0] if placement.jobs else placement.command.value,
            max_retries=0,
            scheduling_strategy=_on(node.identity),
        )
        return task.remote(node.actor, f"{node.described.folder}/{number}", number, expected)

    def kill(self, actor: Any) -> None:
        """End an actor at once; what it has started ends with it."""
        with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
            self.ray.kill(actor)


def _on(identity: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(identity, soft=False)


# Joining


def _join(address: str, runtime_env: Mapping[str, Any], timeout_s: float, cores: int) -> None:
    """Join a cluster, or start a Ray of this machine; raise `InputError` if that fails."""
    import ray

    # No report of errors that this process hears anyway. By default Ray's workers have niceness
    # 15; here `nice` says which they have.
    variables = {"RAY_IGNORE_UNHANDLED_ERRORS": "1", "RAY_worker_niceness": "0"}
    # From Ray 2.60 on, a token in the home folder would lock this process out of its own Ray.
    variables |= {} if address else {"RAY_AUTH_MODE": "disabled"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    quiet = {"log_to_driver": False, "configure_logging": False, "runtime_env": dict(runtime_env)}
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        if not address:
            ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
            return
        if address not in ("auto", "local"):
            # Ray itself would try for a minute.
            _connected(address, timeout_s).close()
        ray.init(address, **quiet)
        # Without a route to the internet, Ray takes this machine for the head: no node reaches it.
        with _connected(ray.get_runtime_context().gcs_address, _ANSWER_SECONDS) as channel:
            here = channel.getsockname()[0]
        there = {item["NodeManagerAddress"] for item in ray.nodes() if item["Alive"]}
        if here != ray.util.get_node_ip_address() and here in there:
            ray.shutdown()
            ray.init(address, _node_ip_address=here, **quiet)
    except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
        raise InputError([_cluster_problem(address, error)]) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _connected(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to a host and port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout_s)


def _node_problem(host: str, described: Any) -> Problem:
    """Return the problem of a node on which no actor starts, or one of other versions."""
    asynckfold, torch = versions()
    is_there = isinstance(described, Description)
    there = " and ".join(described.versions) if is_there else one_line(described)
    return Problem(
        "each node of the cluster needs asynckfold and torch, in the versions here",
        f"{host}: {there}; here {asynckfold} and {torch}",
        f"Run there: pip install 'asynckfold[ray]=={asynckfold}' 'torch=={torch}', or pass "
        "ray_runtime_env={'pip': [...]}; see Ray's logs there, or remove the node.",
    )


def free_name(item: Mapping[str, Any], taken: Collection[str]) -> str:
    """Return a node's name or that of its host, with a part of Ray's number if that is taken."""
    address = item["NodeManagerAddress"]
    label = item.get("NodeName") or address
    name = str(item.get("NodeManagerHostname") or address if label == address else label)
    is_free = name not in {*taken, socket.gethostname()}
    return name if is_free else f"{name}-{item['NodeID'][:8]}"
