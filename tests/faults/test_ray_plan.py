"""A plan made for the nodes of a Ray cluster is carried out, and continued on one machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.jobs.placement import NodeSize
from asynckfold.results.utilization import decided_of, forecast_of, packing_of
from tests.engines.ray_start import ended, first_checkpoint, needs_ray, sweep
from tests.faults.test_ray import Nodes, nodes

__all__ = ["nodes"]

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

# A number of jobs is binding: three cores, whoever else uses those of this machine.
GIVEN = {"EPOCHS": "60", "N_JOBS": "3"}


def widths(root: Path) -> list[int]:
    with RunStore.read(root) as store:
        return [len(group) for group in store.plan.groups]


def test_a_plan_for_three_nodes_is_continued_on_one_machine(root: Path, nodes: Nodes) -> None:
    for name in ("one", "two"):
        nodes("add", name)
    whole = root.with_name("whole")
    printed = ended(sweep("decided", "ray", whole, nodes.address, **GIVEN))
    assert printed.endswith(" 6")
    # Three nodes of one core, whatever this machine has.
    assert widths(whole) == [2, 2, 2]
    with RunStore.read(whole) as store:
        decided, packing, foreseen = decided_of(store), packing_of(store), forecast_of(store)
        assert {item.node for item in store.attempts()} == {"", "one", "two"}
        assert decided is not None
        assert (decided.cores, decided.nodes) == (3, (NodeSize(1),) * 3)
        assert packing is not None
        assert packing.cores == 3
        assert foreseen is not None
        assert {span.node for span in foreseen.simulation.spans} == {"node-0", "node-1", "node-2"}
        plan = store.plan
    begun = sweep("decided", "ray", root, nodes.address, **GIVEN)
    first_checkpoint(root)
    os.killpg(begun.pid, signal.SIGINT)
    begun.communicate(timeout=200)
    assert begun.returncode != 0
    assert ended(sweep("decided", "process", root, **GIVEN)) == printed
    with RunStore.read(root) as store:
        assert store.plan.fingerprint == plan.fingerprint
        assert any(item.outcome == "interrupted" for item in store.attempts())
        again = decided_of(store)
        assert again is not None
        assert again.nodes == (NodeSize(1),) * 3


def test_processes_that_no_node_can_hold_are_refused(root: Path, nodes: Nodes) -> None:
    nodes("add", "one")
    refused = sweep("allreduce", "ray", root, nodes.address)
    out, _ = refused.communicate(timeout=300)
    assert refused.returncode != 0
    assert "processes=2, and the largest node, this machine, has 1 core" in out
    assert not (root / "run.db").exists()
