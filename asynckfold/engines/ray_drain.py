"""Nodes that Ray drains: a cloud has given notice that it will take them away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asynckfold.errors import InputError

WHY = "will end, as Ray drains it"


def draining() -> dict[str, str]:
    """Return, by Ray's identities, why nodes that are there get no tasks any more."""
    from ray._private.state import state

    read = getattr(state, "get_draining_nodes", dict)
    return dict.fromkeys(read(), WHY)


def staying(found: Sequence[dict[str, Any]], here: str) -> list[dict[str, Any]]:
    """Return the nodes that are not drained.

    Raises
    ------
    InputError
        The node of this machine is.
    """
    leaving = draining()
    if here in leaving:
        raise InputError.one(
            "the node of this machine must stay in the Ray cluster for the run",
            f"it {WHY}",
            "Start the call on another node.",
        )
    return [item for item in found if item["NodeID"] not in leaving]
