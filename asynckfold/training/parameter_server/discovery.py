"""How a server and its replicas find each other through a torch process group.

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

from asynckfold.errors import InputError, PeerLostError, Problem, refuse
from asynckfold.system import terminal
from asynckfold.training.parameter_server import wire

KEY = "asynckfold/parameter_server"

_served: list[Any] = []
"""The process group that a server of this process has served."""


def has_group() -> bool:
    """Whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def address_to_bind() -> str:
    """Return where a server listens by default: in a group, the store has MASTER_PORT."""
    if not has_group():
        return wire.default_address()
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:0"


def group_problems(caller: str) -> Iterator[Problem]:
    """Refuse no process group, and one without another rank."""
    if not has_group():
        yield Problem(
            f"{caller} needs a process group",
            "none in this process",
            "Call torch.distributed.init_process_group on every rank first, or Server.serve with "
            "the number of replicas.",
        )
    elif dist.get_world_size() < 2:
        yield Problem(
            f"{caller} needs a process group with a server and at least one replica",
            f"a world size of {dist.get_world_size()}",
            "Start at least two ranks with world_size=2.",
        )


@contextlib.contextmanager
def published(address: str) -> Iterator[int]:
    """Tell the other ranks the address of the server; yield how many they are.

    Raises
    ------
    InputError
        There is no process group, no other rank, or another rank serves already.
    """
    refuse(group_problems("Server.run"))
    mine, store = f"{dist.get_rank()} {address}", _store()
    published_by = store.compare_set(KEY, "", mine).decode()
    if published_by != mine:
        rank = published_by.partition(" ")[0]
        problem = Problem(
            "one rank of a process group is the server",
            f"rank {dist.get_rank()} while rank {rank} serves",
            "Call Server.run on rank 0 only, and make a Hogwild on the other ranks.",
        )
        raise InputError([problem])
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
    InputError
        This process is the only rank, or serves itself.
    PeerLostError
        No rank serves in time, or the process with the group's store has ended.
    SystemExit
        This rank has served the group, and all replicas are done.
    """
    if _served and _served[0] is dist.group.WORLD:
        # A script whose server never returns makes its optimizer below, on every rank.
        terminal.complain("this rank has served until the replicas left; it ends here")
        raise SystemExit(0)
    refuse(group_problems("Hogwild without an address"))
    store = _store()
    try:
        store.wait([KEY], timedelta(seconds=timeout_s))
        return str(store.get(KEY).decode().partition(" ")[2])
    except RuntimeError as error:
        raise PeerLostError(
            f"no rank of the process group serves within {timeout_s:g} s: is Server(model).run() "
            "called on rank 0, and does its process still run? Call it, or pass a greater timeout_s"
        ) from error


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
