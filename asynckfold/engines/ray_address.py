"""What is checked of a Ray cluster before anything starts: its address, and its nodes' versions.

Ray is not imported.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any

from asynckfold.errors import InputError, Problem

_LOOK_SECONDS, _ANSWER_SECONDS, _GREETING_SECONDS = 0.05, 1.0, 10.0


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
    place = named(address)
    if place.startswith("ray://"):
        return [
            Problem(
                "ray_address must be that of a cluster which this machine is a node of",
                repr(place),
                "Start the call on a node of the cluster, or make this machine one by "
                "`ray start --address=HOST:PORT`, and pass ray_address='HOST:PORT'.",
            )
        ]
    return []


def named(address: str | None) -> str:
    """Return the address that was asked for, also by Ray's own variable; empty: none."""
    return address or os.environ.get("RAY_ADDRESS", "")


def knock(address: str, timeout_s: float) -> None:
    """Wait until the head of a cluster answers at an address.

    Raises
    ------
    InputError
        Nothing did in time, or something else.
    """
    host, _, port = address.rpartition(":")
    end, reason = time.monotonic() + timeout_s, ""
    while time.monotonic() < end:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
                reason = _not_a_head(address, max(_GREETING_SECONDS, end - time.monotonic()))
        except (OSError, ValueError) as error:
            reason = str(error)
        if not reason:
            return
        time.sleep(_LOOK_SECONDS)
    raise InputError.one(
        f"ray_address must answer within connect_timeout_s={timeout_s:g}",
        f"{address!r}: {reason}",
        "Start the cluster's head (`ray start --head`), pass the HOST:PORT that it prints, or wait "
        "longer by connect_timeout_s.",
    )


def _not_a_head(address: str, seconds: float) -> str:
    """Return why what listens at an address is no head of Ray.

    Asked in another process: Ray's library waits for minutes, and may end its process then.
    """
    code = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
    words = [sys.executable, "-c", code, address]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"something listens there, and is no head of Ray within {seconds:.0f} s"
    if not done.returncode:
        return ""
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"something listens there, and is no head of Ray: {last[:200]}"


def answers(address: str) -> bool:
    """Whether something listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def own_address(head: str) -> str:
    """Return the address of this machine in the network in which it reaches the head."""
    host, _, port = head.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS) as channel:
        return str(channel.getsockname()[0])


def listens(path: str) -> bool:
    """Whether a process of this machine listens at a socket."""
    with socket.socket(socket.AF_UNIX) as channel:
        try:
            channel.connect(path)
        except OSError:
            return False
        return True


def version_reader() -> Callable[[bool], tuple[str, str, str]]:
    """Return a function that reads the versions of asynckfold and torch, and the kind of processor.

    It travels by value: a node may have no asynckfold. The kind is read where there are `several`
    nodes to compare, since the import of torch takes seconds.
    """

    def versions(several: bool) -> tuple[str, str, str]:
        # By value: the node may have no asynckfold.
        from importlib.metadata import PackageNotFoundError, version

        try:
            there = version("asynckfold"), version("torch")
        except PackageNotFoundError:
            return "", "", ""
        if not several:
            return (*there, "")
        from asynckfold.jobs.reproducibility import CPU
        from asynckfold.training.software import software

        return (*there, software(1)[CPU])

    return versions


def version_problem(place: str, there: tuple[str, str], here: tuple[str, str]) -> Problem:
    """Return the problem of a node whose versions of asynckfold and torch are not those here."""
    asynckfold, torch = here
    return Problem(
        "each node of the cluster needs asynckfold and torch, in the versions here",
        f"{place}: {there[0] or 'none'} and {there[1] or 'none'}; here {asynckfold} and {torch}",
        f"Run there: pip install 'asynckfold[ray]=={asynckfold}' 'torch=={torch}', or pass "
        "ray_runtime_env={'pip': [...]}.",
    )


def host_of(item: Mapping[str, Any]) -> str:
    """Return host and address of a node, for people."""
    return f"{item['NodeManagerHostname']} ({item['NodeManagerAddress']})"


def free_name(item: Mapping[str, Any], taken: Collection[str]) -> str:
    """Return a node's own name or that of its host, with a number if that is taken."""
    address = item["NodeManagerAddress"]
    own = item.get("NodeName") or address
    name = item.get("NodeManagerHostname") or address if own == address else own
    taken = {*taken, socket.gethostname()}
    return next(
        found
        for number in itertools.count(1)
        if (found := name if number == 1 else f"{name}-{number}") not in taken
    )


def connection_problem(address: str, error: Exception) -> Problem:
    """Return the problem of a cluster that cannot be joined."""
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
