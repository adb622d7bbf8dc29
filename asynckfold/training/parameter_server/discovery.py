"""How a server and its replicas find each other: by the environment, or a torch process group.

The group's store, which all ranks reach, holds the address. The group itself carries nothing: see
the package on why replicas use plain TCP.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asynckfold.errors import InputError, PeerLostError
from asynckfold.system import terminal

KEY = "asynckfold/parameter_server"

_served: list[Any] = []
"""The process group that a server of this process has served."""


def has_group() -> bool:
    """Whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def default_address() -> str:
    """Return torchrun's ``MASTER_ADDR:MASTER_PORT``, else torch's default port on this machine.

    In a group, whose store has that port, any port that is free.
    """
    port = "0" if has_group() else os.environ.get("MASTER_PORT", "29500")
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"


@contextlib.contextmanager
def published(address: str) -> Iterator[int]:
    """Tell the other ranks the address of the server; yield how many they are."""
    store, mine = _store("Server.run"), f"{dist.get_rank()} {address}"
    published_by = store.compare_set(KEY, "", mine).decode()
    if published_by != mine:
        raise InputError.one(
            "one rank of a process group is the server",
            f"rank {mine.split()[0]} while rank {published_by.split()[0]} serves",
            "Call Server.run on rank 0 only, and make a Hogwild on the other ranks.",
        )
    try:
        yield dist.get_world_size() - 1
    finally:
        _served[:] = [dist.group.WORLD]
        with contextlib.suppress(RuntimeError):
            store.delete_key(KEY)


def server_address(timeout_s: float) -> str:
    """Return the address that the group's server published; wait up to `timeout_s` for it.

    Raises
    ------
    PeerLostError
        No rank serves in time, or the process with the group's store has ended.
    SystemExit
        This rank has served the group, and all replicas are done.
    """
    if _served and _served[0] is dist.group.WORLD:
        # A script whose server never returns makes its optimizer below, on every rank.
        terminal.complain("this rank has served until the replicas left; it ends here")
        raise SystemExit(0)
    store = _store("Hogwild without an address")
    try:
        store.wait([KEY], timedelta(seconds=timeout_s))
        return str(store.get(KEY).decode().partition(" ")[2])
    except RuntimeError as error:
        raise PeerLostError(
            f"no rank of the process group serves within {timeout_s:g} s: is Server(model).run() "
            "called on rank 0, and does its process still run? Call it, or pass a greater timeout_s"
        ) from error


def _store(caller: str) -> Any:
    """Return the store of the process group; refuse none, and one without another rank."""
    size = dist.get_world_size() if has_group() else 0
    if size < 2:
        raise InputError.one(
            f"{caller} needs a torch process group with a server and at least one replica",
            f"a world size of {size}" if size else "none in this process",
            "Call torch.distributed.init_process_group on two or more ranks first, or Server.serve "
            "with the number of replicas.",
        )
    return dist.distributed_c10d._get_default_store()
