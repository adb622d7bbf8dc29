"""Bytes for which Ray's shared memory has no room, on a node or on this machine.

Ray keeps what is larger than 100 KiB in the shared memory of a node, then on its disk, and raises
where both are full. Samples need that room: a node without it is left out. Checkpoints and results
do not: they then travel in small pieces, within Ray's messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from asynckfold.engines.ray_handle import NodeHandle, sizes
from asynckfold.engines.ray_pieces import PIECE_BYTES, PIECES, pieces_of
from asynckfold.errors import InputError

WHY = "has no room for the data in Ray's object store and on its disk"

LOOK_SECONDS = 1.0

LATE_SECONDS = 60.0
"""How long what a node has sent may be on its way to this machine's shared memory."""


def is_without_room(error: BaseException) -> bool:
    """Whether Ray's shared memory and the disk behind it are full."""
    from ray import exceptions

    return isinstance(error, (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError))


def put(values: Iterable[Any], needed: int) -> list[Any]:
    """Put values into the shared memory of this machine's node.

    Raises
    ------
    InputError
        It has no room.
    """
    import ray

    try:
        return [ray.put(value) for value in values]
    except ray.exceptions.RayError as error:
        if not is_without_room(error):
            raise
        raise no_room([f"the node of this machine {WHY}"], needed) from error


def no_room(found: Sequence[str], needed: int) -> InputError:
    """Return the error of a cluster of which no node can hold the data."""
    return InputError.one(
        "a node of the Ray cluster must have room for the data",
        f"{needed / 2**20:,.0f} MiB of data; {'; '.join(found)}",
        "Free the disk of Ray's folder (/tmp/ray), start the nodes with a larger "
        "--object-store-memory, or pass fewer or smaller samples.",
    )


def check(nodes: Mapping[str, NodeHandle], needed: int) -> None:
    """Wait until a node that may train has the data.

    Raises
    ------
    InputError
        None has room.
    """
    import ray

    waiting = {node.begun: node for node in nodes.values() if node.name in sizes(nodes.values())}
    found = []
    while waiting:
        ready, _ = ray.wait([*waiting], num_returns=1, timeout=LOOK_SECONDS)
        for call in ready:
            if not lacks_room(node := waiting.pop(call)):
                return
            found.append(f"{node.place} {WHY}")
        waiting = {call: node for call, node in waiting.items() if not node.is_lost}
    if found:
        raise no_room(found, needed)


def lacks_room(node: NodeHandle) -> bool:
    """Whether a node has answered that it has no room for the data."""
    import ray

    try:
        ray.get(node.begun)
    except ray.exceptions.RayError as error:
        return is_without_room(error)
    return False


def received(actor: Any, call: Any) -> bytes:
    """Return what a poll of a node has answered, in pieces if there is no room for the whole."""
    import ray

    try:
        return bytes(ray.get(call, timeout=LATE_SECONDS))
    except ray.exceptions.GetTimeoutError:
        pass
    except ray.exceptions.RayError as error:
        if not is_without_room(error):
            raise
    return _in_pieces(actor)


def _in_pieces(actor: Any) -> bytes:
    import ray

    found: list[bytes] = []
    ask = actor.again.options(num_returns=PIECES)
    while not found or len(found[-1]) == PIECE_BYTES:
        found += ray.get(ask.remote(len(found) * PIECE_BYTES))
    return b"".join(found)


def send(actor: Any, files: Iterable[tuple[str, bytes]]) -> Iterator[Any]:
    """Send files to a node in pieces, and yield its answers."""
    step = PIECES * PIECE_BYTES
    for name, data in files:
        for start in range(0, max(1, len(data)), step):
            pieces = filter(None, pieces_of(data, start))
            yield actor.receive.remote(name, len(data), start, *pieces)
