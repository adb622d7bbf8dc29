"""What a sweep may use of the nodes of a cluster, as they are at its start."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from asynckfold.jobs.placement import NodeSize
from asynckfold.sweep.engine_factory import Engines
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption


def node(name: str, cores: int, gpus: int = 0) -> tuple[str, NodeSize]:
    return name, NodeSize(cores, gpus)


def engines(
    *nodes: tuple[str, NodeSize], n_jobs: int | str | None = "auto", threads: int = 1
) -> tuple[NodeSize, ...]:
    cluster: Any = SimpleNamespace(sizes=dict(nodes)) if nodes else None
    data: Any = None
    machine = Machine("cpu")
    inbox: Any = queue.SimpleQueue()
    made = Engines(
        *("ray", None, data, machine, inbox, Interruption(), n_jobs, threads, None, None, cluster)
    )
    return made.nodes


def sizes(*cores: int) -> tuple[NodeSize, ...]:
    return tuple(map(NodeSize, cores))


def test_all_nodes_that_train_count_however_busy_they_are() -> None:
    assert engines(node("", 2), node("x", 4, 1)) == (NodeSize(2), NodeSize(4, 1))
    # A cluster of one other node is no plan of this machine.
    assert engines(node("x", 4)) == sizes(4)
    # One machine has no nodes.
    assert engines() == engines(node("", 2)) == ()
    assert engines(node("", 2), n_jobs=1) == ()


@pytest.mark.parametrize(
    ("n_jobs", "threads", "expected"),
    [
        (-1, 1, (4, 4)),
        (-2, 1, (3, 3)),
        (-3, 2, (4, 4)),
        (-4, 2, (2, 2)),
        (8, 1, (4, 4)),
        (5, 1, (4, 1)),
        (3, 2, (4, 2)),
        (3, 1, (3,)),
    ],
)
def test_n_jobs_is_for_all_nodes_together_and_a_negative_one_for_each(
    n_jobs: int, threads: int, expected: tuple[int, ...]
) -> None:
    found = engines(node("", 4), node("x", 4), n_jobs=n_jobs, threads=threads)
    assert found == sizes(*expected)
