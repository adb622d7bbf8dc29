"""Joins a Ray cluster from this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from asynckfold.engines.ray_address import connection_problem, knock, own_address
from asynckfold.errors import InputError


@contextmanager
def silenced() -> Iterator[None]:
    """Keep Ray from printing what its nodes report, for which it has no option."""
    from ray._private import worker

    names = "print_to_stdstream", "_unhandled_error_handler"
    before = {name: getattr(worker, name) for name in names if hasattr(worker, name)}
    for name in before:
        setattr(worker, name, lambda *data, **more: None)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(worker, name, function)


def connect(address: str, runtime_env: Mapping[str, Any] | None, timeout_s: float) -> None:
    """Join a cluster, or raise an `InputError`."""
    import ray

    if address not in ("auto", "local"):
        knock(address, timeout_s)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
    }
    try:
        join = partial(ray.init, address, log_to_driver=False, configure_logging=False)
        join(runtime_env=dict(runtime_env or {}))
        # Without a route to the internet, Ray takes this machine for the head: no node reaches it.
        own = own_address(ray.get_runtime_context().gcs_address)
        there = {item["NodeManagerAddress"] for item in ray.nodes() if item["Alive"]}
        if own != ray.util.get_node_ip_address() and own in there:
            ray.shutdown()
            join(runtime_env=dict(runtime_env or {}), _node_ip_address=own)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise InputError([connection_problem(address, error)]) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check_connection(named: str) -> None:
    """Refuse a second cluster: a process is connected to one at most."""
    import ray

    here = ray.get_runtime_context().gcs_address
    if named not in ("", "auto", here):
        raise InputError.one(
            "a process can use one Ray cluster at a time",
            f"ray_address={named!r}, and it is connected to {here!r}",
            "Call ray.shutdown() first.",
        )
