"""A node that will be preempted: its jobs save themselves and continue elsewhere in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynckfold.store import RunStore
from tests.engines.ray_start import ended, first_checkpoint, needs_ray, sweep
from tests.faults.test_ray import Nodes, nodes
from tests.faults.test_ray_spans import outcomes, told
from tests.leftovers import until

__all__ = ["nodes"]

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]


def where(root: Path, outcome: str) -> list[str]:
    """Return the nodes of the attempts that ended so."""
    with RunStore.read(root) as store:
        return [item.node for item in store.attempts() if item.outcome == outcome]


def test_a_node_that_drains_gets_no_jobs_and_its_own_continue_elsewhere(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    for name in ("one", "two"):
        nodes("add", name)
    expected = ended(sweep("plain", "process", tmp_path / "process"))
    process = sweep("plain", "ray", root, nodes.address, N_JOBS="3")
    until(lambda: len([*root.glob("net/*/*/log.txt")]) == 3)
    first_checkpoint(root)
    nodes("drain", "two", "600")
    until(lambda: where(root, "interrupted") == ["two"], 60)
    assert "node two will end" in told(root)
    with RunStore.read(root) as store:
        before = sum(item.node == "two" for item in store.attempts())
    assert ended(process) == expected
    assert sorted(outcomes(root)) == ["interrupted", *["ok"] * 6]
    with RunStore.read(root) as store:
        assert sum(item.node == "two" for item in store.attempts()) == before
