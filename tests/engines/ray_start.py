"""Starts Ray for tests, and says why they are skipped without it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pytest

from asynckfold.api.arguments import MachineArguments
from asynckfold.engines.ray_cluster import RayCluster, ray_cluster
from asynckfold.engines.ray_node import NodeSettings
from tests import leftovers
from tests.leftovers import descendants, processes, until

SWEEP = Path(__file__).with_name("ray_sweep.py")

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: pip install 'asynckfold[ray]'"
)

PATIENCE_SECONDS = 200.0
"""On a machine that is busy with other tests, a process of Ray may take long to start."""


@contextmanager
def started(
    address: str | None = None, cores: int = 2, stall_timeout: float | str = "auto"
) -> Iterator[RayCluster]:
    """Yield a Ray of this machine, or the cluster at an address."""
    leftovers.rays.append(address or "")
    told = NodeSettings(MachineArguments().machine, "auto", 0, stall_timeout, ("test",))
    with ray_cluster(address, None, PATIENCE_SECONDS, told, cores) as cluster:
        yield cluster


SWEEP_ROOT = "AKF_TEST_ROOT"
"""Variable of all that a sweep starts, a Ray of its own among it: the folder of its run."""


def sweep(kind: str, engine: str, root: Path, *more: str, **variables: str) -> Popen[str]:
    """Start a sweep (`tests.engines.ray_sweep`) in another folder: nothing is found by accident."""
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return Popen(
        [sys.executable, str(SWEEP), kind, engine, str(root), *more],
        env={**os.environ, "PYTHONPATH": paths, SWEEP_ROOT: str(root), **variables},
        cwd=elsewhere,
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: Popen[str]) -> str:
    """Return what a sweep printed: one line; Ray tells of lost processes before it."""
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, out
    return out.splitlines()[-1]


def first_checkpoint(root: Path) -> None:
    """Wait until a job of a sweep has saved itself."""
    until(lambda: bool([*root.glob("net/*/*/checkpoint*")]), 300)


def raylet_of(root: Path) -> int:
    """Return the raylet of the Ray that a sweep has started; no parent leads there from it."""
    mark = f"{SWEEP_ROOT}={root}".encode()
    for pid in processes():
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{pid}")
            if place.joinpath("comm").read_text().strip() != "raylet":
                continue
            if mark in place.joinpath("environ").read_bytes().split(b"\0"):
                return pid
    raise ProcessLookupError(f"no raylet of the sweep in {root}")


def named(name: str, above: int) -> set[int]:
    """Return the processes below another one that Ray has given this name, as to tasks and actors.

    Whoever else runs a Ray on this machine has processes of the same names.
    """
    found = set()
    for pid in descendants(above):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                found.add(pid)
    return found
