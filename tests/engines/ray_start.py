"""Starts Ray for tests, and says why they are skipped without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from asynckfold.api.resources import Sharing
from asynckfold.engines.ray_cluster import NodeSettings, RayCluster, ray_cluster
from asynckfold.system.signals import Interruption
from tests import leftovers

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: pip install 'asynckfold[ray]'"
)

PATIENCE_SECONDS = 200.0
"""On a machine that is busy with other tests, a process of Ray may take long to start."""


@contextmanager
def started(address: str | None = None, cores: int = 2) -> Iterator[RayCluster]:
    """Yield a Ray of this machine, or the cluster at an address."""
    told = NodeSettings(Sharing().machine, "auto", 0, "auto", ("test",))
    with ray_cluster(address, None, PATIENCE_SECONDS, told, cores, Interruption()) as cluster:
        leftovers.rays.append(cluster.head)
        yield cluster
