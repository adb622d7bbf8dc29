"""Jobs of three replicas on three nodes at once, each of which has one core; one has the server."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from statistics import fmean

import pytest

from asynckfold.store import RunStore
from tests.engines.ray_start import ended, first_checkpoint, needs_ray, sweep
from tests.faults.test_ray import Nodes, nodes
from tests.faults.test_ray_spans import forked, others, outcomes, partners, told
from tests.leftovers import gone, until

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

__all__ = ["nodes"]

SPREAD = {"PROCESSES": "3", "PER_NODE": "1", "N_JOBS": "-1"}


def test_replicas_on_three_nodes_learn(root: Path, nodes: Nodes) -> None:
    for name in ("one", "two"):
        nodes("add", name)
    process = sweep("parameter_server", "ray", root, nodes.address, **SPREAD)
    assert ended(process).split()[-1] == "6"
    assert {text.removeprefix("its further processes are on ") for text in partners(root)} <= {
        "one, two",
        "two, one",
    }
    assert len(partners(root)) == 6
    assert told(root).count(" pushes, with a mean staleness of ") == 6
    with RunStore.read(root) as store:
        found = [item.epochs[-1].accuracy for item in store.results().values()]
    # The mean was 0.70; two processes on one node reached 0.71 in these four epochs.
    assert fmean(item or 0.0 for item in found) > 0.5


def test_a_killed_rank_and_a_killed_node_cost_an_attempt_each(root: Path, nodes: Nodes) -> None:
    nodes("add", "one")
    nodes("add", "two")
    process = sweep("parameter_server", "ray", root, nodes.address, **SPREAD)
    first_checkpoint(root)
    until(lambda: len(others(nodes, root)) == 2, 60)
    os.kill(others(nodes, root)[0], signal.SIGKILL)
    until(lambda: "died" in outcomes(root), 60)
    nodes("kill", "one")
    until(lambda: "interrupted" in outcomes(root), 60)
    until(lambda: "nothing can start: 3 nodes with 1 free core each" in told(root), 60)
    nodes("add", "late")
    assert ended(process).split()[-1] == "6"
    assert outcomes(root) == ["died", "interrupted", *["ok"] * 6]


@pytest.mark.crashes("a kill may leave a file that is being written")
def test_an_ended_sweep_leaves_nothing_and_is_continued(root: Path, nodes: Nodes) -> None:
    nodes("add", "one")
    nodes("add", "two")
    process = sweep("parameter_server", "ray", root, nodes.address, **SPREAD)
    first_checkpoint(root)
    servers, workers = forked(nodes)
    assert len(workers) >= 3
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=200)
    assert process.returncode != 0
    assert time.monotonic() - begun < 60
    assert gone(servers | workers, 60)
    assert ended(sweep("parameter_server", "ray", root, nodes.address, **SPREAD)).split()[-1] == "6"
