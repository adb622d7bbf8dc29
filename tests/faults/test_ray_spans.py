"""All-reduce jobs of two processes on two nodes at once, each of which has one core.

Where a node has a GPU, too, that is a stand-in (`tests.engines.stand_in`), and gloo is for NCCL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from asynckfold.store import RunStore
from tests.engines.ray_nodes import STAND_IN
from tests.engines.ray_start import ended, first_checkpoint, needs_ray, sweep
from tests.faults.test_ray import Nodes, nodes
from tests.leftovers import descendants, gone, until

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

__all__ = ["nodes"]

SPREAD = {"PER_NODE": "1", "N_JOBS": "-1"}


def outcomes(root: Path) -> list[str]:
    with RunStore.read(root) as store:
        return sorted(item.outcome or "" for item in store.attempts())


def told(root: Path) -> str:
    """Return the log of the run."""
    with RunStore.read(root) as store:
        return "\n".join(item.text for item in store.events())


def forked(nodes: Nodes) -> tuple[set[int], set[int]]:
    """Return the fork servers of the nodes, and all that has been forked from them and lives."""
    found = {}
    for pid in descendants(nodes.process.pid):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            if b"fork_server import serve" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = int(stat.rpartition(")")[2].split()[1])
    workers = {pid for pid, parent in found.items() if parent in found}
    return {*found} - workers, workers


def others(nodes: Nodes, root: Path) -> list[int]:
    """Return the processes that are connected to rank 0 of a job."""
    with RunStore.read(root) as store:
        firsts = {item.pid for item in store.attempts()}
    found = []
    for pid in forked(nodes)[1] - firsts:
        with contextlib.suppress(psutil.Error):
            if any(
                item.status == "ESTABLISHED" for item in psutil.Process(pid).net_connections("tcp")
            ):
                found.append(pid)
    return found


def partners(root: Path) -> list[str]:
    """Return what the run tells of the nodes of its jobs."""
    with RunStore.read(root) as store:
        return [item.text for item in store.events() if item.kind == "nodes"]


def test_the_numbers_are_those_of_one_node_and_too_few_nodes_are_refused(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    expected = ended(sweep("allreduce", "process", tmp_path / "process"))
    refused = sweep("allreduce", "ray", tmp_path / "refused", nodes.address, **SPREAD)
    out, _ = refused.communicate(timeout=200)
    assert refused.returncode != 0
    assert "and 1 of 1 nodes with 1 core. Pass fewer processes" in " ".join(out.split())
    nodes("add", "one")
    assert ended(sweep("allreduce", "ray", root, nodes.address, **SPREAD)) == expected
    assert partners(root) == ["its further processes are on one"] * 6
    assert "not restored" not in told(root)


def test_a_node_of_a_rank_is_killed_and_the_job_goes_on_with_another(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    nodes("add", "one")
    expected = ended(sweep("allreduce", "process", tmp_path / "process"))
    process = sweep("allreduce", "ray", root, nodes.address, **SPREAD)
    first_checkpoint(root)
    nodes("kill", "one")
    # Within seconds, although no node can replace it, and without blame.
    until(lambda: "interrupted" in outcomes(root), 60)
    until(lambda: "nothing can start: 2 nodes with 1 free core each" in told(root), 60)
    nodes("add", "late")
    assert ended(process) == expected
    assert {*outcomes(root)} == {"ok", "interrupted"}
    assert outcomes(root).count("ok") == 6
    assert {*partners(root)} == {f"its further processes are on {name}" for name in ("one", "late")}


def test_a_killed_rank_of_another_node_costs_one_attempt(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    nodes("add", "one")
    expected = ended(sweep("allreduce", "process", tmp_path / "process"))
    process = sweep("allreduce", "ray", root, nodes.address, **SPREAD)
    first_checkpoint(root)
    until(lambda: bool(others(nodes, root)), 60)
    for rank in others(nodes, root):
        os.kill(rank, signal.SIGKILL)
    assert ended(process) == expected
    assert outcomes(root) == ["died", *["ok"] * 6]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.crashes("a kill may leave a file that is being written")
def test_an_ended_sweep_leaves_nothing_and_is_continued(
    root: Path, tmp_path: Path, nodes: Nodes, number: signal.Signals
) -> None:
    nodes("add", "one")
    expected = ended(sweep("allreduce", "process", tmp_path / "process"))
    process = sweep("allreduce", "ray", root, nodes.address, **SPREAD)
    first_checkpoint(root)
    servers, workers = forked(nodes)
    assert len(workers) >= 2
    begun = time.monotonic()
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    process.communicate(timeout=200)
    assert process.returncode != 0
    assert time.monotonic() - begun < 60
    assert gone(servers | workers, 60)
    assert ended(sweep("allreduce", "ray", root, nodes.address, **SPREAD)) == expected


# A GPU for each process


def on_one_node(root: Path, taken: Path, **more: str) -> str:
    """Return what a sweep on two GPUs of this machine prints."""
    paths = os.pathsep.join([str(STAND_IN), *(str(Path(path).absolute()) for path in sys.path)])
    gpus = {"STAND_IN_GPUS": "MIG-a MIG-b", "PYTHONPATH": paths, "TAKEN": str(taken)}
    return ended(sweep("allreduce", "process", root, **gpus, **more))


def test_gpus_of_two_nodes_give_the_numbers_of_one_and_too_few_are_refused(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    expected = on_one_node(tmp_path / "process", tmp_path / "here", EPOCHS="1")
    assert {*(tmp_path / "here").read_text().split()} == {"MIG-a", "MIG-b"}
    taken = tmp_path / "taken"
    # The node of this process, the first one, has none.
    nodes("add", "one", "MIG-one")
    given = {"PER_NODE": "1", "N_JOBS": "1", "EPOCHS": "1", "TAKEN": str(taken)}
    refused = sweep("allreduce", "ray", tmp_path / "refused", nodes.address, **given)
    out, _ = refused.communicate(timeout=200)
    assert refused.returncode != 0
    told = "received processes={'gpu': 2}, processes_per_node=1, and 1 of 2 nodes with 1 core and 1"
    assert f"{told} GPU. Pass fewer processes" in " ".join(out.split())
    nodes("add", "two", "MIG-two")
    assert ended(sweep("allreduce", "ray", root, nodes.address, **given)) == expected
    assert sorted(taken.read_text().split()) == ["MIG-one"] * 6 + ["MIG-two"] * 6
    assert {*partners(root)} <= {f"its further processes are on {name}" for name in ("one", "two")}
    with RunStore.read(root) as store:
        assert next(iter(store.software()))["collectives"] == "gloo"
        assert {item.device for item in store.results().values()} == {"cuda:0"}
        assert store.plan.params.by_kind == "processes={'gpu': 2}"


def test_a_node_with_a_gpu_of_a_job_is_killed_and_another_takes_its_place(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    expected = on_one_node(tmp_path / "process", tmp_path / "here")
    for name in ("one", "two"):
        nodes("add", name, f"MIG-{name}")
    taken = tmp_path / "taken"
    process = sweep("allreduce", "ray", root, nodes.address, **SPREAD, TAKEN=str(taken))
    first_checkpoint(root)
    nodes("kill", "two")
    until(lambda: "interrupted" in outcomes(root), 60)
    told_of = "nothing can start: 2 nodes with 1 free core and 1 free GPU each"
    until(lambda: told_of in told(root), 60)
    nodes("add", "late", "MIG-late")
    assert ended(process) == expected
    assert {*outcomes(root)} == {"ok", "interrupted"}
    assert {*taken.read_text().split()} == {"MIG-one", "MIG-two", "MIG-late"}
