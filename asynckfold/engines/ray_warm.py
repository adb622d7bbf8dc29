"""The cluster of this process whose actors stay warm between two calls. Ray is not imported.

What is kept has a fork server on each node, which has imported torch and asynckfold and nothing of
the user's. It holds no resources of Ray, no data and no workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

IDLE_SECONDS = 300.0
"""How long actors stay warm after a call: as long as the workers of the engine "process"."""

LOOK_SECONDS = 1.0
"""Interval between looks at the cluster meanwhile. Ray ends a process some 15 s after its node."""

LASTING = frozenset({"env_vars"})
"""Keys of a runtime environment that mean the same at each call; files may have changed."""


class Warm(Protocol):
    """What is kept."""

    def suits(self, key: object) -> bool:
        """Whether it is still there, and what is asked for."""
        ...

    def is_reachable(self) -> bool:
        """Whether the cluster answers."""
        ...

    def end(self) -> None:
        """End the actors, and leave the cluster."""
        ...

    def disconnect(self) -> None:
        """Leave it without a word to the actors."""
        ...


@dataclass(frozen=True)
class Key:
    """What two calls must share.

    Parameters
    ----------
    address : str
        As it was named; empty: that of the connection of this process.
    runtime_env : Mapping
        As it was asked for.
    nice : int
        Niceness of the workers.
    variables : Mapping
        Environment variables of this process that bits depend on.
    """

    address: str
    runtime_env: Mapping[str, Any]
    nice: int
    variables: Mapping[str, str]

    @property
    def lasts(self) -> bool:
        """Whether equal keys mean equal nodes."""
        return LASTING.issuperset(self.runtime_env)


class _Kept:
    """The one cluster that waits, and the thread that watches it."""

    def __init__(self) -> None:
        self.cluster: Warm | None = None
        self.thread: threading.Thread | None = None
        self.owner = 0
        self.lock = threading.Lock()
        self.woken = threading.Event()

    def pop(self) -> Warm | None:
        """Take it, once it is not being ended."""
        with self.lock:
            cluster, self.cluster = self.cluster, None
            self.woken.set()
        return cluster if self.owner == os.getpid() else None


_kept = _Kept()


def take(key: Key) -> Any:
    """Return the warm cluster if it suits, else end it and return None."""
    cluster = _kept.pop()
    if cluster is None or (cluster.is_reachable() and cluster.suits(key)):
        return cluster
    _end(cluster)
    return None


def give_back(cluster: Warm, idle_s: float | None = None) -> None:
    """Keep a cluster warm until the next call or the idle timeout."""
    end = time.monotonic() + (IDLE_SECONDS if idle_s is None else idle_s)
    _kept.woken = woken = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(cluster, end, woken), name="asynckfold-ray-idle", daemon=True
    )
    with _kept.lock:
        _kept.cluster, _kept.thread, _kept.owner = cluster, thread, os.getpid()
    # Anew each time: Ray's own function must run after this one, which was registered before.
    atexit.unregister(close_warm)
    atexit.register(close_warm)
    try:
        thread.start()
    except RuntimeError:
        # Without a thread nobody would end it.
        close_warm()


def close_warm() -> None:
    """End the warm actors, if there are any, and leave their cluster."""
    cluster = _kept.pop()
    if cluster is not None:
        _end(cluster)


def _end(cluster: Warm) -> None:
    if cluster.is_reachable():
        cluster.end()
    else:
        # Ray would wait for it, or start another one.
        cluster.disconnect()


def _watch(cluster: Warm, end: float, woken: threading.Event) -> None:
    """End an idle cluster in time, or as soon as its node or head is gone."""
    while not woken.wait(max(0.0, min(LOOK_SECONDS, end - time.monotonic()))):
        if time.monotonic() >= end or not cluster.is_reachable():
            # Held until the end: the next call must not find half a connection.
            with _kept.lock:
                if _kept.cluster is cluster:
                    _kept.cluster = None
                    _end(cluster)
            return


def installed() -> Callable[[], bool]:
    """Return whether asynckfold and torch are still as now, to be asked later.

    A fork server imports some modules late, so that it must not outlive an edit of their files.
    """
    before = _stamp()
    return lambda: _stamp() == before


def _stamp() -> tuple[Any, ...]:
    found: list[Any] = []
    for name in ("asynckfold", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(version(name))
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        with contextlib.suppress(OSError):
            seen = path.stat()
            found.append((str(path), seen.st_mtime_ns, seen.st_size))
    return tuple(found)
