"""A stand-in for Ray: nodes of this machine with actors in processes and tasks in threads.

It has what `asynckfold.engines.ray_cluster` calls, with Ray's rules: arguments that are references
wait for their values, a task starts when its node has the cores, and the end of an actor fails all
its answers. Values are pickled where Ray pickles them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection, Pipe
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest


class RayError(Exception):
    """Ray's base class."""


class NodeDiedError(RayError):
    """A node is gone."""


class TaskUnschedulableError(RayError):
    """A node takes no tasks."""


class OutOfMemoryError(RayError):
    """Ray has ended a task."""


class RayActorError(RayError):
    """An actor is gone."""


class Reference:
    """The value of a call, once it is there."""

    def __init__(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.future: futures.Future[Any] = futures.Future()
        self._work, self._arguments = work, arguments
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            values = [
                get(item) if isinstance(item, Reference) else item for item in self._arguments
            ]
            self.future.set_result(self._work(*values))
        except BaseException as error:  # noqa: BLE001
            is_rays = isinstance(error, RayError)
            self.future.set_exception(error if is_rays else RayError(repr(error)))


class Actor:
    """A process that obeys, several orders at a time."""

    def __init__(self, kind: type, arguments: tuple[Any, ...]) -> None:
        self._pipe, theirs = Pipe()
        code = f"from tests.engines.fake_ray import serve; serve({theirs.fileno()})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()]
            )
        self._answers: dict[int, futures.Future[Any]] = {}
        self._numbers, self._lock, self._death = count(), threading.Lock(), threading.Lock()
        self._send(-1, kind, arguments)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _send(self, *message: Any) -> None:
        with self._lock:
            self._pipe.send_bytes(cloudpickle.dumps(message))

    def _listen(self) -> None:
        while True:
            try:
                number, value, error = cloudpickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            answer = self._answers.pop(number)
            answer.set_exception(RayError(error)) if error else answer.set_result(value)
        self.process.wait()
        for answer in self._answers.values():
            answer.set_exception(RayActorError("the actor died"))

    def call(self, name: str, *arguments: Any) -> Any:
        """Have a method called, and return its value."""
        number, answer = next(self._numbers), futures.Future[Any]()
        self._answers[number] = answer
        try:
            self._send(number, name, arguments)
        except OSError:
            raise RayActorError("the actor died") from None
        return answer.result()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: Reference(lambda *values: self.call(name, *values), arguments)
        )

    def die(self) -> None:
        """Kill it; tests and the engine may do so at the same time."""
        with self._death:
            self.process.kill()
            self.process.wait()
            self._listener.join()
            self._pipe.close()


def serve(descriptor: int) -> None:
    """Be an actor."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    lock = threading.Lock()

    def obey(number: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        found: tuple[Any, ...]
        try:
            found = number, work(*arguments), ""
        except BaseException as error:  # noqa: BLE001
            found = number, None, repr(error)
        with lock:
            pipe.send_bytes(cloudpickle.dumps(found))

    _, kind, arguments = cloudpickle.loads(pipe.recv_bytes())
    made = kind(*arguments)
    while True:
        try:
            number, name, arguments = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        work = getattr(made, name)
        threading.Thread(target=obey, args=(number, work, arguments), daemon=True).start()


class Cluster:
    """Nodes with some cores; the first is that of this process."""

    def __init__(self) -> None:
        self.cores: dict[str, threading.Semaphore] = {}
        self.items: dict[str, dict[str, Any]] = {}
        self.actors: list[tuple[str, Actor]] = []
        self.is_joined = False
        self.server = socket.create_server(("127.0.0.1", 0))

    def add(self, name: str, cpus: int = 1) -> None:
        """Add a node."""
        self.cores[name] = threading.Semaphore(cpus)
        self.items[name] = {
            "NodeID": name,
            "NodeName": name,
            "NodeManagerHostname": "localhost",
            "NodeManagerAddress": f"127.0.0.{len(self.items) + 1}",
            "Alive": True,
            "Resources": {"CPU": float(cpus), "memory": 1 << 33},
        }

    def end(self, name: str) -> None:
        """Kill a node."""
        self.items[name]["Alive"] = False
        for node, actor in self.actors:
            if node == name:
                actor.die()

    def remote(self, thing: Any, **options: Any) -> Any:
        """Return what `ray.remote` does."""

        def made(*arguments: Any) -> Any:
            node = options["scheduling_strategy"].identity
            if not self.items[node]["Alive"]:
                return Reference(_raise, (NodeDiedError(f"{node} is dead"),))
            if isinstance(thing, type):
                self.actors.append((node, Actor(thing, arguments)))
                return self.actors[-1][1]
            return Reference(lambda *values: self._task(thing, node, values), arguments)

        return SimpleNamespace(options=lambda **more: self.remote(thing, **more), remote=made)

    def _task(self, work: Callable[..., Any], node: str, arguments: tuple[Any, ...]) -> Any:
        with self.cores[node]:
            return work(*arguments)

    def close(self) -> None:
        """End all."""
        for _, actor in self.actors:
            actor.die()
        self.server.close()


def _raise(error: Exception) -> None:
    raise error


def get(item: Any, timeout: float | None = None) -> Any:
    """Return a value."""
    try:
        return item.future.result(timeout)
    except futures.TimeoutError as error:
        raise TimeoutError from error


def wait(
    items: list[Any], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Wait for values."""
    end = threading.Event()
    for item in items:
        item.future.add_done_callback(lambda _: end.set())
    if num_returns == 1:
        end.wait(timeout)
    else:
        futures.wait([item.future for item in items], timeout)
    ready = [item for item in items if item.future.done()]
    return ready, [item for item in items if item not in ready]


@contextmanager
def installed() -> Iterator[Cluster]:
    """Have this module stand for Ray, with a node of two cores."""
    made = Cluster()
    made.add("here", 2)
    host, port = made.server.getsockname()
    context = SimpleNamespace(
        get_node_id=lambda: "here", get_job_id=lambda: "job", gcs_address=f"{host}:{port}"
    )
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda identity, soft: SimpleNamespace(
        identity=identity
    )
    ray: Any = ModuleType("ray")
    ray.exceptions = SimpleNamespace(
        **{kind.__name__: kind for kind in (RayError, *RayError.__subclasses__())}
    )
    ray.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    ray.init = lambda *address, **more: setattr(made, "is_joined", True)
    ray.shutdown = lambda: setattr(made, "is_joined", False)
    ray.is_initialized = lambda: made.is_joined
    ray.get_runtime_context = lambda: context
    ray.nodes = lambda: [*made.items.values()]
    ray.remote, ray.get, ray.wait = made.remote, get, wait
    ray.put = lambda value: Reference(lambda: value, ())
    ray.kill = lambda actor: actor.die()
    ray.cancel = lambda item: None
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {"ray": ray, "ray.util.scheduling_strategies": strategies}.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr("asynckfold.engines.ray_cluster.find_spec", lambda name: object())
        try:
            yield made
        finally:
            made.close()
